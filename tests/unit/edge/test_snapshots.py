"""Snapshots and forks on one edge: what is saved, who starts from it, and what is left when something ends midway."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from tests.unit.edge.edges import created, dummy_spec, edge, ended, output, run, settings_below, until

from opendsec.backends.base import Handle
from opendsec.backends.dummy import DummyBackend
from opendsec.edge.images import AnyImage
from opendsec.edge.node import Node
from opendsec.edge.origins import Origins
from opendsec.edge.sandbox import Sandbox
from opendsec.edge.server import edge_app
from opendsec.edge.snapshot_routes import SnapshotRoutes
from opendsec.edge.snapshotting import Snapshotting
from opendsec.errors import (
    ConflictError,
    DiskFullError,
    InvalidSpecError,
    NotFoundError,
    SandboxExitedError,
    SnapshotInvalidError,
    UnsupportedError,
)
from opendsec.model.command import ExecRequest
from opendsec.model.ids import new_sandbox_id
from opendsec.model.node import BackendReport, SandboxState
from opendsec.model.spec import BackendKind, Lifetime, Resources
from opendsec.store.images import ImageStore
from opendsec.wire.contracts import SnapshotRequest

pytestmark = pytest.mark.anyio

FOREVER = Lifetime(ttl_running_stop=None)


@contextlib.asynccontextmanager
async def node_of(root: Path, backend: DummyBackend) -> AsyncIterator[Node]:
    """An edge with a store of its own."""
    settings = settings_below(root)
    settings.state_dir.mkdir(parents=True, exist_ok=True)
    origins = Origins(settings.state_dir, ImageStore(root / "store"))
    async with Node(settings, backends={BackendKind.DUMMY: backend}, images=AnyImage(), origins=origins) as node:
        yield node


async def saved(node: Node, sandbox: Sandbox, name: str = "warm") -> None:
    await Snapshotting(node.origins).begin(sandbox, SnapshotRequest(name=name), key=None).wait()


async def from_snapshot(node: Node, name: str = "warm", **fields: object) -> Sandbox:
    return await created(node, dummy_spec("", snapshot=name, lifetime=FOREVER, **fields))


def nothing_half_done(root: Path) -> None:
    assert list((root / "state" / "saving").iterdir()) == []
    assert [path.name for path in (root / "store" / "staging").iterdir() if not path.name.startswith(".")] == []


@pytest.mark.parametrize("parks", [False, True])
async def test_a_sandbox_goes_on_from_what_was_saved(tmp_path: Path, parks: bool) -> None:
    async with node_of(tmp_path, DummyBackend(parks=parks)) as node:
        spec = dummy_spec(
            lifetime=FOREVER, resources=Resources(memory_limit_mb=64), env={"A": "1", "B": "2"}, labels={"of": "source"}
        )
        source = await created(node, spec)
        await run(source, "echo before > /f")
        await run(source, "cd /tmp; export C=3", session="shell")
        await saved(node, source)
        await run(source, "echo after > /f")
        one, two = await from_snapshot(node, env={"B": "22"}), await from_snapshot(node)
        assert (await run(one, "cat /f")).exit_code == 0
        for sandbox, wanted in ((one, b"before 1 22\n"), (two, b"before 1 2\n")):
            command = await ended(await sandbox.submit(ExecRequest(script="echo $(cat /f) $A $B; true")))
            assert command.result is not None
            command = await ended(await sandbox.submit(ExecRequest(script="cat /f; echo $A $B")))
            assert (await output(sandbox, command)).replace(b"before\n", b"before ") == wanted
        pwd = await ended(await one.submit(ExecRequest(script="pwd; echo $C", session="shell")))
        assert await output(one, pwd) == b"/tmp\n3\n"
        await run(one, "echo mine > /f")
        other = await ended(await two.submit(ExecRequest(script="cat /f")))
        assert await output(two, other) == b"before\n"
        told = one.status().spec
        assert (told.image, told.snapshot, told.resources.memory_limit_mb) == ("debian", "warm", 64)
        assert (dict(told.labels), dict(source.spec.labels)) == ({}, {"of": "source"})
        assert one.commands.get("cmd-3").number == 3, "numbers go on where the source's agent was"
        nothing_half_done(tmp_path)


async def test_the_same_create_again_finds_the_same_sandbox_also_after_a_restart(tmp_path: Path) -> None:
    backend, sandbox_id = DummyBackend(), new_sandbox_id("local")
    spec = dummy_spec("", snapshot="warm", lifetime=FOREVER)
    async with node_of(tmp_path, backend) as node:
        await saved(node, await created(node))
        first = await created(node, spec, sandbox_id=sandbox_id)
        assert await created(node, spec, sandbox_id=sandbox_id) is first
    async with node_of(tmp_path, backend) as node:
        again = await created(node, spec, sandbox_id=sandbox_id)
        assert again.status().spec.image == "debian"
        with pytest.raises(ConflictError):
            await created(node, replace(spec, snapshot=None, image="debian"), sandbox_id=sandbox_id)
        with pytest.raises(ConflictError, match=sandbox_id):
            node.origins.published.remove("default", "warm")
        await again.delete()
        assert node.origins.published.remove("default", "warm").name == "warm"


@pytest.mark.parametrize(
    ("fields", "error", "why"),
    [
        ({"snapshot": "none"}, NotFoundError, "no snapshot 'none'"),
        ({"snapshot": "../x"}, InvalidSpecError, "snapshot: "),
        ({"snapshot": "warm", "image": "debian"}, InvalidSpecError, "image: is what it was"),
        ({"snapshot": "warm", "resources": Resources(memory_limit_mb=8)}, InvalidSpecError, "memory_limit_mb: is what"),
    ],
)
async def test_what_contradicts_the_snapshot_is_refused_by_name(
    tmp_path: Path, fields: dict[str, Any], error: type[Exception], why: str
) -> None:
    async with node_of(tmp_path, DummyBackend()) as node:
        await saved(node, await created(node))
        with pytest.raises(error, match=why):
            await created(node, dummy_spec(**{"image": "", **fields}))
        assert len(node.all(project=None)) == 1


async def test_another_binding_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = DummyBackend()
    async with node_of(tmp_path, backend) as node:
        await saved(node, await created(node))
        monkeypatch.setattr(backend, "report", lambda: BackendReport(available=True, binding="dummy 2"))
        with pytest.raises(SnapshotInvalidError, match="only be read by dummy 1; this node has dummy 2"):
            await from_snapshot(node)
        assert len(node.all(project=None)) == 1


async def test_a_spoiled_snapshot_is_refused_by_name(tmp_path: Path) -> None:
    async with node_of(tmp_path, DummyBackend()) as node:
        await saved(node, await created(node))
    async with node_of(tmp_path, DummyBackend()) as node:
        file = node.origins.published.path("default", "warm") / "machine.json"
        text = file.read_bytes()
        file.chmod(0o600)
        file.write_bytes(text[:-2] + b" }")
        with pytest.raises(SnapshotInvalidError, match="the bytes of machine"):
            await from_snapshot(node)
        file.write_bytes(text)
        await from_snapshot(node)


async def test_one_that_was_checked_is_checked_again_when_it_may_be_another(tmp_path: Path) -> None:
    async with node_of(tmp_path, DummyBackend()) as node:
        await saved(node, await created(node))
        await from_snapshot(node)
        place = node.origins.published.path("default", "warm")
        file = place / "machine.json"
        file.chmod(0o600)
        file.write_bytes(file.read_bytes()[:-2] + b" }")
        place.rename(place.with_name("away")).rename(place)  # its number stays the same
        with pytest.raises(SnapshotInvalidError, match="the bytes of machine"):
            await from_snapshot(node)


async def test_one_that_was_checked_is_checked_again_when_it_was_written_to(tmp_path: Path) -> None:
    async with node_of(tmp_path, DummyBackend()) as node:
        await saved(node, await created(node))
        await from_snapshot(node)  # it was made here, so nothing was read yet
        file = node.origins.published.path("default", "warm") / "machine.json"
        text = file.read_bytes()
        file.chmod(0o600)
        file.write_bytes(text[:-2] + b" }")
        for _ in range(2):
            with pytest.raises(SnapshotInvalidError, match="the bytes of machine"):
                await from_snapshot(node)
        file.write_bytes(text)
        await from_snapshot(node)


async def test_projects_do_not_see_each_others(tmp_path: Path) -> None:
    async with node_of(tmp_path, DummyBackend()) as node:
        await saved(node, await created(node))
        with pytest.raises(NotFoundError):
            await node.create(dummy_spec("", snapshot="warm"), project="other", sandbox_id=new_sandbox_id("local"))
        assert node.origins.summaries("other") == []


async def test_one_that_is_parked_is_woken_for_it_and_parked_again(tmp_path: Path) -> None:
    async with node_of(tmp_path, DummyBackend(parks=True)) as node:
        sandbox = await created(node)
        command = await sandbox.submit(ExecRequest(script="sleep 0.2; echo end"))
        await sandbox.pause()
        await saved(node, sandbox)
        await until(lambda: sandbox.state is SandboxState.PAUSED)
        assert not command.done
        await sandbox.resume()
        assert await output(sandbox, await ended(command)) == b"end\n"


class Saves(DummyBackend):
    """Saving waits, and fails with what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.go, self.failure = asyncio.Event(), asyncio.Event(), None

    async def snapshot(self, handle: Handle, target: Path) -> None:
        self.begun.set()
        await self.go.wait()
        if self.failure is not None:
            raise self.failure
        await super().snapshot(handle, target)


