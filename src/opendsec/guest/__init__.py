"""The host's side of the guest protocol (docs/reference/guest-protocol.md): messages and one multiplexed channel per sandbox."""
