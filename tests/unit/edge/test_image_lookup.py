"""A create never gets an older meaning than the one its names had when it came, and bursts share lookups."""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import Sequence

import pytest
from tests.unit.edge.edges import until

from opendsec.edge.image_lookup import THREADS, ImageLookup
from opendsec.edge.images import AnyImage
from opendsec.errors import ImageNotFoundError, NodeError
from opendsec.model.image import Image
from opendsec.model.spec import SandboxSpec

pytestmark = pytest.mark.anyio


class Moving(AnyImage):
    """`meaning` is read at once, and answered when `go` is set."""

    def __init__(self) -> None:
        self.meaning = "one"
        self.go = threading.Event()
        self.asked = 0

    def compose(self, image: str, *, workspace: str = "", toolkits: Sequence[str] | None = None) -> Image:
        self.asked += 1
        found = super().compose(self.meaning)
        if image == "nope":
            raise ImageNotFoundError("no image 'nope'")
        assert self.go.wait(60)
        return found


async def test_who_comes_after_a_change_gets_the_change() -> None:
    images = Moving()
    lookup = ImageLookup(images)
    early = asyncio.create_task(lookup.find(SandboxSpec(image="x")))
    await until(lambda: images.asked == 1)
    images.meaning = "two"
    late = [asyncio.create_task(lookup.find(SandboxSpec(image="x"))) for _ in range(50)]
    await asyncio.sleep(0)
    images.go.set()
    assert (await early).name == "one"
    assert {(await one).name for one in late} == {"two"}
    assert images.asked == 2


async def test_another_composition_does_not_wait() -> None:
    images = Moving()
    lookup = ImageLookup(images)
    slow = asyncio.create_task(lookup.find(SandboxSpec(image="x")))
    await until(lambda: images.asked == 1)
    other = asyncio.create_task(lookup.find(SandboxSpec(image="x", toolkits=("rg",))))
    await until(lambda: images.asked == 2)
    images.go.set()
    await asyncio.gather(slow, other)


async def test_failures_are_everybodys_own_and_nothing_is_kept() -> None:
    images = Moving()
    images.go.set()
    lookup = ImageLookup(images)
    found = await asyncio.gather(*(lookup.find(SandboxSpec(image="nope")) for _ in range(5)), return_exceptions=True)
    assert [type(one) for one in found] == [ImageNotFoundError] * 5
    assert (await lookup.find(SandboxSpec(image="x"))).name == "one"
    assert lookup._turns == {}


class Unreachable(Moving):
    def compose(self, image: str, *, workspace: str = "", toolkits: Sequence[str] | None = None) -> Image:
        raise OSError(errno.EIO, "Input/output error", f"/store/{image}/{workspace}/{toolkits}")


async def test_a_store_that_cannot_be_read_may_be_asked_again() -> None:
    with pytest.raises(NodeError, match="the store cannot be read") as caught:
        await ImageLookup(Unreachable()).find(SandboxSpec(image="x"))
    assert caught.value.retryable


async def test_a_thousand_at_once_cost_two_lookups() -> None:
    images = Moving()
    images.go.set()
    lookup = ImageLookup(images)
    await asyncio.gather(*(lookup.find(SandboxSpec(image="x")) for _ in range(1000)))
    assert images.asked <= 2


async def test_a_store_that_hangs_takes_no_threads_of_others() -> None:
    images = Moving()
    lookup = ImageLookup(images)
    hanging = [
        asyncio.create_task(lookup.find(SandboxSpec(image="x", toolkits=(f"t{n}",)))) for n in range(3 * THREADS)
    ]
    await until(lambda: images.asked == THREADS)
    assert await asyncio.wait_for(asyncio.to_thread(int), 60) == 0
    images.go.set()
    await asyncio.gather(*hanging)
    lookup.close()
