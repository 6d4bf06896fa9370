"""Lines of a batch of calls that only say that somebody is there."""

from __future__ import annotations

import time
from typing import Any, cast

import pytest

from opendsec.client._async.fncalls import _ask
from opendsec.model.fncall import CallStatus, FnCallResult
from opendsec.wire import codec
from opendsec.wire.contracts import FnCallItem

pytestmark = pytest.mark.anyio


class Told:
    """A transport whose one answer has these lines."""

    request_id = "r"

    def __init__(self, *items: FnCallItem) -> None:
        self._data = [codec.encode(item) + b"\n" for item in items]

    async def open(self, *_: object, **__: object) -> Told:
        return self

    async def read(self, **_: object) -> bytes:
        return self._data.pop(0) if self._data else b""

    async def finish(self) -> None:
        assert not self._data

    async def aclose(self) -> None:
        pass


async def test_they_are_passed_over() -> None:
    there, result = FnCallItem(), FnCallResult(status=CallStatus.OK)
    told = Told(there, FnCallItem(index=0, result=result), there, FnCallItem(done=True))
    outcomes = [one async for one in _ask(cast("Any", told), [(7, b"{}")], time.monotonic() + 60)]
    assert outcomes == [(7, result)]
