"""The host's side of the guest protocol (docs/reference/guest-protocol.md).

Messages and one multiplexed channel per sandbox.
"""
