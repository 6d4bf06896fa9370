"""TCP ports for servers that a test starts by number.

They are below those the kernel gives to connections: one of these may be taken between the look and the start.
"""

from __future__ import annotations

import random
import socket
from pathlib import Path

_LOWEST = 12_000
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_port() -> int:
    """One nobody listens on now."""
    first_ephemeral = int(_EPHEMERAL.read_text(encoding="ascii").split()[0])
    for port in random.sample(range(_LOWEST, max(first_ephemeral, _LOWEST + 10_000)), 100):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError("a hundred ports in a row are taken")