async def test_a_failure_leaves_nothing_and_the_sandbox_running(tmp_path: Path) -> None:
    backend = Saves()
    backend.go.set()
    backend.failure = DiskFullError("no room")  # type: ignore[assignment]
    async with node_of(tmp_path, backend) as node:
        sandbox = await created(node)
        snapshotting = Snapshotting(node.origins)
        saving = snapshotting.begin(sandbox, SnapshotRequest(name="warm"), key="k")
        with pytest.raises(DiskFullError):
            await saving.wait()
        backend.failure = None
        nothing_half_done(tmp_path)
        assert node.origins.summaries("default") == []
        assert (await run(sandbox, "echo on")).exit_code == 0
        again = snapshotting.begin(sandbox, SnapshotRequest(name="warm"), key="k")
        assert (await again.wait()).snapshot.source == sandbox.sandbox_id
        assert snapshotting.begin(sandbox, SnapshotRequest(name="warm"), key="k") is again
        with pytest.raises(ConflictError, match="another snapshot"):
            snapshotting.begin(sandbox, SnapshotRequest(name="other"), key="k")
        with pytest.raises(ConflictError, match="already"):
            await snapshotting.begin(sandbox, SnapshotRequest(name="warm"), key="l").wait()


async def test_an_edge_that_ends_over_it_publishes_nothing_and_the_next_one_tidies_up(tmp_path: Path) -> None:
    backend = Saves()
    async with node_of(tmp_path, backend) as node:
        sandbox = await created(node)
        saving = Snapshotting(node.origins).begin(sandbox, SnapshotRequest(name="warm"), key=None)
        await backend.begun.wait()
        (tmp_path / "state" / "saving" / "of-a-killed-edge").mkdir()
    assert saving.error is not None
    async with node_of(tmp_path, backend) as node:
        nothing_half_done(tmp_path)
        assert node.origins.summaries("default") == []
        backend.go.set()
        await saved(node, node.get(sandbox.sandbox_id, project=None))


