"""The backends of an edge: what does not work is known with its reason, and what takes its time holds nobody up."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.unit.edge.edges import created, edge, until

from opendsec.backends.dummy import DummyBackend
from opendsec.edge.backends import AUTO, FACTORIES
from opendsec.edge.offered import PREPARING, Offered
from opendsec.edge.settings import read_settings
from opendsec.errors import (
    BackendUnavailableError,
    HostCapabilityError,
    InvalidSpecError,
    OpenDSecError,
    UnsupportedError,
)
from opendsec.model.spec import BackendKind

pytestmark = pytest.mark.anyio


class Leisurely(DummyBackend):
    """Opens when it is let, or fails with what it is given."""

    opens_at_leisure = True

    def __init__(self, failure: Exception | None = None) -> None:
        super().__init__()
        self.go, self.failure = asyncio.Event(), failure
        self.opened = self.closed = False

    async def open(self) -> None:
        await self.go.wait()
        if self.failure is not None:
            raise self.failure
        self.opened = True

    async def close(self) -> None:
        self.closed = True


async def test_an_edge_is_ready_while_a_backend_is_being_prepared(tmp_path: Path) -> None:
    backend = Leisurely()
    async with edge(tmp_path, backend) as node:
        report = node.report().backends["dummy"]
        assert (report.available, report.preparing, report.reasons) == (False, True, (PREPARING,))
        creating = asyncio.ensure_future(created(node))
        await asyncio.sleep(0.02)
        assert not creating.done()
        backend.go.set()
        sandbox = await creating
        assert (node.report().backends["dummy"].available, node.report().backends["dummy"].preparing) == (True, False)
    assert backend.closed
    backend.go.clear()
    again = Leisurely()
    again._machines = backend._machines
    entered = asyncio.Event()

    async def next_edge() -> None:
        async with edge(tmp_path, again) as node:
            entered.set()
            assert node.get(sandbox.sandbox_id, project=None).live
            await node.get(sandbox.sandbox_id, project=None).delete()

    async with asyncio.timeout(30):
        living = asyncio.ensure_future(next_edge())
        await asyncio.sleep(0.05)
        assert not entered.is_set(), "sandboxes of it live: nothing can be said of them before it is open"
        again.go.set()
        await living


async def test_an_edge_that_ends_gives_up_what_is_being_prepared() -> None:
    backend = Leisurely()
    async with Offered({BackendKind.MICROVM: backend}):
        pass
    assert (backend.opened, backend.closed) == (False, False)


@pytest.mark.parametrize(
    "failure", [HostCapabilityError("no qemu here", remedy="apt-get install qemu-system-x86"), ValueError("a fault")]
)
async def test_one_that_does_not_work_is_refused_with_the_reason(failure: Exception) -> None:
    backend = Leisurely(failure)
    backend.go.set()
    async with Offered({BackendKind.MICROVM: backend, BackendKind.DUMMY: DummyBackend()}) as offered:
        await offered.settled([BackendKind.MICROVM])
        told = offered.reports()["microvm"]
        assert (told.available, told.preparing) == (False, False)
        assert str(failure) in told.reasons[0]
        assert not isinstance(failure, OpenDSecError) or failure.remedy in told.reasons[0]
        with pytest.raises(BackendUnavailableError, match=str(failure).partition(" (")[0]) as refused:
            await offered.usable(BackendKind.MICROVM)
        assert not refused.value.retryable, "nobody waits a minute for what does not come"
        assert "up -d --restart" in refused.value.remedy
        with pytest.raises(UnsupportedError, match="no fullvm backend") as raised:
            await offered.usable(BackendKind.FULLVM)
        assert raised.value.remedy == "use one of dummy, microvm"
        assert isinstance(await offered.usable(BackendKind.DUMMY), DummyBackend)
    assert not backend.closed


async def test_several_are_prepared_side_by_side() -> None:
    first, second = Leisurely(), Leisurely()
    async with Offered({BackendKind.MICROVM: first, BackendKind.FULLVM: second}) as offered:
        second.go.set()
        await until(lambda: offered.reports()["fullvm"].available)
        assert offered.reports()["microvm"].preparing
        first.go.set()
        await offered.settled([BackendKind.MICROVM, BackendKind.FULLVM])
        assert first.opened
    assert first.closed
    assert second.closed


def test_an_edge_that_is_told_nothing_offers_all_it_can() -> None:
    assert read_settings({}).backends == (*AUTO, BackendKind.FNCALL)
    assert read_settings({"OPENDSEC_EDGE_BACKENDS": "auto"}) == read_settings({})
    assert BackendKind.DUMMY not in AUTO
    assert BackendKind.CONTAINER in AUTO
    assert read_settings({"OPENDSEC_EDGE_BACKENDS": "dummy"}).backends == (BackendKind.DUMMY,)
    with pytest.raises(InvalidSpecError, match="telepathy"):
        read_settings({"OPENDSEC_EDGE_BACKENDS": "telepathy"})
    assert {BackendKind.CONTAINER, BackendKind.DUMMY} <= set(FACTORIES)
