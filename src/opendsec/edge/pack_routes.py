"""Packing over HTTP: `POST /v1/sandboxes/{id}/pack`. Raw ASGI, because the answer is a stream of lines.

The first line comes within a second, and one about every second after it, so no time limit on the way cuts a long pack.
A failure within the first second is a plain error answer; a later one is the last line.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator

from opendsec import errors
from opendsec.edge.node import Node
from opendsec.edge.packing import Pack, Packing
from opendsec.edge.requests import key_of, project_of, require_right
from opendsec.server.asgi import Receive, Scope, Send, read_body, request_id
from opendsec.server.streams import ndjson, send_stream
from opendsec.wire import codec
from opendsec.wire.contracts import MAX_JSON_BODY, NDJSON_MEDIA_TYPE, RIGHT_BUILD, PackEvent, PackRequest


class PackRoutes:
    """`packing` None: this edge has no store to put images into."""

    def __init__(self, node: Node, packing: Packing | None) -> None:
        self._node = node
        self._packing = packing

    async def pack(self, sandbox_id: str, scope: Scope, receive: Receive, send: Send) -> None:
        """POST sandboxes/{id}/pack"""
        require_right(scope, RIGHT_BUILD)
        sandbox = self._node.get(sandbox_id, project=project_of(scope))
        request = codec.decode(await read_body(scope, receive, limit=MAX_JSON_BODY), PackRequest)
        if self._packing is None:
            raise errors.UnsupportedError("this edge has no image store that it can write to")
        pack = self._packing.begin(sandbox, request, key=key_of(scope))
        await send_stream(receive, send, ndjson(_events(pack, request_id(scope))), media_type=NDJSON_MEDIA_TYPE)


async def _events(pack: Pack, asked_as: str) -> AsyncGenerator[PackEvent]:
    async for event in pack.follow(asked_as):
        yield event
