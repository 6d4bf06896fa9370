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
        self.looks = 0

    async def open(self) -> None:
        self.looks += 1
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
        assert ("up -d --restart" in refused.value.remedy) is isinstance(failure, ValueError)
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


async def test_what_was_put_right_is_there_for_the_next_create(tmp_path: Path) -> None:
    backend = Leisurely(HostCapabilityError("no guest kernel is installed", remedy="opendsec kernel install"))
    backend.go.set()
    async with edge(tmp_path, backend) as node:
        node._offered._look_again_s = 0.0
        with pytest.raises(BackendUnavailableError, match="no guest kernel") as refused:
            await created(node)
        assert "the next create" in refused.value.remedy
        backend.failure = None
        sandbox = await created(node)
        assert node.report().backends["dummy"].available
        assert sandbox.live
        looks = backend.looks
        await created(node)
        assert backend.looks == looks, "what works is left alone"
    assert backend.closed


async def test_a_burst_looks_once_and_nobody_else_waits_for_it() -> None:
    backend = Leisurely(HostCapabilityError("no qemu here"))
    backend.go.set()
    both = {BackendKind.MICROVM: backend, BackendKind.DUMMY: DummyBackend()}
    async with Offered(both, look_again_s=0.0) as offered:
        await offered.settled([BackendKind.MICROVM])
        offered._look_again_s = 3600.0
        with pytest.raises(BackendUnavailableError):
            await offered.usable(BackendKind.MICROVM)
        assert backend.looks == 1, "it was just looked at"
        offered._look_again_s = 0.0
        backend.go.clear()
        many = [asyncio.ensure_future(offered.usable(BackendKind.MICROVM)) for _ in range(50)]
        await until(lambda: backend.looks == 2)
        assert offered.reports()["microvm"].preparing
        assert isinstance(await offered.usable(BackendKind.DUMMY), DummyBackend)
        offered._look_again_s = 3600.0
        backend.go.set()
        refused = await asyncio.gather(*many, return_exceptions=True)
        assert {type(one) for one in refused} == {BackendUnavailableError}
        assert backend.looks == 2
        assert "no qemu here" in offered.reports()["microvm"].reasons[0]


async def test_an_edge_that_is_told_looks_again_whatever_was_seen_last() -> None:
    backend = Leisurely(HostCapabilityError("no qemu here"))
    async with Offered({BackendKind.MICROVM: backend}, look_again_s=3600.0) as offered:
        await until(lambda: backend.looks == 1)
        telling = asyncio.ensure_future(offered.look_again())
        backend.go.set()  # the look under way began before the telling, and fails
        await telling
        assert backend.looks == 2
        backend.failure = None
        await asyncio.gather(offered.look_again(), offered.look_again())
        assert backend.looks == 3
        assert offered.reports()["microvm"].available
        await offered.look_again()
        assert backend.looks == 3
    assert backend.closed


async def test_what_failed_by_a_fault_is_not_opened_over_what_it_left() -> None:
    backend = Leisurely(ValueError("a fault"))
    backend.go.set()
    async with Offered({BackendKind.MICROVM: backend}, look_again_s=0.0) as offered:
        await offered.look_again()
        with pytest.raises(BackendUnavailableError, match="a fault"):
            await offered.usable(BackendKind.MICROVM)
    assert backend.looks == 1


async def test_an_edge_that_ends_gives_up_a_second_look_too() -> None:
    backend = Leisurely(HostCapabilityError("no qemu here"))
    backend.go.set()
    async with Offered({BackendKind.MICROVM: backend}, look_again_s=0.0) as offered:
        await offered.settled([BackendKind.MICROVM])
        backend.go.clear()
        waiting = asyncio.ensure_future(offered.usable(BackendKind.MICROVM))
        await until(lambda: backend.looks == 2)
    with pytest.raises(BackendUnavailableError):
        await waiting
    assert not backend.opened


def test_an_edge_that_is_told_nothing_offers_all_it_can() -> None:
    assert read_settings({}).backends == (*AUTO, BackendKind.FNCALL)
    assert read_settings({"OPENDSEC_EDGE_BACKENDS": "auto"}) == read_settings({})
    assert BackendKind.DUMMY not in AUTO
    assert BackendKind.CONTAINER in AUTO
    assert read_settings({"OPENDSEC_EDGE_BACKENDS": "dummy"}).backends == (BackendKind.DUMMY,)
    with pytest.raises(InvalidSpecError, match="telepathy"):
        read_settings({"OPENDSEC_EDGE_BACKENDS": "telepathy"})
    assert {BackendKind.CONTAINER, BackendKind.DUMMY} <= set(FACTORIES)
