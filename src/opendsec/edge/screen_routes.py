"""Screen, mouse, keyboard and serial console of sandboxes that are whole machines, over HTTP.

    GET  screen            → PNG                      GET  serial?offset=&wait=   → bytes, header X-OpenDSec-Offset
    GET  screen/size       → ScreenSize               POST serial                 raw bytes → SerialStatus
    POST input             InputRequest → Empty

A paused sandbox is woken, as by any operation. It refuses by name what the backend has not, and what is not inside.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from opendsec import errors
from opendsec.backends.base import Capability
from opendsec.backends.console import Console
from opendsec.edge.node import Node
from opendsec.edge.requests import integer, nothing_else, number, project_of
from opendsec.edge.sandbox import Sandbox
from opendsec.model.screen import InputRequest, SerialStatus, check_input
from opendsec.server.asgi import Receive, Scope, Send, query, read_body, send_bytes, send_json
from opendsec.wire import codec
from opendsec.wire.contracts import HEADER_OFFSET, MAX_JSON_BODY, Empty

MAX_SERIAL_BODY = 64 * 1024
MAX_WAIT_S = 25.0
"""Longest wait for something new on the serial console; the answer is empty then."""
_OFFSET = HEADER_OFFSET.lower().encode("ascii")


class ScreenRoutes:
    """One per edge."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._routes: dict[tuple[str, str], Callable[..., Any]] = {
            ("GET", "screen"): self.picture,
            ("GET", "screen/size"): self.size,
            ("POST", "input"): self.input,
            ("GET", "serial"): self.serial,
            ("POST", "serial"): self.write_serial,
        }

    def find(self, method: str, rest: str) -> Callable[..., Any] | None:
        """The route of what follows the sandbox's id."""
        return self._routes.get((method, rest))

    def sandbox(self, sandbox_id: str, scope: Scope, capability: Capability) -> Sandbox:
        """Raises NotFoundError, UnsupportedError."""
        sandbox = self._node.get(sandbox_id, project=project_of(scope))
        sandbox.require(capability)
        return sandbox

    async def picture(self, sandbox_id: str, scope: Scope, _receive: Receive, send: Send) -> None:
        """GET screen"""
        sandbox = self.sandbox(sandbox_id, scope, Capability.SCREEN)
        nothing_else(query(scope))
        async with sandbox.working():
            picture = await console_of(sandbox).picture()
        await send_bytes(send, picture.png, media_type=b"image/png")

    async def size(self, sandbox_id: str, scope: Scope, _receive: Receive, send: Send) -> None:
        """GET screen/size"""
        sandbox = self.sandbox(sandbox_id, scope, Capability.SCREEN)
        nothing_else(query(scope))
        async with sandbox.working():
            picture = await console_of(sandbox).picture()
        await send_json(send, picture.size)

    async def input(self, sandbox_id: str, scope: Scope, receive: Receive, send: Send) -> None:
        """POST input"""
        sandbox = self.sandbox(sandbox_id, scope, Capability.INPUT)
        body = await read_body(scope, receive, limit=MAX_JSON_BODY)
        request = check_input(codec.decode(body, InputRequest))
        async with sandbox.working():
            await console_of(sandbox).act(request.actions)
        await send_json(send, Empty())

    async def serial(self, sandbox_id: str, scope: Scope, _receive: Receive, send: Send) -> None:
        """GET serial: what lies behind `offset`; with `wait`, that many seconds for something to come."""
        sandbox = self.sandbox(sandbox_id, scope, Capability.SERIAL)
        asked = query(scope)
        offset = integer(asked, "offset") or 0
        wait_s = number(asked.pop("wait", "0"), "wait", most=MAX_WAIT_S)
        nothing_else(asked)
        async with sandbox.working():
            console = console_of(sandbox)
            if wait_s and console.serial_total() <= offset:
                await console.serial_changed(offset, timeout_s=wait_s)
            at, data = console.serial_read(offset)
        await send_bytes(
            send, data, media_type=b"application/octet-stream", headers=[(_OFFSET, str(at).encode("ascii"))]
        )

    async def write_serial(self, sandbox_id: str, scope: Scope, receive: Receive, send: Send) -> None:
        """POST serial"""
        sandbox = self.sandbox(sandbox_id, scope, Capability.SERIAL)
        nothing_else(query(scope))
        data = await read_body(scope, receive, limit=MAX_SERIAL_BODY)
        async with sandbox.working():
            console = console_of(sandbox)
            await console.serial_write(data)
            total = console.serial_total()
        await send_json(send, SerialStatus(offset=total))


def console_of(sandbox: Sandbox) -> Console:
    """Raises SandboxLostError, ConflictError (it is not started yet)."""
    if sandbox.handle is None:
        raise errors.ConflictError("the sandbox has not been started yet", sandbox_id=sandbox.sandbox_id)
    return sandbox.backend.console(sandbox.handle)
