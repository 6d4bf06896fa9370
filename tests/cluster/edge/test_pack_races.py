"""What happens to a pack, and to a sandbox that is packed, when something else happens meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator

import pytest
from tests.cluster.edge.packs import SLOW_BYTES, PackFailedError, is_frozen, ok, pack, staged, store_of
from tests.cluster.edge.processes import EdgeProcess

from opendsec.store.images import ImageStore

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.root,
    pytest.mark.userns,
    pytest.mark.netns,
    pytest.mark.cgroup,
    pytest.mark.erofs,
    pytest.mark.overlay,
    pytest.mark.native,
]
SPEC = {"image": "busybox", "init_user": "root", "lifetime": {"ttl_running_stop": None}}


async def slow_to_pack(edge: EdgeProcess, **spec: object) -> str:
    """A sandbox whose pack takes seconds."""
    sandbox_id = await edge.create(**{**SPEC, **spec})
    await ok(edge, sandbox_id, f"truncate -s {SLOW_BYTES} /slow; echo 1 > /small")
    return sandbox_id


async def standing_still(edge: EdgeProcess, sandbox_id: str) -> None:
    """Until it does, and its layer is being written."""
    async with asyncio.timeout(60):
        while not (is_frozen(edge, sandbox_id) and staged(edge)):
            await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def packing(
    edge: EdgeProcess, sandbox_id: str, name: str, *, headers: dict[str, str] | None = None
) -> AsyncIterator[asyncio.Task[dict[str, object]]]:
    """A pack that has made the sandbox stand still, as a task."""
    task = asyncio.create_task(pack(edge, sandbox_id, name, headers=headers))
    try:
        await standing_still(edge, sandbox_id)
        yield task
    finally:
        if not task.done():
            task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def images(edge: EdgeProcess) -> set[str]:
    return {image.name for image in ImageStore(store_of(edge)).list()}


async def test_delete_wins_and_nothing_is_published(shared_containers: EdgeProcess) -> None:
    edge = shared_containers
    sandbox_id = await slow_to_pack(edge)
    async with packing(edge, sandbox_id, "deleted") as task:
        assert (await edge.delete(sandbox_id))["state"] == "stopped", "a delete does not wait for a pack"
        with pytest.raises(PackFailedError) as failed:
            await task
    assert (failed.value.code, failed.value.fields["detail"]["end_reason"]) == ("sandbox_exited", "stopped")
    assert "deleted" not in images(edge)
    assert staged(edge) == []
    with pytest.raises(PackFailedError) as failed:
        await pack(edge, sandbox_id, "deleted")
    assert failed.value.code == "sandbox_exited"


async def test_no_time_limit_ends_a_pack(shared_containers: EdgeProcess) -> None:
    edge = shared_containers
    sandbox_id = await slow_to_pack(edge)
    limits = {"ttl_running_stop": 0.1, "ttl_max_stop": 0.1}
    async with packing(edge, sandbox_id, "in-time") as task:
        changed = await edge.client.patch(f"/v1/sandboxes/{sandbox_id}", json={"lifetime": limits})
        assert changed.status_code == 200, changed.text
        assert not task.done(), "the limits must be over while it goes on for this to be a test"
        assert (await task)["changed"]
    async with asyncio.timeout(60):
        while (status := (await edge.client.get(f"/v1/sandboxes/{sandbox_id}")).json())["state"] != "stopped":
            await asyncio.sleep(0.05)
    assert status["end_reason"] == "expired_max"


async def test_pause_and_resume_wait_for_the_reading(shared_containers: EdgeProcess) -> None:
    edge = shared_containers
    sandbox_id = await slow_to_pack(edge)
    async with packing(edge, sandbox_id, "then-paused") as task:
        paused = await edge.client.post(f"/v1/sandboxes/{sandbox_id}/pause")
        assert paused.json()["state"] == "paused"
        assert (await task)["changed"]
    assert is_frozen(edge, sandbox_id)
    async with packing(edge, sandbox_id, "then-resumed") as task:
        resumed = await edge.client.post(f"/v1/sandboxes/{sandbox_id}/resume")
        assert resumed.json()["state"] == "running"
        assert (await task)["frozen_ms"] == 0, "it was paused anyway"
    assert not is_frozen(edge, sandbox_id)
    assert await ok(edge, sandbox_id, "cat /small") == "1\n"


async def test_commands_wait_and_lose_nothing(shared_containers: EdgeProcess) -> None:
    edge = shared_containers
    sandbox_id = await slow_to_pack(edge)
    running = await edge.begin(sandbox_id, "for i in $(seq 40); do echo $i; sleep 0.05; done; exit 7")
    async with packing(edge, sandbox_id, "busy") as task:
        given = asyncio.create_task(edge.run(sandbox_id, "echo given meanwhile"))
        written = asyncio.create_task(
            edge.client.put(f"/v1/sandboxes/{sandbox_id}/files/content?path=/uploaded", content=b"meanwhile")
        )
        made = await task
    done = await given
    assert bytes(done.stdout) == b"given meanwhile\n"
    assert (await written).status_code == 200
    out = await edge.output(sandbox_id, running)
    assert bytes(out.stdout) == b"".join(b"%d\n" % number for number in range(1, 41))
    assert out.result is not None
    assert out.result["exit_code"] == 7
    again = await edge.create(**{**SPEC, "image": made["image"]})
    assert await ok(edge, again, "cat /small; ls /uploaded 2>&1 | grep -c 'No such'") == "1\n1\n"


async def test_a_client_that_leaves_changes_nothing_and_may_ask_again(shared_containers: EdgeProcess) -> None:
    edge = shared_containers
    sandbox_id = await slow_to_pack(edge)
    body, key = {"name": "left"}, {"Idempotency-Key": f"left-{sandbox_id}"}
    async with packing(edge, sandbox_id, "left", headers=key):
        pass
    assert is_frozen(edge, sandbox_id)
    answer = await edge.client.post(f"/v1/sandboxes/{sandbox_id}/pack", json=body, headers=key)
    lines = [json.loads(line) for line in answer.text.splitlines()]
    assert lines[-1]["result"]["changed"]
    assert all(line["phase"] for line in lines[:-1])
    assert len(lines) > 1, "progress was told"
    assert "left" in images(edge)


async def test_many_sandboxes_are_packed_a_few_at_a_time(shared_containers: EdgeProcess) -> None:
    edge = shared_containers
    ids = [await edge.create(**SPEC) for _ in range(6)]
    for number, sandbox_id in enumerate(ids):
        await ok(edge, sandbox_id, f"head -c 3000000 /dev/urandom > /data; echo {number} > /number")
    made = await asyncio.gather(*(pack(edge, one, f"many-{number}") for number, one in enumerate(ids)))
    for number, one in enumerate(made):
        again = await edge.create(**{**SPEC, "image": one["image"]})
        assert await ok(edge, again, "cat /number") == f"{number}\n"


async def test_an_edge_that_is_killed_leaves_nothing_half_done_and_nothing_frozen(containers: EdgeProcess) -> None:
    edge = containers
    running, paused = await slow_to_pack(edge), await slow_to_pack(edge)
    await edge.client.post(f"/v1/sandboxes/{paused}/pause")
    counting = await edge.begin(running, "for i in $(seq 60); do echo $i; sleep 0.05; done")
    async with packing(edge, running, "killed"):
        other = asyncio.create_task(pack(edge, paused, "killed-paused"))
        await asyncio.sleep(0.3)
        assert staged(edge), "it was in the middle"
        edge.kill()
        await asyncio.gather(other, return_exceptions=True)
    await edge.start()
    assert not is_frozen(edge, running)
    assert is_frozen(edge, paused)
    assert staged(edge) == []
    assert images(edge).isdisjoint({"killed", "killed-paused"})
    out = await edge.output(running, counting)
    assert bytes(out.stdout) == b"".join(b"%d\n" % number for number in range(1, 61))
    made = await pack(edge, running, "killed")
    again = await edge.create(**{**SPEC, "image": made["image"]})
    assert await ok(edge, again, "cat /small; stat -c %s /slow") == f"1\n{SLOW_BYTES}\n"


async def test_an_edge_that_is_stopped_lets_the_sandbox_go_on(containers: EdgeProcess) -> None:
    edge = containers
    sandbox_id = await slow_to_pack(edge)
    async with packing(edge, sandbox_id, "stopped"):
        pass  # a client that waits would be answered first
    try:
        assert edge.stop() == 0
        assert not is_frozen(edge, sandbox_id)
        assert "stopped" not in images(edge)
    finally:
        await edge.start()
    assert staged(edge) == []
    assert await ok(edge, sandbox_id, "cat /small") == "1\n"
