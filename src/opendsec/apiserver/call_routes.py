"""Calls over HTTP at the apiserver, in its own ASGI: a warm call is milliseconds, and its body is nobody's here.

Every role may call. `POST /run_code` and its relatives (`fusion`) end here too.
"""

from __future__ import annotations

import asyncio

from opendsec import errors
from opendsec.apiserver import fusion
from opendsec.apiserver.calls import Calls, read_batch
from opendsec.apiserver.creating import Caller, check_timeout
from opendsec.model.fncall import FnCallResult
from opendsec.server.asgi import (
    ASGIApp,
    Receive,
    Scope,
    Send,
    header,
    principal,
    read_body,
    request_id,
    send_bytes,
    send_json,
)
from opendsec.server.streams import while_connected
from opendsec.wire import codec
from opendsec.wire.contracts import HEADER_TIMEOUT, MAX_CALLS_BODY, MAX_JSON_BODY, NDJSON_MEDIA_TYPE

_TIMEOUT = HEADER_TIMEOUT.lower().encode("ascii")


class CallRoutes:
    """The paths of calls."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._paths: dict[str, ASGIApp] = {
            "/v1/fncalls": self.call,
            "/v1/fncall-batches": self.batch,
            fusion.RUN_CODE: self.run_code,
            **dict.fromkeys(fusion.REFUSED, self.refuse),
        }

    def route(self, scope: Scope) -> ASGIApp | None:
        """The app of a POST to one of these paths."""
        return self._paths.get(scope["path"]) if scope["method"] == "POST" else None

    async def call(self, scope: Scope, receive: Receive, send: Send) -> None:
        """POST /v1/fncalls"""
        body = await read_body(scope, receive, limit=MAX_JSON_BODY)
        await send_bytes(send, await while_connected(receive, self._calls.call(body, _caller(scope))))

    async def batch(self, scope: Scope, receive: Receive, send: Send) -> None:
        """POST /v1/fncall-batches: lines as they come, no faster than the client reads; its leaving ends them."""
        calls = read_batch(await read_body(scope, receive, limit=MAX_CALLS_BODY))
        begun = False
        turn = asyncio.Lock()

        async def deliver(lines: bytes) -> None:
            nonlocal begun
            async with turn:
                if not begun:
                    begun = True
                    head = [(b"content-type", NDJSON_MEDIA_TYPE.encode("ascii"))]
                    await send({"type": "http.response.start", "status": 200, "headers": head})
                await send({"type": "http.response.body", "body": lines, "more_body": True})

        await while_connected(receive, self._calls.batch(calls, _caller(scope), deliver))
        await send({"type": "http.response.body", "body": b""})

    async def run_code(self, scope: Scope, receive: Receive, send: Send) -> None:
        """POST /run_code: what the platform could not do is an answer there, not a status."""
        request = fusion.read_request(await read_body(scope, receive, limit=MAX_JSON_BODY))
        spec = fusion.spec_of(request)
        try:
            answer = await while_connected(receive, self._calls.call(codec.encode(spec), _caller(scope)))
        except errors.RequestError:
            raise
        except errors.OpenDSecError as exc:
            await send_json(send, fusion.failed(exc))
            return
        await send_json(send, fusion.answer_of(request, codec.decode_answer(answer, FnCallResult)))

    async def refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        """What SandboxFusion has beyond running code."""
        del receive, send
        raise errors.UnsupportedError(
            f"{scope['path']}: of SandboxFusion's endpoints only /run_code is offered",
            detail={"path": scope["path"]},
            remedy="data sets and their judging stay with the caller; see docs/howto/fncall.md for judge calls",
        )


def _caller(scope: Scope) -> Caller:
    return Caller(
        project=str(principal(scope).project),
        request_id=request_id(scope),
        timeout=check_timeout(header(scope, _TIMEOUT)),
    )
