"""Connections to ports of a guest without an agent: through QEMU's user-mode network, inside the machine's own room.

QEMU listens in the room's network namespace, where nothing else is, and hands on to the guest's first address by DHCP.
Whether anybody listens inside shows only afterwards: a connection to a closed port is made, and ends at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket

from opendsec.errors import InvalidSpecError, NodeError, SandboxLostError
from opendsec.guest.base import GuestLostError, GuestStream
from opendsec.linux.network import socket_within
from opendsec.vm.q35 import Q35Machine
from opendsec.vm.q35_line import NET
from opendsec.vm.qmp import MonitorError

PRIVILEGED = 1024
"""Below it QEMU, which is nobody, cannot listen: such ports are 60000 higher, at another address of the loopback."""
READ_BYTES = 64 * 1024
CONNECT_TIMEOUT_S = 10.0


async def dial_forwarded(machine: Q35Machine, forwarded: set[int], port: int) -> GuestStream:
    """A connection. `forwarded`: ports QEMU was told of. Raises InvalidSpecError, NodeError, SandboxLostError."""
    if not 0 < port < 65536:
        raise InvalidSpecError(f"port: {port} is not between 1 and 65535", detail={"field": "port"})
    address = ("127.0.0.1", port) if port >= PRIVILEGED else ("127.0.0.2", 60000 + port)
    try:
        if port not in forwarded:
            await _forward(machine, address, port)
            forwarded.add(port)
        sock = await asyncio.to_thread(socket_within, machine.pidfd)
    except OSError as error:
        raise SandboxLostError(f"the machine's network is gone: {error}") from error
    sock.setblocking(False)
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            await asyncio.get_running_loop().sock_connect(sock, address)
    except (OSError, TimeoutError) as error:
        sock.close()
        raise NodeError(f"QEMU does not take a connection to port {port}: {error}", retryable=True) from error
    except BaseException:
        sock.close()
        raise
    return SocketStream(sock)


async def _forward(machine: Q35Machine, address: tuple[str, int], port: int) -> None:
    rule = f"tcp:{address[0]}:{address[1]}-:{port}"
    async with machine.monitor() as qmp:
        try:
            said = await qmp.execute("human-monitor-command", {"command-line": f"hostfwd_add {NET} {rule}"})
        except MonitorError as error:
            raise NodeError(f"QEMU does not forward port {port}: {error}") from error
    # An earlier edge may have asked for the same: then QEMU listens there already.
    if said.strip() and "Could not set up host forwarding rule" not in said:
        raise NodeError(f"QEMU does not forward port {port}: {said.strip()}")


class SocketStream(GuestStream):
    """A connected socket."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock

    async def read(self) -> bytes:
        try:
            return await asyncio.get_running_loop().sock_recv(self._socket, READ_BYTES)
        except OSError:
            return b""

    async def write(self, data: bytes) -> None:
        try:
            await asyncio.get_running_loop().sock_sendall(self._socket, data)
        except OSError as error:
            raise GuestLostError(f"the connection has ended: {error}") from error

    async def write_eof(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    async def aclose(self) -> None:
        self._socket.close()
