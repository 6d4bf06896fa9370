"""A connected socket as a stream of bytes (`server.sockets.ByteStream`)."""

from __future__ import annotations

import asyncio
import socket

READ_BYTES = 256 * 1024


class SocketBytes:
    """Takes the socket over; `close` it."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock

    async def read(self) -> bytes:
        """b"" at the end, also when the other side has died."""
        try:
            return await asyncio.get_running_loop().sock_recv(self._socket, READ_BYTES)
        except OSError:
            return b""

    async def write(self, data: bytes) -> None:
        """Waits while the other side takes nothing. Raises OSError when it is gone."""
        await asyncio.get_running_loop().sock_sendall(self._socket, data)

    def close(self) -> None:
        """At once."""
        self._socket.close()
