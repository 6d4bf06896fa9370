"""Calls an ASGI app without a network, and shows what it answered."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from opendsec.server.asgi import ASGIApp


class Answer:
    """The messages of one answer."""

    def __init__(self, messages: list[Any]) -> None:
        self._messages = messages

    @property
    def status(self) -> int:
        return int(self._messages[0]["status"])

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self._messages[1:])

    @property
    def finished(self) -> bool:
        last = self._messages[-1]
        return last["type"] == "http.response.body" and not last.get("more_body", False)

    def header(self, name: str) -> str | None:
        found = [value.decode("latin-1") for key, value in self._messages[0]["headers"] if key == name.encode()]
        assert len(found) <= 1
        return found[0] if found else None


def scope_of(method: str, path: str, *, query: bytes = b"", headers: Mapping[str, str] | None = None) -> dict[str, Any]:
    """As uvicorn makes it."""
    given = [(key.encode(), value.encode("latin-1")) for key, value in (headers or {}).items()]
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": query,
        "headers": given,
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 2),
        "state": {},
    }


async def call(
    app: ASGIApp,
    method: str,
    path: str,
    *,
    body: bytes = b"",
    query: bytes = b"",
    headers: Mapping[str, str] | None = None,
) -> Answer:
    """One request; the client stays until the app is done."""
    sent: list[Any] = []
    incoming = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Any:
        if incoming:
            return incoming.pop()
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: Any) -> None:
        sent.append(message)

    await app(scope_of(method, path, query=query, headers=headers), receive, send)
    return Answer(sent)