async def test_a_time_limit_waits_and_a_delete_does_not(tmp_path: Path) -> None:
    backend = Saves()
    async with node_of(tmp_path, backend) as node:
        sandbox = await created(node, dummy_spec(lifetime=Lifetime(ttl_running_stop=None, ttl_max_stop=1.0)))
        saving = Snapshotting(node.origins).begin(sandbox, SnapshotRequest(name="warm"), key=None)
        await backend.begun.wait()
        await asyncio.sleep(1.1)
        assert sandbox.state is SandboxState.RUNNING
        backend.go.set()
        await saving.wait()
        await sandbox.wait_ended()


async def test_without_a_store_only_forks_can_be_made(tmp_path: Path) -> None:
    async with edge(tmp_path) as node:
        with pytest.raises(UnsupportedError, match="no image store"):
            Snapshotting(node.origins).begin(await created(node), SnapshotRequest(name="x"), key=None)
        with pytest.raises(UnsupportedError, match="no image store"):
            await from_snapshot(node)


@contextlib.asynccontextmanager
async def client_of(node: Node) -> AsyncIterator[httpx.AsyncClient]:
    app = edge_app(node, version="test", verify=None)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://edge") as client:
        yield client


def lines_of(answer: httpx.Response) -> list[dict[str, Any]]:
    return [msgspec.json.decode(line) for line in answer.content.splitlines()]


