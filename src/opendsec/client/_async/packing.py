"""The answer to a pack."""

from __future__ import annotations

from collections.abc import Callable

from opendsec.client._async.long_answers import last_line
from opendsec.client._async.transport import Transport
from opendsec.wire.contracts import PackEvent, PackRequest, PackResult

OnPack = Callable[[PackEvent], None]


async def packed(
    transport: Transport,
    target: str,
    request: PackRequest,
    *,
    key: str,
    deadline: float | None,
    on_progress: OnPack | None,
) -> PackResult:
    """The result; see `last_line`."""
    last = await last_line(
        transport, target, request, PackEvent, what="pack", key=key, deadline=deadline, on_progress=on_progress
    )
    assert last.result is not None
    return last.result
