"""Addresses that show a sandbox's screen in a browser: made for one sandbox, good for minutes, known to this edge only.

    /view/{sandbox}/{token}/            a page
    /view/{sandbox}/{token}/novnc/…     noVNC's own files, of the Debian package `novnc`
    /view/{sandbox}/{token}/vnc         WebSocket, binary: RFB, until somebody closes it

The token is all it takes, so it is long and random and compared in constant time; an edge that ends forgets it. The
page and its scripts come from here and may talk to nothing else.
"""

from __future__ import annotations

import hmac
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opendsec import errors
from opendsec.backends.base import Capability
from opendsec.edge.node import Node
from opendsec.edge.requests import nothing_else, project_of
from opendsec.edge.sandbox import Sandbox
from opendsec.edge.screen_routes import console_of
from opendsec.edge.socket_stream import SocketBytes
from opendsec.model.screen import View, ViewRequest, check_view
from opendsec.server import sockets
from opendsec.server.asgi import ASGIApp, Receive, Scope, Send, query, read_body, send_bytes, send_json
from opendsec.wire import codec
from opendsec.wire.contracts import MAX_JSON_BODY, VIEW_ROOT

NOVNC = Path("/usr/share/novnc")
MAX_VIEWS = 64
"""Addresses of one sandbox that are good at once; its oldest goes first, never another sandbox's."""
_TYPES = {".js": b"text/javascript", ".css": b"text/css", ".svg": b"image/svg+xml", ".html": b"text/html"}
_POLICY = (
    b"default-src 'none'; script-src 'self' 'unsafe-inline'; style-src 'self' 'unsafe-inline'; connect-src 'self'; "
    b"img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = (
    (b"cache-control", b"no-store"),
    (b"content-security-policy", _POLICY),
    (b"referrer-policy", b"no-referrer"),
    (b"x-content-type-options", b"nosniff"),
)
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>%(sandbox)s</title>
<style>html,body{margin:0;height:100%%;background:#222;color:#ddd;font:14px sans-serif}#screen{height:100%%}
#say{position:fixed;left:8px;bottom:8px}</style></head>
<body><div id="screen"></div><div id="say">connecting</div>
<script type="module">
import RFB from "./novnc/core/rfb.js";
const say = document.getElementById("say");
const address = new URL("vnc", location.href);
address.protocol = address.protocol === "https:" ? "wss:" : "ws:";
const view = new RFB(document.getElementById("screen"), address.href, {shared: true});
view.scaleViewport = true;
view.addEventListener("connect", () => { say.textContent = ""; view.focus(); });
view.addEventListener("disconnect", () => { say.textContent = "the connection has ended; ask for a new address"; });
</script></body></html>
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Good:
    sandbox_id: str
    until: float


class Views:
    """One per edge."""

    def __init__(self, node: Node, *, novnc: Path = NOVNC) -> None:
        self._node = node
        self._novnc = novnc
        self._good: dict[str, _Good] = {}

    def find(self, method: str, rest: str) -> Callable[..., Any] | None:
        """Routes below a sandbox."""
        if (method, rest) == ("POST", "screen/view"):
            return self.make
        return self.vnc if (method, rest) == (sockets.METHOD, "screen/vnc") else None

    def route(self, scope: Scope) -> ASGIApp | None:
        """Routes below VIEW_ROOT."""
        if not scope["path"].startswith(VIEW_ROOT) or scope["method"] not in ("GET", sockets.METHOD):
            return None
        return self._answer

    async def make(self, sandbox_id: str, scope: Scope, receive: Receive, send: Send) -> None:
        """POST screen/view"""
        sandbox = self._node.get(sandbox_id, project=project_of(scope))
        sandbox.require(Capability.SCREEN)
        nothing_else(query(scope))
        request = check_view(codec.decode(await read_body(scope, receive, limit=MAX_JSON_BODY), ViewRequest))
        if not (self._novnc / "core/rfb.js").is_file():
            raise errors.HostCapabilityError(
                f"this node has no noVNC ({self._novnc}/core/rfb.js is missing)",
                detail={"probe": "novnc"},
                remedy="apt-get install novnc on it",
            )
        self._forget_old()
        its_own = [token for token, good in self._good.items() if good.sandbox_id == sandbox_id]
        for old in its_own[: max(0, len(its_own) + 1 - MAX_VIEWS)]:
            del self._good[old]
        token = secrets.token_urlsafe(32)
        self._good[token] = _Good(sandbox_id=sandbox_id, until=time.monotonic() + request.seconds)
        sandbox.used()
        path = f"{VIEW_ROOT}{sandbox_id}/{token}/"
        await send_json(send, View(path=path, expires_at=time.time() + request.seconds), status=201)

    async def vnc(self, sandbox_id: str, scope: Scope, receive: Receive, send: Send) -> None:
        """WebSocket screen/vnc, with a key"""
        sandbox = self._node.get(sandbox_id, project=project_of(scope))
        sandbox.require(Capability.SCREEN)
        await _show(sandbox, scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        sandbox_id, _, rest = scope["path"].removeprefix(VIEW_ROOT).partition("/")
        token, slash, name = rest.partition("/")
        sandbox = self._admitted(sandbox_id, token)
        if scope["method"] == sockets.METHOD:
            if name != "vnc":
                raise errors.NotFoundError("no such view")
            await _show(sandbox, scope, receive, send)
        elif not name:
            page = _PAGE % {"sandbox": sandbox_id} if slash else ""
            if not page:
                raise errors.NotFoundError("no such view", remedy="the address ends with a slash")
            await send_bytes(send, page.encode("utf-8"), media_type=b"text/html; charset=utf-8", headers=_HEADERS)
        else:
            content, kind = self._file(name)
            await send_bytes(send, content, media_type=kind, headers=_HEADERS)

    def _admitted(self, sandbox_id: str, token: str) -> Sandbox:
        self._forget_old()
        for known, good in self._good.items():
            if hmac.compare_digest(known.encode(), token.encode("utf-8", "surrogateescape")):
                if good.sandbox_id == sandbox_id:
                    return self._node.get(sandbox_id, project=None)
                break
        raise errors.NotFoundError("no such view, or its time is over", remedy="ask for a new one")

    def _forget_old(self) -> None:
        now = time.monotonic()
        for token in [token for token, good in self._good.items() if good.until < now]:
            del self._good[token]

    def _file(self, name: str) -> tuple[bytes, bytes]:
        """A file of noVNC's. Links are followed (the package has some), as long as they stay inside."""
        place, _, inner = name.partition("/")
        try:
            path = (self._novnc / inner).resolve()
            kind = _TYPES.get(path.suffix)
            if place == "novnc" and kind is not None and path.is_relative_to(self._novnc.resolve()):
                return path.read_bytes(), kind
        except (OSError, ValueError):  # not there, no file, too long a name, one with a zero byte
            pass
        raise errors.NotFoundError("no such file of the view")


async def _show(sandbox: Sandbox, scope: Scope, receive: Receive, send: Send) -> None:
    """The display, to one viewer. While it is watched the sandbox is not idle."""
    async with sandbox.working():
        stream = SocketBytes(await console_of(sandbox).vnc())
        try:
            offered = scope.get("subprotocols") or ()
            await sockets.accept(receive, send, subprotocol="binary" if "binary" in offered else None)
            await sockets.carry(stream, receive, send)
        finally:
            stream.close()
