"""Snapshots, forks and ports by the SDK, over an apiserver and edges."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import pytest
from tests.cluster.client.whole_road import Road, whole_road

import opendsec
import opendsec.sync
from opendsec import BackendKind, DSecContainerRunArgs, DSecMicroVMRunArgs, SandboxState, Started
from opendsec.model.ids import SandboxId, edge_of
from opendsec.model.node import BackendReport

pytestmark = pytest.mark.anyio

ARGS = DSecContainerRunArgs(container_image="any", backend=BackendKind.DUMMY, ttl_running_stop=None)


def warm(**fields: object) -> DSecMicroVMRunArgs:
    return DSecMicroVMRunArgs(snapshot="warm", backend=BackendKind.DUMMY, **fields)  # type: ignore[arg-type]


@pytest.fixture
async def road(tmp_path: Path) -> AsyncIterator[Road]:
    async with whole_road(tmp_path) as road:
        yield road


async def test_a_snapshot_starts_many(road: Road) -> None:
    async with road.client() as client, client.container(ARGS) as source:
        await source.run_shell("echo before > /f")
        summary = await source.snapshot("warm", timeout=20)
        assert (summary.name, summary.source) == ("warm", source.id)
        await source.run_shell("echo after > /f")
        started = [one async for one in client.run_many(warm(labels={"of": "warm"}), 5)]
        assert all(isinstance(one, Started) for one in started)
        for one in started:
            assert isinstance(one, Started)
            assert (await one.sandbox.run_shell("cat /f")).stdout == "before\n"
        assert [one.name for one in await client.snapshots.list()] == ["warm"]
        assert (await client.snapshots.get("warm")).users == 5
        with pytest.raises(opendsec.ConflictError, match="is needed by"):
            await client.snapshots.remove("warm")
        for one in started:
            assert isinstance(one, Started)
            await one.sandbox.stop()
        assert (await client.snapshots.remove("warm")).name == "warm"
        with pytest.raises(opendsec.NotFoundError, match="no snapshot 'warm'"):
            await client.run(warm())
        with pytest.raises(opendsec.NotFoundError):
            await client.snapshots.get("warm")


async def test_who_may(road: Road) -> None:
    async with (
        road.client() as builder,
        road.client("runner") as runner,
        road.client("other") as other,
        runner.container(ARGS) as source,
    ):
        with pytest.raises(opendsec.ForbiddenError):
            await source.snapshot("warm")
        await (await builder.connect(source.id)).snapshot("warm")
        assert [one.name for one in await runner.snapshots.list()] == ["warm"]
        async with runner.microvm(warm()):
            pass
        (fork,) = await source.fork()
        await fork.stop()
        with pytest.raises(opendsec.ForbiddenError):
            await runner.snapshots.remove("warm")
        assert await other.snapshots.list() == ()
        for attempt in (other.run(warm()), other.snapshots.remove("warm")):
            with pytest.raises(opendsec.NotFoundError, match="no snapshot"):
                await attempt
        await builder.snapshots.remove("warm")


async def test_a_snapshot_is_started_from_where_it_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with whole_road(tmp_path, edges=("a", "b", "c"), own_stores=True) as road, road.client() as client:
        source = await client.run(ARGS)
        await source.snapshot("warm")
        for _ in range(4):
            sandbox = await client.run(warm())
            assert edge_of(sandbox.id) == edge_of(source.id)
        assert [one.name for one in await client.snapshots.list()] == ["warm"]
        here = road.backends[edge_of(source.id)]
        monkeypatch.setattr(here, "report", lambda: BackendReport(available=True, binding="another"))
        with pytest.raises(opendsec.OpenDSecError) as raised:
            await client.run(warm())
        assert "this node has another" in str(raised.value)


async def test_forks_are_all_there_or_none(road: Road, monkeypatch: pytest.MonkeyPatch) -> None:
    async with road.client() as client, client.container(ARGS) as source:
        await source.run_shell("echo now > /f; cd /tmp", session="s")
        forks = await source.fork(3, labels={"a": "b"}, idempotency_key="mine")
        assert len({fork.id for fork in forks}) == 3
        again = await source.fork(3, labels={"a": "b"}, idempotency_key="mine")
        assert [fork.id for fork in again] == [fork.id for fork in forks]
        for fork in forks:
            assert (await fork.run_shell("cat /f; pwd", session="s")).stdout == "now\n/tmp\n"
            await fork.stop()
        node = road.nodes["a"]
        monkeypatch.setattr(road.backends["a"], "report", lambda: BackendReport(available=True))
        start, began = road.backends["a"].start, []

        async def failing(plan: object) -> object:
            began.append(plan)
            if len(began) == 2:
                raise opendsec.StartError("no more")
            return await start(plan)  # type: ignore[arg-type]

        monkeypatch.setattr(road.backends["a"], "start", failing)
        with pytest.raises(opendsec.StartError, match="no more"):
            await source.fork(3)
        assert [one.sandbox_id for one in node.all(project=None) if one.live] == [source.id]
        assert list((node.settings.state_dir / "forks" / "default").iterdir()) == []


async def test_a_fork_that_is_not_there_in_time_leaves_none(road: Road, monkeypatch: pytest.MonkeyPatch) -> None:
    async with road.client() as client, client.container(ARGS) as source:
        start, began, slow = road.backends["a"].start, [], asyncio.Event()

        async def hanging(plan: object) -> object:
            began.append(plan)
            if len(began) == 2:
                await slow.wait()
            return await start(plan)  # type: ignore[arg-type]

        monkeypatch.setattr(road.backends["a"], "start", hanging)
        asyncio.get_running_loop().call_later(4, slow.set)
        with pytest.raises(opendsec.DeadlineError):
            await source.fork(3, timeout=2)
        assert len(began) >= 3, "others were started"
        with anyio.fail_after(20):
            while [one for one in road.nodes["a"].all(project=None) if one.live and one.sandbox_id != source.id]:
                await anyio.sleep(0.01)


async def test_a_fork_nobody_waits_for_any_more_is_ended(road: Road, monkeypatch: pytest.MonkeyPatch) -> None:
    async with road.client() as client, client.container(ARGS) as source:
        node, saves = road.nodes["a"], []
        backend = road.backends["a"]
        save = backend.snapshot

        async def saving(*args: object) -> None:
            saves.append(args)
            await save(*args)  # type: ignore[arg-type]

        monkeypatch.setattr(backend, "snapshot", saving)
        forking = asyncio.ensure_future(source.fork(20))
        with anyio.fail_after(10):
            while len(node.all(project=None)) < 2:
                await asyncio.sleep(0)
        forking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await forking
        assert len(saves) == 1, "nothing is saved once more for what nobody wants"
        with anyio.fail_after(10):
            while [one for one in node.all(project=None) if one.live and one.sandbox_id != source.id]:
                await anyio.sleep(0.01)


async def test_a_port_goes_both_ways(road: Road) -> None:
    async with road.client() as client, client.container(ARGS) as sandbox:
        async with await sandbox.ports.connect(7) as stream:
            await stream.write(b"hello")
            assert await stream.read() == b"hello"
            await stream.write(b"bye")
            await stream.write_eof()
            assert await stream.read() == b"bye"
            assert await stream.read() == b""
            assert await stream.read() == b""
        data = bytes(range(256)) * 40_000
        async with await sandbox.ports.connect(7) as stream, anyio.create_task_group() as group:

            async def send() -> None:
                await stream.write(data)
                await stream.write_eof()

            group.start_soon(send)
            found = bytearray()
            while part := await stream.read():
                found += part
        assert bytes(found) == data


async def test_a_port_nobody_listens_on_is_a_plain_error(road: Road) -> None:
    async with road.client() as client, client.container(ARGS) as sandbox:
        with pytest.raises(opendsec.ConflictError, match="port 8: Connection refused inside the sandbox") as raised:
            await sandbox.ports.connect(8)
        assert raised.value.detail["errno"] == "ECONNREFUSED"
        for port in (0, 65536, "80", True, None):
            with pytest.raises(opendsec.InvalidSpecError, match="port: "):
                await sandbox.ports.connect(port)  # type: ignore[arg-type]
        for ask in (functools.partial(sandbox.ports.connect, 7), sandbox.stop):
            with pytest.raises(opendsec.InvalidSpecError, match="timeout: "):
                await ask(timeout=0)
        with pytest.raises(opendsec.UnauthorizedError):
            async with opendsec.DSecClient(road.url, "wrong") as stranger:
                await opendsec.Sandbox(stranger._transport, sandbox.id).ports.connect(7)
    with pytest.raises(opendsec.SandboxExitedError):
        async with road.client() as client:
            await opendsec.Sandbox(client._transport, sandbox.id).ports.connect(7)


async def test_a_port_that_is_not_connected_in_time_says_so() -> None:
    over = asyncio.Event()

    async def never(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(1000):
            pass
        writer.close()
        over.set()

    async with await asyncio.start_server(never, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        client = opendsec.DSecClient(url, "key")  # not opened: that asks the server who it is
        with anyio.fail_after(20), pytest.raises(opendsec.DeadlineError, match="not made within its time"):
            await opendsec.Sandbox(client._transport, SandboxId("sbx-a-1")).ports.connect(7, timeout=0.2)
        await client.close()
        await over.wait()


async def test_an_open_port_keeps_the_sandbox_from_idling_and_its_end_cuts_it(road: Road) -> None:
    async with road.client() as client, client.container(ARGS) as sandbox:
        box = road.nodes["a"].get(sandbox.id, project=None)
        async with await sandbox.ports.connect(7):
            assert box.life.busy == 1
        with anyio.fail_after(5):
            while box.life.busy:
                await anyio.sleep(0.01)
        async with await sandbox.ports.connect(7) as stream:
            await sandbox.stop()
            with pytest.raises((opendsec.SandboxError, opendsec.TransportError)), anyio.fail_after(5):
                await stream.read()


async def test_a_port_is_cut_by_parking_and_a_new_one_wakes_the_sandbox(tmp_path: Path) -> None:
    async with whole_road(tmp_path, parks=True) as road, road.client() as client:
        sandbox = await client.run(ARGS)
        async with await sandbox.ports.connect(7) as stream:
            await sandbox.pause()
            with pytest.raises((opendsec.SandboxError, opendsec.TransportError)), anyio.fail_after(5):
                await stream.read()
        assert (await sandbox.status()).state is SandboxState.PAUSED
        async with await sandbox.ports.connect(7) as stream:
            await stream.write(b"awake")
            assert await stream.read() == b"awake"


async def test_the_sync_sdk_does_the_same(road: Road) -> None:
    def work() -> None:
        with opendsec.sync.DSecClient(road.url, road.keys["builder"], timeout=20) as client:
            sandbox = client.run(ARGS)
            with sandbox.ports.connect(7) as stream:
                stream.write(b"x" * 100)
                stream.write_eof()
                found = b""
                while part := stream.read():
                    found += part
                assert found == b"x" * 100
            sandbox.snapshot("warm")
            (fork,) = sandbox.fork(1)
            assert fork.run_shell("echo hi").stdout == "hi\n"
            other = client.run_microvm(warm())
            for one in (fork, other, sandbox):
                one.stop()
            assert client.snapshots.remove("warm").name == "warm"

    await asyncio.to_thread(work)
