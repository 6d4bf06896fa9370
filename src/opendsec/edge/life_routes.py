"""Creating sandboxes over HTTP, one or many, and ending them. Raw ASGI, because bursts pass here.

A batch is created a bounded number at once and answered line by line as sandboxes become ready; a client that
reads slowly slows the batch down. When the client leaves, nothing more is begun; what has been begun stays.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from opendsec import errors
from opendsec.edge.node import Node
from opendsec.edge.requests import DEFAULT_PROJECT, project_of, sandbox_id_for, timeout_of
from opendsec.edge.sandbox import Sandbox
from opendsec.model.ids import SandboxId
from opendsec.model.spec import MAX_BATCH, SandboxSpec, check_spec
from opendsec.server.asgi import Receive, Scope, Send, read_body, request_id, send_json
from opendsec.server.streams import send_stream
from opendsec.wire import codec
from opendsec.wire.contracts import (
    HEADER_TIMEOUT,
    MAX_JSON_BODY,
    NDJSON_MEDIA_TYPE,
    BatchItem,
    BatchRequest,
    CreateRequest,
)

BATCH_AT_ONCE = 64
BACKLOG_LINES = 1024
END_ANSWER_S = 60.0
"""How long a DELETE waits for what cannot be ended."""


class LifeRoutes:
    """`POST /v1/sandboxes`, `POST /v1/sandbox-batches` and `DELETE /v1/sandboxes/{id}`."""

    def __init__(self, node: Node, *, end_answer_s: float = END_ANSWER_S) -> None:
        self._node = node
        self._edge = node.settings.edge
        self._end_answer_s = end_answer_s

    async def create(self, scope: Scope, receive: Receive, send: Send) -> None:
        """POST sandboxes"""
        request = codec.decode(await read_body(scope, receive, limit=MAX_JSON_BODY), CreateRequest)
        sandbox_id = sandbox_id_for(scope, self._edge, request.sandbox_id)
        project = project_of(scope) or DEFAULT_PROJECT
        sandbox = await self._ready(request.spec, project, sandbox_id, timeout_of(scope))
        await send_json(send, sandbox.status(), status=201)

    async def create_batch(self, scope: Scope, receive: Receive, send: Send) -> None:
        """POST sandbox-batches"""
        request = codec.decode(await read_body(scope, receive, limit=MAX_JSON_BODY), BatchRequest)
        check_batch(request)
        ids = request.sandbox_ids or tuple(
            sandbox_id_for(scope, self._edge, None, index=index) for index in range(request.count)
        )
        lines = self._lines(
            request.spec, project_of(scope) or DEFAULT_PROJECT, ids, timeout_of(scope), request_id(scope)
        )
        await send_stream(receive, send, lines, media_type=NDJSON_MEDIA_TYPE)

    async def end(self, sandbox_id: str, scope: Scope, receive: Receive, send: Send) -> None:
        """DELETE sandboxes/{id}: answered when nothing of it is left; repeating it is harmless.

        Programs that trace each other can keep a sandbox from ending (docs/reference/launcher.md, known limits): nobody
        waits for that for ever.
        """
        del receive
        sandbox = self._node.get(sandbox_id, project=project_of(scope))
        try:
            async with asyncio.timeout(self._end_answer_s):
                await sandbox.delete()
        except TimeoutError:
            raise errors.NodeError(
                f"the sandbox has not ended within {self._end_answer_s:g} s; its removal goes on",
                remedy="ask again; while it lasts the sandbox stays `stopping`",
                sandbox_id=sandbox_id,
            ) from None
        await send_json(send, sandbox.status())

    async def _ready(self, spec: SandboxSpec, project: str, sandbox_id: SandboxId, timeout_s: float | None) -> Sandbox:
        sandbox: Sandbox | None = None
        try:
            async with asyncio.timeout(timeout_s):
                sandbox = await self._node.create(spec, project=project, sandbox_id=sandbox_id)
                await sandbox.wait_ready()
        except TimeoutError:
            if sandbox is not None:
                await sandbox.delete()
            raise errors.DeadlineError(
                f"the sandbox was not ready within {timeout_s:g} s; it has been removed",
                remedy=f"give it more time with {HEADER_TIMEOUT}",
            ) from None
        return sandbox

    async def _lines(
        self, spec: SandboxSpec, project: str, ids: tuple[SandboxId, ...], timeout_s: float | None, asked_as: str
    ) -> AsyncGenerator[bytes]:
        lines: asyncio.Queue[bytes] = asyncio.Queue(BACKLOG_LINES)
        todo = iter(enumerate(ids))

        async def work() -> None:
            for index, sandbox_id in todo:
                try:
                    sandbox = await self._ready(spec, project, sandbox_id, timeout_s)
                    item = BatchItem(index=index, status=sandbox.status())
                except errors.OpenDSecError as exc:
                    exc.request_id, exc.sandbox_id = asked_as, sandbox_id
                    item = BatchItem(index=index, error=codec.error_fields(exc))
                await lines.put(codec.encode(item) + b"\n")

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(work()) for _ in range(min(BATCH_AT_ONCE, len(ids)))]
            try:
                left = len(ids)
                while left:
                    gathered = [await lines.get()]
                    while not lines.empty():
                        gathered.append(lines.get_nowait())
                    left -= len(gathered)
                    yield b"".join(gathered)
            finally:
                for task in tasks:
                    task.cancel()
        yield codec.encode(BatchItem(done=True)) + b"\n"


def check_batch(request: BatchRequest) -> None:
    """Raise InvalidSpecError naming the field."""
    check_spec(request.spec)
    if not 1 <= request.count <= MAX_BATCH:
        raise errors.InvalidSpecError(
            f"count: {request.count} is not between 1 and {MAX_BATCH}", detail={"field": "count"}
        )
    ids = request.sandbox_ids
    if ids and (len(ids) != request.count or len(set(ids)) != len(ids)):
        raise errors.InvalidSpecError(
            f"sandbox_ids: {len(set(ids))} different ids for {request.count} sandboxes", detail={"field": "sandbox_ids"}
        )
