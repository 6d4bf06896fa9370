"""Options of TCP sockets by which the kernel notices that the host at the other end is gone, or the way to it is cut.

An answer that takes long (a batch) may say nothing for long; without these whoever reads it would wait for its deadline
when no packet tells that the other side has died. A peer that lives and is slow is never cut.
"""

from __future__ import annotations

import socket

IDLE_S, EVERY_S, TIMES = 20, 10, 3
"""After so long in silence the kernel asks, and again; after so many in vain the connection is lost: 50 s."""
UNHEARD_MS = 60_000
"""Bytes sent and not acknowledged for so long: it is lost, too (Linux; else after a quarter of an hour)."""
_NAMES = (
    ("TCP_KEEPIDLE", IDLE_S),
    ("TCP_KEEPINTVL", EVERY_S),
    ("TCP_KEEPCNT", TIMES),
    ("TCP_USER_TIMEOUT", UNHEARD_MS),
)


def socket_options() -> list[tuple[int, int, int]]:
    """(level, option, value) for setsockopt; those this system has."""
    found = [(socket.IPPROTO_TCP, getattr(socket, name), value) for name, value in _NAMES if hasattr(socket, name)]
    return [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1), *found]
