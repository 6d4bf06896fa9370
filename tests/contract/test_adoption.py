"""A new edge process finds real containers of the one before, whatever state that left them in."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest
from tests.contract.harness import CONTAINER_NEEDS, Place, container_place

from opendsec.backends.base import Running, StartPlan
from opendsec.backends.container import ContainerBackend
from opendsec.errors import StartError
from opendsec.linux.cgroup import CgroupLimits

pytestmark = pytest.mark.anyio
CONTAINER_ONLY = True


def own_place(test: Callable[[], Awaitable[None]]) -> Callable[[], Awaitable[None]]:
    """Tests that end and begin helper processes make a backend of their own."""
    for name in CONTAINER_NEEDS:
        test = getattr(pytest.mark, name)(test)
    return test


@own_place
async def test_commands_and_output_outlive_the_backend_that_started_them() -> None:
    async with container_place() as place, place.sandbox() as box:
        command = await box.start("echo before; cat; echo after", stdin=True)
        await box.guest.aclose()
        await place.restart()
        found = await place.backend.recover(box.running.handle)
        assert isinstance(found, Running)
        box.running, box.backend = found, place.backend
        await box.guest.attach(command, 0, 0)
        await box.guest.write_stdin(command, 0, b"between\n", eof=True)
        assert (await box.finish(command)).stdout == b"before\nbetween\nafter\n"
        async with place.sandbox() as another:
            assert (await another.run("echo new > /dev/null; ls /dev/pts")).exit.exit_code == 0
        async with asyncio.timeout(60):
            await place.backend.stop(box.running.handle, grace_s=1)


@own_place
async def test_a_paused_sandbox_is_adopted_paused() -> None:
    async with container_place() as place, place.sandbox() as box:
        await place.backend.pause(box.running.handle)
        await box.guest.aclose()
        await place.restart()
        found = await place.backend.recover(box.running.handle)
        assert isinstance(found, Running)
        box.running, box.backend = found, place.backend
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await box.guest.ping()
        await place.backend.resume(found.handle)
        assert (await box.run("echo alive")).stdout == b"alive\n"


@own_place
async def test_sandboxes_outlive_the_launcher_and_the_next_start_gets_a_new_one() -> None:
    async with container_place() as place, place.sandbox() as first:
        backend = place.backend
        assert isinstance(backend, ContainerBackend)
        launcher = backend._launcher.pid
        assert launcher is not None
        os.kill(launcher, signal.SIGKILL)
        async with asyncio.timeout(60):
            while backend._launcher.pid == launcher:
                await asyncio.sleep(0.01)
        async with place.sandbox() as second:
            assert backend._launcher.pid not in (None, launcher)
            for box in (first, second):
                assert (await box.run("echo alive")).stdout == b"alive\n"


def half_made(plan: StartPlan, backend: ContainerBackend, *, steps: int) -> None:
    """What a start leaves that was cut after so many steps."""
    driver = backend._driver
    assert driver is not None
    made: list[Callable[[], object]] = [
        (plan.state_dir / "upper").mkdir,
        lambda: (plan.state_dir / "work/work").mkdir(parents=True),
        lambda: (plan.run_dir / "agent.sock").write_bytes(b""),
        lambda: driver.create(plan.sandbox_id, CgroupLimits(pids=10), owner=0).__exit__(),
        lambda: (plan.state_dir / "disk.img").write_bytes(b""),
        (plan.state_dir / "disk").mkdir,
    ]
    for step in made[:steps]:
        step()


@pytest.mark.parametrize("steps", range(7))
async def test_half_made_sandboxes_are_removed(place: Place, steps: int) -> None:
    backend = place.backend
    assert isinstance(backend, ContainerBackend)
    plan = place.plan()
    half_made(plan, backend, steps=steps)
    await place.destroy(plan)
    assert backend._driver is not None
    assert not backend._driver.exists(plan.sandbox_id)


async def test_a_start_that_finds_its_place_taken_fails_and_cleans_up(place: Place) -> None:
    plan = place.plan()
    (plan.state_dir / "upper").mkdir()
    with pytest.raises(StartError, match="upper"):
        await place.backend.start(plan)
    assert list(plan.state_dir.iterdir()) == []
    await place.destroy(plan)


async def test_a_plan_too_large_for_one_request_fails_and_cleans_up(place: Place) -> None:
    plan = place.plan()
    image = replace(plan.image, layers=plan.image.layers * 300)
    with pytest.raises(StartError) as failed:
        await place.backend.start(replace(plan, image=image))
    assert not failed.value.retryable
    await place.destroy(plan)


async def test_an_agent_that_is_killed_from_outside_is_gone(place: Place) -> None:
    async with place.sandbox() as box:
        os.kill(int(box.running.handle.data["pid"]), signal.SIGKILL)
        async with asyncio.timeout(60):
            await box.guest.wait_closed()
            while await place.backend.reconnect(box.running.handle) is not None:
                await asyncio.sleep(0.01)
        await place.backend.stop(box.running.handle, grace_s=1)


async def test_a_sandbox_under_load_is_destroyed(place: Place) -> None:
    async with place.sandbox() as box:
        await box.start("while true; do (sleep 100 &); done")
        await box.start("i=0; while true; do i=$((i+1)); mkdir -p /tmp/$i/$i; echo x > /tmp/$i/f; done")
        await asyncio.sleep(0.3)
