"""WebSockets on their way to an edge: the handshake is made there first, then messages pass both ways as they are.

Each side is read no faster than the other takes it. An edge's refusal reaches the client as an error of the handshake;
either side's end ends the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from websockets.asyncio.client import ClientConnection, connect, unix_connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus, InvalidURI

from opendsec import errors
from opendsec.apiserver.link import EdgeLink
from opendsec.server import sockets
from opendsec.server.asgi import Receive, Scope, Send
from opendsec.wire import codec
from opendsec.wire.contracts import HEADER_PROJECT, HEADER_REQUEST_ID

OPEN_TIMEOUT_S = 30.0


async def forward_socket(
    link: EdgeLink,
    target: bytes,
    scope: Scope,
    receive: Receive,
    send: Send,
    *,
    project: str,
    request_id: str,
    sandbox_id: str,
) -> None:
    """One WebSocket. Raises the edge's own error, or SandboxLostError."""
    headers = [(HEADER_PROJECT, project), (HEADER_REQUEST_ID, request_id), *link.authorization]
    try:
        edge = await _connect(link, target.decode("ascii"), headers, scope.get("subprotocols") or ())
    except InvalidStatus as exc:
        body = bytes(exc.response.body or b"")
        raise codec.decode_error(body, fallback=f"edge {link.name} refused the WebSocket") from exc
    except (InvalidURI, UnicodeDecodeError) as exc:
        raise errors.RequestError("a WebSocket has no address like this", remedy="leave out what follows `#`") from exc
    except (OSError, TimeoutError, InvalidHandshake) as exc:
        raise link.unreachable(str(exc), sandbox_id=sandbox_id) from exc
    try:
        await sockets.accept(receive, send, subprotocol=edge.subprotocol)
        await _pass(edge, receive, send)
    finally:
        await edge.close()


async def _connect(
    link: EdgeLink, target: str, headers: Sequence[tuple[str, str]], subprotocols: Sequence[str]
) -> ClientConnection:
    given: dict[str, Any] = {
        "additional_headers": headers,
        "subprotocols": list(subprotocols) or None,
        "compression": None,
        "max_size": None,
        "open_timeout": OPEN_TIMEOUT_S,
        "user_agent_header": None,
    }
    if link.address.path is not None:
        return await unix_connect(str(link.address.path), f"ws://edge{target}", **given)
    return await connect(f"ws://{link.address}{target}", proxy=None, **given)


async def _pass(edge: ClientConnection, receive: Receive, send: Send) -> None:
    async def read() -> bytes | str | None:
        try:
            return await edge.recv()
        except ConnectionClosed:
            return None  # nobody counts on a last word

    async def write(message: bytes | str) -> None:
        try:
            await edge.send(message)
        except ConnectionClosed as exc:
            raise ConnectionResetError(str(exc)) from exc

    await sockets.pass_messages(read, write, receive, send)
