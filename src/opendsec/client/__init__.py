"""The SDK: what users' code sees. `_async` is written by hand, `_sync` is generated from it by `scripts/unasync.py`.

Only `wire`, `model` and `errors` are imported from OpenDSec; bytes, not imports, reach the servers.
"""
