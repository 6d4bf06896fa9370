"""`client.snapshots`, and the answers to a snapshot and a fork: lines that say where it stands, and how it ended."""

from __future__ import annotations

import time
from collections.abc import Callable

from opendsec.client._async.lines import read_lines
from opendsec.client._async.long_answers import last_line
from opendsec.client._async.transport import Transport, decode_answer, target
from opendsec.client.concurrency import async_pause
from opendsec.client.retrying import may_repeat
from opendsec.errors import NotFoundError, OpenDSecError, ProtocolError, TransportError
from opendsec.model.node import SandboxStatus
from opendsec.model.snapshot import SnapshotSummary
from opendsec.model.spec import check_snapshot_name
from opendsec.wire import codec
from opendsec.wire.contracts import (
    HEADER_IDEMPOTENCY,
    ForkItem,
    ForkRequest,
    SnapshotEvent,
    SnapshotList,
    SnapshotRequest,
    SnapshotResult,
)

OnSnapshot = Callable[[SnapshotEvent], None]


class Snapshots:
    """The snapshots of your project. Any key may start from them; making and removing needs one that may build."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    async def list(self) -> tuple[SnapshotSummary, ...]:
        """All of them, by name; one that cannot be read says why in `problem`."""
        return (await self._transport.call("GET", target("snapshots"), SnapshotList)).items

    async def get(self, name: str) -> SnapshotSummary:
        """One of them. Raises NotFoundError."""
        check_snapshot_name(name)
        found = next((one for one in await self.list() if one.name == name), None)
        if found is None:
            raise NotFoundError(f"no snapshot {name!r} in this project", detail={"field": "name"})
        return found

    async def remove(self, name: str, *, force: bool = False) -> SnapshotSummary:
        """Remove it; what it was. Raises NotFoundError, and ConflictError while sandboxes that were started from it
        live, unless `force`: those may fail at any moment then."""
        query = {"name": check_snapshot_name(name), "force": force or None}
        where = target("snapshots", query=query)
        return await self._transport.call("DELETE", where, SnapshotSummary, idempotent=False)


async def snapshot_saved(
    transport: Transport,
    where: str,
    request: SnapshotRequest,
    *,
    key: str,
    deadline: float | None,
    on_progress: OnSnapshot | None,
) -> SnapshotResult:
    """The result; see `last_line`."""
    last = await last_line(
        transport, where, request, SnapshotEvent, what="snapshot", key=key, deadline=deadline, on_progress=on_progress
    )
    assert last.result is not None
    return last.result


async def forked(
    transport: Transport, where: str, request: ForkRequest, *, key: str, deadline: float
) -> dict[int, SandboxStatus | OpenDSecError]:
    """Every index with its sandbox or its error. A cut answer is asked for again with the same key."""
    failures = 0
    while True:
        try:
            return await _ask_fork(transport, where, request, key=key, deadline=deadline)
        except OpenDSecError as error:
            delay = transport.delay_s(failures)
            if not may_repeat(error, idempotent=True) or time.monotonic() + delay > deadline:
                raise
        failures += 1
        await async_pause(delay)


async def _ask_fork(
    transport: Transport, where: str, request: ForkRequest, *, key: str, deadline: float
) -> dict[int, SandboxStatus | OpenDSecError]:
    found: dict[int, SandboxStatus | OpenDSecError] = {}
    body = await transport.open(
        "POST", where, content=codec.encode(request), headers={HEADER_IDEMPOTENCY: key}, deadline=deadline
    )
    try:
        async for line in read_lines(body, deadline=deadline):
            item = decode_answer(line, ForkItem, body.request_id)
            if item.status is not None:
                found[item.index] = item.status
            elif item.error is not None:
                found[item.index] = codec.received_error(item.error)
            elif item.done:
                if len(found) < request.count and not request.abandon:
                    raise ProtocolError(f"the answer told of {len(found)} of {request.count} sandboxes")
                await body.finish()
                return found
        raise TransportError("the fork's answer was cut", request_id=body.request_id)
    finally:
        await body.aclose()