async def test_a_fork_goes_on_from_the_present_state_and_leaves_nothing(tmp_path: Path) -> None:
    async with edge(tmp_path) as node, client_of(node) as client:
        source = await created(node, dummy_spec(lifetime=FOREVER, labels={"a": "b"}))
        await run(source, "echo now > /f")
        path = f"/v1/sandboxes/{source.sandbox_id}/fork"
        asked = {"json": {"count": 3}, "headers": {"Idempotency-Key": "k"}}
        answer = await client.post(path, **asked)  # type: ignore[arg-type]
        items = lines_of(answer)
        assert items[-1]["done"]
        forks = {one["index"]: one["status"]["sandbox_id"] for one in items if one["index"] >= 0}
        assert set(forks) == {0, 1, 2}
        assert len({*forks.values(), source.sandbox_id}) == 4
        again = lines_of(await client.post(path, **asked))  # type: ignore[arg-type]
        assert {one["index"]: one["status"]["sandbox_id"] for one in again if one["index"] >= 0} == forks
        assert len(list((tmp_path / "state" / "forks" / "default").iterdir())) == 1
        for sandbox_id in forks.values():
            fork = node.get(sandbox_id, project=None)
            assert (fork.spec.image, dict(fork.spec.labels), fork.spec.snapshot) == ("debian", {"a": "b"}, None)
            command = await ended(await fork.submit(ExecRequest(script="cat /f")))
            assert await output(fork, command) == b"now\n"
        for sandbox_id in forks.values():
            assert list((tmp_path / "state" / "forks" / "default").iterdir()) != []
            await node.get(sandbox_id, project=None).delete()
        assert list((tmp_path / "state" / "forks" / "default").iterdir()) == []
        assert source.state is SandboxState.RUNNING


async def test_a_fork_of_a_fork_and_of_a_snapshot(tmp_path: Path) -> None:
    async with node_of(tmp_path, DummyBackend()) as node, client_of(node) as client:
        await saved(node, await created(node))
        sandbox = await from_snapshot(node)
        for turn in range(2):
            await run(sandbox, f"echo {turn} >> /f")
            items = lines_of(await client.post(f"/v1/sandboxes/{sandbox.sandbox_id}/fork", json={"count": 1}))
            sandbox = node.get(items[0]["status"]["sandbox_id"], project=None)
        command = await ended(await sandbox.submit(ExecRequest(script="cat /f")))
        assert await output(sandbox, command) == b"0\n1\n"


async def test_bases_nobody_needs_go_with_the_next_edge(tmp_path: Path) -> None:
    backend = DummyBackend()
    async with edge(tmp_path, backend) as node, client_of(node) as client:
        source = await created(node)
        path = f"/v1/sandboxes/{source.sandbox_id}/fork"
        kept = lines_of(await client.post(path, json={"count": 1}))[0]["status"]["sandbox_id"]
        lost = await Snapshotting(node.origins).base_of(source)  # its edge dies before anybody starts from it
    async with edge(tmp_path, backend) as node:
        assert [path.name for path in (tmp_path / "state" / "forks" / "default").iterdir()] != [lost.name]
        assert len(list((tmp_path / "state" / "forks" / "default").iterdir())) == 1
        assert (await run(node.get(kept, project=None), "echo on")).exit_code == 0
        await node.get(kept, project=None).delete()
        assert list((tmp_path / "state" / "forks" / "default").iterdir()) == []


@pytest.mark.parametrize("body", [{"count": 0}, {"count": 1001}, {"count": 1, "labels": {" ": ""}}, {}])
async def test_a_bad_fork_is_refused_by_name(tmp_path: Path, body: dict[str, Any]) -> None:
    async with edge(tmp_path) as node, client_of(node) as client:
        source = await created(node)
        answer = await client.post(f"/v1/sandboxes/{source.sandbox_id}/fork", json=body)
        assert answer.status_code == 422
        assert answer.json()["error"]["detail"]["field"] in ("count", "labels")


async def test_a_fork_of_what_has_ended_says_so(tmp_path: Path) -> None:
    async with edge(tmp_path) as node, client_of(node) as client:
        source = await created(node)
        await source.delete()
        answer = await client.post(f"/v1/sandboxes/{source.sandbox_id}/fork", json={"count": 1})
        assert (answer.status_code, answer.json()["error"]["code"]) == (410, SandboxExitedError.code)


