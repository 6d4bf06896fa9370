"""Saving a sandbox and going on from it, on every backend that can; the others refuse by name."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from tests.contract.harness import Place, Sandbox

from opendsec.backends.base import Capability, DiskChanges
from opendsec.errors import OpenDSecError, SnapshotInvalidError, UnsupportedError
from opendsec.guest.base import GuestError, GuestStream
from opendsec.model.image import Image
from opendsec.model.spec import BackendKind
from opendsec.store.disk_changes import pack_change

pytestmark = pytest.mark.anyio


def need(place: Place, capability: Capability) -> None:
    """Skip what the backend has not declared: that it refuses it is shown elsewhere."""
    if capability not in place.backend.capabilities:
        pytest.skip(f"capability: {capability}: not declared by {place.backend.kind}")


@contextmanager
def saving_place(place: Place) -> Iterator[Path]:
    """An empty directory on the state file system."""
    target = place.state_dir / "saved"
    target.mkdir(mode=0o700)
    try:
        yield target
    finally:
        for path in sorted(target.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        target.rmdir()


@asynccontextmanager
async def started_from(place: Place, saved: Path) -> AsyncIterator[Sandbox]:
    """A sandbox that goes on from it."""
    plan = replace(place.plan(), snapshot=saved)
    try:
        sandbox = Sandbox(place.backend, plan, await place.backend.start(plan))
        sandbox.last_command = 1000  # numbers of the source are known to its agent
        yield sandbox
    finally:
        await place.destroy(plan)


async def test_capabilities_are_never_more_than_what_is_offered(place: Place) -> None:
    assert place.backend.capabilities <= place.backend.offers


async def ids_of(box: Sandbox) -> list[bytes]:
    """What no two machines have in common; its network is as it was made."""
    if box.backend.kind not in {BackendKind.MICROVM, BackendKind.FULLVM}:
        return []
    network = (await box.run("ip -4 -o addr show | awk '{print $2, $4}'")).stdout
    assert network == (b"lo 127.0.0.1/8\n" + b"eth0 10.0.2.15/24\n" * (box.backend.kind is BackendKind.FULLVM))
    found = (await box.run("cat /run/opendsec/generation /proc/sys/kernel/random/boot_id")).stdout.split()
    assert len(found) == 2
    return found


async def test_two_go_on_from_one_snapshot_each_its_own_way(place: Place) -> None:
    need(place, Capability.SNAPSHOT)
    ids: list[bytes] = []
    with saving_place(place) as saved:
        async with place.sandbox() as box:
            await box.run("echo before > /tmp/f")
            await box.run("cd /tmp; export A=kept", session="s")
            ids += await ids_of(box)
            await box.backend.snapshot(box.running.handle, saved)
            guest = await box.backend.reconnect(box.running.handle)
            assert guest is not None
            box.running.guest = guest
            assert (await box.run("echo after > /tmp/f; cat /tmp/f")).stdout == b"after\n"
        async with started_from(place, saved) as one, started_from(place, saved) as two:
            assert (await one.run("cat /tmp/f; echo one > /tmp/f")).stdout == b"before\n"
            assert (await two.run("cat /tmp/f; pwd; echo $A", session="s")).stdout.startswith(b"before\n/tmp\nkept\n")
            ids += [*await ids_of(one), *await ids_of(two)]
    assert len(set(ids)) == len(ids), "copies are not one machine"


async def test_a_damaged_snapshot_is_refused_and_leaves_nothing(place: Place) -> None:
    need(place, Capability.SNAPSHOT)
    with saving_place(place) as saved:
        async with place.sandbox() as box:
            await box.backend.snapshot(box.running.handle, saved)
        for path in saved.rglob("*"):
            if path.is_file():
                path.chmod(0o600)
                path.write_bytes(b"")
        plan = replace(place.plan(), snapshot=saved)
        with pytest.raises(SnapshotInvalidError):
            await place.backend.start(plan)
        await place.destroy(plan)


async def test_what_was_written_is_shown_for_packing(place: Place) -> None:
    need(place, Capability.PACK)
    async with place.sandbox() as box:
        await box.run("echo new > /new; mkdir -p /d/e; echo x > /d/e/f")
        async with box.backend.changes(box.running.handle, image=box.plan.image) as changes:
            if isinstance(changes, DiskChanges):
                image = await asyncio.to_thread(packed, place, box.plan.image, changes)
            else:
                image = None
                found = {str(path.relative_to(changes.tree)) for path in changes.tree.rglob("*")}
                assert {"new", "d/e/f"} <= found
                assert (changes.tree / "new").read_bytes() == b"new\n"
        guest = await box.backend.reconnect(box.running.handle)
        assert guest is not None
        box.running.guest = guest
        assert (await box.run("cat /d/e/f")).stdout == b"x\n"
    if image is not None:
        async with booted_from(place, image) as box:
            assert (await box.run("cat /new /d/e/f")).stdout == b"new\nx\n"


def packed(place: Place, image: Image, changes: DiskChanges) -> Image:
    """An image of the changed disk: what a disk shows is seen by a machine only."""
    assert changes.whole
    assert place.store is not None
    with place.store.staging() as work:
        made = pack_change(place.store, work, changes.written, on_read=lambda: None)
        assert made is not None
        return place.store.publish("packed", layers=list(made.chain), config=image.config, source="test")


@asynccontextmanager
async def booted_from(place: Place, image: Image) -> AsyncIterator[Sandbox]:
    """A sandbox of another image than the place's own."""
    plan = replace(place.plan(), image=image)
    try:
        yield Sandbox(place.backend, plan, await place.backend.start(plan))
    finally:
        await place.destroy(plan)


async def test_what_cannot_be_packed_or_saved_says_so(place: Place, box: Sandbox, tmp_path: Path) -> None:
    for capability, ask in (
        (Capability.PACK, lambda: box.backend.changes(box.running.handle, image=box.plan.image).__aenter__()),
        (Capability.SNAPSHOT, lambda: box.backend.snapshot(box.running.handle, tmp_path)),
    ):
        if capability not in place.backend.offers:
            with pytest.raises(UnsupportedError) as raised:
                await ask()
            assert isinstance(raised.value, OpenDSecError)
    assert (await box.run("echo alive")).stdout == b"alive\n"


async def test_a_port_inside_is_reached(place: Place) -> None:
    need(place, Capability.PORTS)
    async with place.sandbox() as box:
        if place.backend.kind != "dummy":
            await box.start("nc -l -p 7 -e cat")
        async with asyncio.timeout(60):
            stream = await _dialled(box, 7)
            await stream.write(b"ping")
            assert await stream.read() == b"ping"
        await stream.aclose()
        with pytest.raises(GuestError, match="refused"):
            await box.guest.dial(9)


async def _dialled(box: Sandbox, port: int) -> GuestStream:
    """Once something listens there."""
    while True:
        try:
            return await box.guest.dial(port)
        except GuestError:
            await asyncio.sleep(0.05)
