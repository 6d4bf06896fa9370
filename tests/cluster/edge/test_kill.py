"""kill -9 of an edge with real containers under load: nothing is lost, nothing is left over."""

from __future__ import annotations

import asyncio
import secrets
import shutil
import time
from typing import Any

import httpx
import pytest
from tests.cluster.edge.processes import EdgeProcess

from opendsec.linux.cgroup import choose_driver, find_mounts

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


async def restart(edge: EdgeProcess) -> None:
    edge.kill()
    await edge.start()


async def until_known(edge: EdgeProcess, sandbox_id: str, script: str, **fields: Any) -> Any:
    """As a client does: the same operation id until there is an answer."""
    operation = secrets.token_hex(8)
    async with asyncio.timeout(60):
        while True:
            try:
                done = await edge.run(sandbox_id, script, operation_id=operation, **fields)
            except httpx.TransportError:
                await asyncio.sleep(0.05)
                continue
            if done.result is not None:
                return done
            assert done.error is None, done.error


async def test_commands_outlive_the_edge(containers: EdgeProcess) -> None:
    edge = containers
    sandbox_id = await edge.create(**SPEC)
    quiet = await edge.begin(sandbox_id, "echo before; sleep 3; echo after; exit 5")
    noisy = await edge.begin(
        sandbox_id, "i=0; while [ $i -lt 60000 ]; do echo line-$i; i=$((i+1)); done; echo err >&2; exit 6"
    )
    cat = await edge.begin(sandbox_id, "cat", stdin=True)
    stdin = f"/v1/sandboxes/{sandbox_id}/commands/{cat}/stdin"
    assert (await edge.client.post(f"{stdin}?offset=0", content=b"hello ")).json()["accepted"] == 6
    for _ in range(3):
        await restart(edge)
    assert (await edge.client.post(f"{stdin}?offset=4&eof=true", content=b"o world")).json()["closed"]
    assert bytes((await edge.output(sandbox_id, cat)).stdout) == b"hello world"
    done = await edge.output(sandbox_id, quiet)
    assert (bytes(done.stdout), done.result and done.result["exit_code"]) == (b"before\nafter\n", 5)
    done = await edge.output(sandbox_id, noisy)
    assert bytes(done.stdout) == b"".join(b"line-%d\n" % n for n in range(60_000))
    assert (bytes(done.stderr), done.result and done.result["exit_code"]) == (b"err\n", 6)


async def test_kills_under_load_lose_nothing(containers: EdgeProcess) -> None:
    edge = containers
    ids = [await edge.create(**SPEC) for _ in range(4)]
    results: list[tuple[str, int, Any]] = []
    stop = asyncio.Event()

    async def work(sandbox_id: str, lane: int) -> None:
        count = 0
        while not stop.is_set():
            script = f"echo {lane}-{count} >> /log-{lane}; echo out-{count}; exit {count % 100}"
            done = await until_known(edge, sandbox_id, script)
            results.append((sandbox_id, count, done))
            count += 1
        log = await until_known(edge, sandbox_id, f"cat /log-{lane}")
        assert bytes(log.stdout).decode().split() == [f"{lane}-{n}" for n in range(count)], (
            "a command ran twice, or never"
        )

    async def more_results(count: int) -> None:
        wanted = len(results) + count
        async with asyncio.timeout(60):
            while len(results) < wanted:
                await asyncio.sleep(0.01)

    async with asyncio.TaskGroup() as group:
        for sandbox_id in ids:
            for lane in range(3):
                group.create_task(work(sandbox_id, lane))
        for _ in range(4):
            await more_results(12)
            await restart(edge)
        await more_results(12)
        stop.set()
    for _, count, done in results:
        assert bytes(done.stdout) == b"out-%d\n" % count
        assert done.result["exit_code"] == count % 100
        assert done.result["end_reason"] == "exited"


