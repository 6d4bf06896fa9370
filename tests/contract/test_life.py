"""The life of a sandbox on every backend: start, pause, recover, stop, destroy; each once or many times over."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from pathlib import Path

import pytest
from tests.contract.harness import Place, Sandbox

from opendsec.backends.base import Capability
from opendsec.errors import UnsupportedError
from opendsec.guest.base import GuestGoneError, GuestLostError
from opendsec.model.ids import SandboxId

pytestmark = pytest.mark.anyio


async def test_the_report_agrees_with_the_capabilities(place: Place) -> None:
    report = place.backend.report()
    assert report.available
    assert set(report.capabilities) == {capability.value for capability in place.backend.capabilities}
    assert {Capability.EXEC, Capability.FILES, Capability.PAUSE, Capability.RECOVER} <= place.backend.capabilities


async def test_what_is_not_declared_is_refused(box: Sandbox, tmp_path: Path) -> None:
    if Capability.SNAPSHOT in box.backend.capabilities:
        pytest.skip("capability: snapshot: declared here")
    with pytest.raises(UnsupportedError):
        await box.backend.snapshot(box.running.handle, tmp_path)


async def test_a_paused_sandbox_stands_still(box: Sandbox) -> None:
    handle = box.running.handle
    command = await box.start("cat; echo done", stdin=True)
    await box.backend.pause(handle)
    await box.backend.pause(handle)
    if box.backend.parks:
        await asyncio.sleep(0.3)
        await box.backend.resume(handle)
        await box.backend.resume(handle)
        guest = await box.backend.reconnect(handle)
        assert guest is not None
        box.running.guest = guest
        await guest.attach(command, 0, 0)
        await guest.write_stdin(command, 0, b"", eof=True)
        assert (await box.finish(command)).stdout == b"done\n"
        return
    async with asyncio.TaskGroup() as group:
        finishing = group.create_task(box.finish(command))
        group.create_task(box.guest.write_stdin(command, 0, b"", eof=True))  # which would end it at once
        await asyncio.sleep(0.3)
        assert not finishing.done()
        await box.backend.resume(handle)
        await box.backend.resume(handle)
    assert finishing.result().stdout == b"done\n"


async def test_a_paused_sandbox_can_be_recovered_stopped_and_destroyed(place: Place) -> None:
    async with place.sandbox() as box:
        await box.backend.pause(box.running.handle)
        await box.guest.aclose()
        assert await box.backend.recover(box.running.handle) is not None
        await box.backend.stop(box.running.handle, grace_s=0.1)
    async with place.sandbox() as box:
        await box.backend.pause(box.running.handle)


async def test_stop_ends_everything_and_may_be_repeated(box: Sandbox) -> None:
    command = await box.start("sleep 1000")
    for _ in range(2):
        await box.backend.stop(box.running.handle, grace_s=0.2)
    await box.guest.wait_closed()
    assert box.guest.closed
    with contextlib.suppress(GuestLostError):  # a killed command may still have said so
        assert (await box.finish(command)).exit.signal != 0
    assert await box.backend.recover(box.running.handle) is None
    with contextlib.suppress(GuestGoneError):  # a None with the words to tell
        assert await box.backend.reconnect(box.running.handle) is None


async def test_destroy_may_come_first_and_twice(place: Place) -> None:
    plan = place.plan()
    for _ in range(2):
        await place.backend.destroy(
            plan.sandbox_id, None, state_dir=plan.state_dir, run_dir=plan.run_dir, slot=plan.slot
        )
    running = await place.backend.start(plan)
    await place.backend.destroy(
        plan.sandbox_id, running.handle, state_dir=plan.state_dir, run_dir=plan.run_dir, slot=plan.slot
    )
    assert await place.backend.recover(running.handle) is None
    await place.destroy(plan)


async def test_a_cancelled_start_leaves_what_destroy_removes(place: Place) -> None:
    for delay_s in (0, 0.001, 0.003, 0.01):
        plan = place.plan()
        try:
            async with asyncio.timeout(delay_s):
                await place.backend.start(plan)
        except TimeoutError:
            pass
        await place.destroy(plan)


async def test_many_start_and_end_at_once(place: Place) -> None:
    async def one() -> None:
        async with place.sandbox() as box:
            assert (await box.run("echo hi")).stdout == b"hi\n"

    count = 8 if place.is_emulated else 20  # of machines, twice as many as are restored at once
    async with asyncio.TaskGroup() as group:
        for _ in range(count):
            group.create_task(one())
    assert place.backend.report().live == 0


async def test_sandboxes_do_not_share_files(place: Place) -> None:
    async with place.sandbox() as first, place.sandbox() as second:
        await first.run("echo secret > /tmp/f")
        assert (await second.run("cat /tmp/f")).exit.exit_code == 1


async def test_usage_is_known(box: Sandbox) -> None:
    await box.run("true")  # a machine tells before every end of a command
    usage = box.backend.usage(box.running.handle)
    assert (usage.oom_kills, usage.pids_denied, usage.disk_full) == (0, 0, False)
    await box.backend.stop(box.running.handle, grace_s=0)
    box.backend.usage(box.running.handle)  # gone is no error


async def test_a_handle_of_another_life_is_gone(box: Sandbox) -> None:
    data = {**box.running.handle.data, "boot_id": "another", "start_ticks": 1}
    other = replace(box.running.handle, sandbox_id=SandboxId(box.running.handle.sandbox_id + "x"), data=data)
    assert await box.backend.recover(other) is None
    await box.backend.stop(other, grace_s=0)
    assert (await box.run("echo alive")).stdout == b"alive\n"