async def test_snapshots_over_http(tmp_path: Path) -> None:
    async with node_of(tmp_path, DummyBackend()) as node, client_of(node) as client:
        source = await created(node)
        project = {"X-OpenDSec-Project": "default"}
        path = f"/v1/sandboxes/{source.sandbox_id}/snapshot"
        refused = await client.post(path, json={"name": "warm"}, headers=project)
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "forbidden")
        rights = {**project, "X-OpenDSec-Rights": "build"}
        made = lines_of(await client.post(path, json={"name": "warm"}, headers=rights))
        assert made[-1]["result"]["snapshot"]["name"] == "warm"
        taken = await client.post(path, json={"name": "warm"}, headers=rights)
        assert (taken.status_code, taken.json()["error"]["detail"]["field"]) == (409, "name")
        listed = (await client.get("/v1/snapshots", headers=project)).json()["items"]
        assert [(one["name"], one["source"], one["users"]) for one in listed] == [("warm", source.sandbox_id, 0)]
        assert (await client.get("/v1/snapshots", headers={"X-OpenDSec-Project": "other"})).json()["items"] == []
        assert (await client.delete("/v1/snapshots?name=warm", headers=project)).status_code == 403
        started = await client.post("/v1/sandboxes", json={"spec": {"snapshot": "warm", "backend": "dummy"}})
        assert started.status_code == 201
        used = await client.delete("/v1/snapshots?name=warm", headers=rights)
        assert (used.status_code, used.json()["error"]["code"]) == (409, "conflict")
        gone = await client.delete("/v1/snapshots?name=warm&force=true", headers=rights)
        assert (gone.status_code, gone.json()["name"]) == (200, "warm")
        assert (await client.delete("/v1/snapshots?name=warm", headers=rights)).status_code == 404


async def test_a_base_nobody_waits_for_goes_when_it_is_saved(tmp_path: Path) -> None:
    backend = Saves()
    async with edge(tmp_path, backend) as node:
        source = await created(node)
        routes = SnapshotRoutes(node)
        ids = [new_sandbox_id("local")]
        telling = routes._forked(source, source.spec, ids, "r")
        asked = asyncio.ensure_future(anext(telling))
        await backend.begun.wait()
        asked.cancel()
        await asyncio.wait({asked})
        await telling.aclose()
        backend.go.set()
        forks, saving = tmp_path / "state" / "forks" / "default", tmp_path / "state" / "saving"
        await until(lambda: forks.is_dir() and not list(forks.iterdir()) and not list(saving.iterdir()))
        assert [one.sandbox_id for one in node.all(project=None)] == [source.sandbox_id]


async def test_a_fork_left_while_its_base_is_being_held_keeps_no_base(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that holds it goes on when its waiter is cancelled."""
    held, go = threading.Event(), threading.Event()
    async with node_of(tmp_path, DummyBackend()) as node:
        source = await created(node, dummy_spec(lifetime=FOREVER))
        routes = SnapshotRoutes(node)
        hold = routes._hold

        def slow(*args: Any) -> None:
            held.set()
            go.wait(60)
            hold(*args)

        monkeypatch.setattr(routes, "_hold", slow)
        telling = routes._forked(source, source.spec, [new_sandbox_id("local")], "r")
        asked = asyncio.ensure_future(anext(telling))
        await asyncio.to_thread(held.wait, 10)
        asked.cancel()
        await asyncio.sleep(0.01)
        go.set()
        with pytest.raises(asyncio.CancelledError):
            await asked
        forks = tmp_path / "state" / "forks" / "default"
        await until(lambda: not list(forks.iterdir()))


async def test_an_abandoned_fork_ends_what_it_started_and_starts_no_more(tmp_path: Path) -> None:
    async with node_of(tmp_path, DummyBackend()) as node:
        source = await created(node, dummy_spec(lifetime=FOREVER))
        routes = SnapshotRoutes(node)
        ids = [new_sandbox_id("local") for _ in range(3)]
        telling = routes._forked(source, source.spec, ids, "r")
        async for item in telling:
            if item.status is not None:
                break
        assert (await anext(routes._abandon(source.project, ids))).done
        await telling.aclose()
        again = [item async for item in routes._forked(source, source.spec, ids, "r")]
        assert [(item.error or {})["code"] for item in again if not (item.phase or item.done)] == ["conflict"] * 3
        assert [one.sandbox_id for one in node.all(project=None) if one.live] == [source.sandbox_id]
        assert not list((tmp_path / "state" / "forks" / "default").iterdir())