async def test_kills_while_creating_and_deleting_leave_nothing_behind(containers: EdgeProcess) -> None:
    edge = containers

    async def ask(method: str, url: str, body: Any = None) -> None:
        try:
            await edge.client.request(method, url, json=body)
        except httpx.TransportError:
            return

    known: list[str] = []
    for round_number in range(3):
        fresh = [f"sbx-local-{secrets.token_hex(8).translate(str.maketrans('0189', 'wxyz'))}" for _ in range(12)]
        creating = [
            asyncio.ensure_future(ask("POST", "/v1/sandboxes", {"spec": SPEC, "sandbox_id": one})) for one in fresh
        ]
        deleting = [asyncio.ensure_future(ask("DELETE", f"/v1/sandboxes/{one}")) for one in known]
        await asyncio.sleep(0.02 * (round_number + 1))
        await restart(edge)
        await asyncio.gather(*creating, *deleting)
        items = (await edge.client.get("/v1/sandboxes?state=all&limit=1000")).json()["items"]
        known = [item["sandbox_id"] for item in items if item["state"] == "running"]
        for one in known:
            done = await edge.run(one, "echo alive")
            assert bytes(done.stdout) == b"alive\n"
        assert all(item["state"] in ("running", "stopping", "stopped", "failed") for item in items)
    until = time.monotonic() + 60
    while (await edge.client.get("/v1/sandboxes?state=stopping")).json()["items"]:
        assert time.monotonic() < until
        await asyncio.sleep(0.05)


async def test_sandbox_killed_while_no_edge_ran(containers: EdgeProcess) -> None:
    edge = containers
    sandbox_id = await edge.create(**SPEC)
    command_id = await edge.begin(sandbox_id, "echo begun; sleep 1000")
    edge.kill()
    driver = choose_driver(find_mounts(), root=edge.cgroup)
    driver.open()
    try:
        driver.kill(sandbox_id)
    finally:
        driver.close()
    # As a reboot leaves it: the tmpfs is empty.
    shutil.rmtree(edge.socket.parent / "sbx")
    await edge.start()
    async with asyncio.timeout(60):
        while (status := (await edge.client.get(f"/v1/sandboxes/{sandbox_id}")).json())["state"] == "stopping":
            await asyncio.sleep(0.02)
    assert (status["state"], status["end_reason"]) == ("failed", "guest_lost")
    done = await edge.output(sandbox_id, command_id)
    assert done.result is not None
    assert (done.result["exit_code"], done.result["end_reason"]) == (None, "sandbox_ended")


async def test_waiting_session_commands_keep_their_place(containers: EdgeProcess) -> None:
    edge = containers
    sandbox_id = await edge.create(**SPEC)
    first = await edge.begin(
        sandbox_id, "kept=1; sleep 2; echo a >> /log; exit_is() { return $1; }; exit_is 3", session="s"
    )
    second = await edge.begin(sandbox_id, "echo b$kept >> /log; cat /log", session="s")
    await restart(edge)
    done = await edge.output(sandbox_id, first)
    assert done.result is not None
    assert (done.result["exit_code"], done.result["end_reason"]) == (3, "exited")
    done = await edge.output(sandbox_id, second)
    assert done.result is not None
    assert (bytes(done.stdout), done.result["exit_code"]) == (b"a\nb1\n", 0)


async def test_paused_stays_paused(containers: EdgeProcess) -> None:
    edge = containers
    sandbox_id = await edge.create(**SPEC)
    command_id = await edge.begin(sandbox_id, "sleep 0.5; echo over")
    assert (await edge.client.post(f"/v1/sandboxes/{sandbox_id}/pause")).json()["state"] == "paused"
    await restart(edge)
    assert (await edge.client.get(f"/v1/sandboxes/{sandbox_id}")).json()["state"] == "paused"
    done = await edge.run(sandbox_id, "echo resumed")
    assert bytes(done.stdout) == b"resumed\n"
    assert bytes((await edge.output(sandbox_id, command_id)).stdout) == b"over\n"
    await edge.client.post(f"/v1/sandboxes/{sandbox_id}/pause")
    assert (await edge.delete(sandbox_id))["state"] == "stopped"
