"""Images over HTTP and the SDK, of an edge with a real store: what is told is what sandboxes see, and nothing waits."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import httpx
import pytest
from tests.cluster.edge.processes import EdgeProcess
from tests.cluster.edge.test_composition import LIFE, said, store_of, toolkit, workspace
from tests.images import make_busybox_image

import opendsec
from opendsec.errors import ConflictError, ImageNotFoundError, InvalidSpecError, NotFoundError
from opendsec.model.file import FileKind
from opendsec.model.image_view import Change
from opendsec.store.compose import pinned

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


@pytest.fixture
async def client(shared_containers: EdgeProcess) -> AsyncIterator[opendsec.DSecClient]:
    async with opendsec.DSecClient(f"unix:{shared_containers.socket}", "", timeout=30) as opened:
        yield opened


async def test_a_tree_is_what_a_sandbox_sees(shared_containers: EdgeProcess, client: opendsec.DSecClient) -> None:
    edge, store = shared_containers, store_of(shared_containers)
    make_busybox_image(store, "base", files={"/srv/a/gone": b"1", "/srv/a/kept": b"22", "/srv/b/c": b"3"})
    workspace(store, "work", {"/srv/a/new": "4444"}, removed=["/srv/a/gone"])
    toolkit(store, "kit", {"/srv/b/only": "5"}, opaque=["/srv/b"])
    await client.images.compose("task", "base", workspace="work", toolkits=["kit"], replace=True)
    sandbox_id = await edge.create(**LIFE, image="task")
    inside = await said(edge, sandbox_id, "find /srv /bin /etc/passwd | sort | xargs stat -c '%n %a %u %g %s %F'")
    told = [
        (entry.path, f"{entry.mode:o}", str(entry.uid), str(entry.gid), entry.kind, entry.size_bytes)
        for path in ("/srv", "/bin", "/etc/passwd")
        async for entry in client.images.tree("task", path)
    ]
    found = {}
    for line in inside:
        name, mode, uid, gid, size, kind = line.split(" ", 5)
        is_file = kind.startswith("regular")
        found[name] = (mode, uid, gid, FileKind.FILE if is_file else FileKind.DIRECTORY, int(size) if is_file else 0)
    assert {path: tuple(rest) for path, *rest in told} == found
    assert {"/srv/a/kept", "/srv/a/new", "/srv/b/only"} <= found.keys()
    assert not {"/srv/a/gone", "/srv/b/c"} & found.keys()


async def test_a_difference_is_what_was_laid_over(shared_containers: EdgeProcess, client: opendsec.DSecClient) -> None:
    store = store_of(shared_containers)
    make_busybox_image(store, "base", files={"/srv/gone": b"1", "/srv/same": b"2", "/srv/other": b"3"})
    workspace(store, "work", {"/srv/new": "4", "/srv/other": "5"}, removed=["/srv/gone"])
    await client.images.compose("task", "base", workspace="work", replace=True)
    found = {one.path: one async for one in client.images.diff("base", "task", times=False)}
    assert {path: one.change for path, one in found.items() if path != "/srv"} == {
        "/srv/gone": Change.REMOVED,
        "/srv/new": Change.ADDED,
        "/srv/other": Change.CHANGED,
    }
    assert found["/srv/other"].what == ("content",)
    assert found["/srv/gone"].before is not None
    assert [one async for one in client.images.diff("task", "task")] == []
    # a toolkit alone can be looked at too
    toolkit(store, "kit", {"/opt/x": "x"})
    assert [entry.path async for entry in client.images.tree("kit")] == ["/", "/opt", "/opt/x"]


async def test_names_that_are_no_text_come_back_as_they_are(
    shared_containers: EdgeProcess, client: opendsec.DSecClient
) -> None:
    toolkit(store_of(shared_containers), "odd", {"/opt/\udcff\n": "x", "/opt/ü": "y"})
    paths = [entry.path async for entry in client.images.tree("odd", "/opt")]
    assert paths == ["/opt", "/opt/ü", "/opt/\udcff\n"]
    assert [entry.size_bytes async for entry in client.images.tree("odd", "/opt/\udcff\n")] == [1]


async def test_the_life_of_names(shared_containers: EdgeProcess, client: opendsec.DSecClient) -> None:
    store = store_of(shared_containers)
    base = make_busybox_image(store, "lib/base:1")
    kit = toolkit(store, "kit", {"/opt/x": "x"})
    tagged = await client.images.tag("stable/base:latest", "lib/base:1")
    assert (tagged.digest, tagged.size_bytes) == (base.digest, base.layers[0].size_bytes)
    made = await client.images.compose("task/1", "stable/base:latest", toolkits=["kit"])
    assert (made.base, made.toolkits, made.layer_count) == ("stable/base:latest", ("kit",), 0)
    details = await client.images.inspect("task/1")
    assert [part.pinned for part in details.parts] == [
        f"stable/base:latest@{base.digest}",
        f"task/1@{made.digest}",
        pinned(kit),
    ]
    assert details.start_size_bytes == base.layers[0].size_bytes + kit.layers[0].size_bytes
    assert (await client.images.inspect(pinned(kit))).used_by == ("task/1",)
    names = [summary.name async for summary in client.images.list(page_size=2)]
    assert names == sorted(names)
    assert {"lib/base:1", "stable/base:latest", "task/1", "kit"} <= set(names)
    assert [summary.name async for summary in client.images.list(prefix="task/")] == ["task/1"]
    with pytest.raises(ConflictError):
        await client.images.tag("kit", "lib/base:1")
    with pytest.raises(ConflictError):
        await client.images.remove("kit")
    assert (await client.images.remove("kit", force=True)).digest == kit.digest
    problem = (await client.images.inspect("task/1")).problem
    assert "image 'task/1' needs 'kit'" in problem
    for name in ("task/1", "stable/base:latest", "lib/base:1"):
        await client.images.remove(name)
    with pytest.raises(ImageNotFoundError):
        await client.images.remove("lib/base:1")


async def test_what_cannot_be_is_refused_by_field(shared_containers: EdgeProcess, client: opendsec.DSecClient) -> None:
    make_busybox_image(store_of(shared_containers), "base")
    for path in ("relative", "/a/../b"):
        with pytest.raises(InvalidSpecError) as caught:
            [entry async for entry in client.images.tree("base", path)]
        assert caught.value.detail["field"] == "path"
    with pytest.raises(NotFoundError):
        [entry async for entry in client.images.tree("base", "/nowhere")]
    with pytest.raises(ImageNotFoundError):
        [one async for one in client.images.diff("base", "nope")]
    edge = shared_containers.client
    for target, field in (
        ("images?limit=0", "limit"),
        ("images?limit=5000", "limit"),
        ("images?other=1", "other"),
        ("images/inspect", "image"),
        ("images/inspect?image=../x", "image"),
        ("images/tree?image=base&depth=-1", "depth"),
        ("images/diff?before=base", "after"),
        ("images/diff?before=base&after=base&times=maybe", "times"),
    ):
        answer = await edge.get(f"/v1/{target}")
        assert (answer.status_code, answer.json()["error"]["detail"]["field"]) == (422, field)
    refused = await edge.post("/v1/images/tag", json={"name": "x", "image": "base", "extra": 1})
    assert (refused.status_code, refused.json()["error"]["detail"]["field"]) == (422, "extra")


async def test_a_key_that_may_only_run_changes_nothing(shared_containers: EdgeProcess) -> None:
    make_busybox_image(store_of(shared_containers), "base")
    headers = {"X-OpenDSec-Project": "p"}
    edge = shared_containers.client
    answers: list[httpx.Response] = [
        await edge.delete("/v1/images?image=base", headers=headers),
        await edge.post("/v1/images/tag", json={"name": "x", "image": "base"}, headers=headers),
        await edge.post("/v1/images/compose", json={"name": "x", "base": "base"}, headers=headers),
    ]
    assert [answer.status_code for answer in answers] == [403] * 3
    assert (await edge.get("/v1/images", headers=headers)).status_code == 200


async def test_creates_and_other_calls_do_not_wait_for_long_listings(
    shared_containers: EdgeProcess, client: opendsec.DSecClient
) -> None:
    edge, store = shared_containers, store_of(shared_containers)
    make_busybox_image(store, "base")
    toolkit(store, "wide", {f"/opt/{number % 50}/{number}": "" for number in range(1_500)})
    await client.images.compose("wide-base", "base", toolkits=["wide"], replace=True)

    async def list_it() -> int:
        return len([entry async for entry in client.images.tree("wide-base")])

    listings = [asyncio.create_task(list_it()) for _ in range(6)]
    calls = 0
    while not all(listing.done() for listing in listings):
        await edge.client.get("/v1/node")
        calls += 1
        if calls == 5:
            await edge.delete(await edge.create(**LIFE, image="base"))
        await asyncio.sleep(0.01)
    counts = [listing.result() for listing in listings]
    assert len(set(counts)) == 1
    assert counts[0] > 1_550
    assert calls > 5


async def test_the_command_line_asks_the_platform_that_is_named(shared_containers: EdgeProcess, tmp_path: Path) -> None:
    store = store_of(shared_containers)
    make_busybox_image(store, "base", files={"/srv/x": b"1"})
    toolkit(store, "kit", {"/srv/y": "2"})

    def opendsec_image(*words: str, status: int = 0) -> tuple[str, str]:
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("OPENDSEC_")},
            "PYTHONPATH": str(Path(__file__).parents[3] / "src"),
            "OPENDSEC_API_URL": f"unix:{shared_containers.socket}",
            "OPENDSEC_API_KEY": "",
            "OPENDSEC_STATE_DIR": str(tmp_path / "not-here"),
        }
        command = [sys.executable, "-m", "opendsec.main", "image", *words]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == status, done.stderr
        return done.stdout, done.stderr

    async def run(*words: str, status: int = 0) -> tuple[str, str]:
        return await asyncio.to_thread(opendsec_image, *words, status=status)

    made, _ = await run("compose", "task", "base", "--toolkit", "kit", "--replace")
    assert made.startswith("image task: sha256:")
    lines = (await run("tree", "task", "/srv", "--json"))[0].splitlines()
    assert [json.loads(line)["path"] for line in lines] == ["/srv", "/srv/x", "/srv/y"]
    _, err = await run("rm", "kit", status=1)
    assert "task" in err
    assert not (tmp_path / "not-here").exists()


async def test_who_leaves_a_listing_leaves_nothing_open(
    shared_containers: EdgeProcess, client: opendsec.DSecClient
) -> None:
    edge, store = shared_containers, store_of(shared_containers)
    make_busybox_image(store, "base")
    toolkit(store, "wide", {f"/opt/{number}": "" for number in range(1_500)})
    await client.images.compose("wide-base", "base", toolkits=["wide"], replace=True)
    [entry async for entry in client.images.tree("wide-base", "/opt", depth=0)]  # mounts the layers
    before = _descriptors(edge.pid)
    for _ in range(10):
        async with aclosing(client.images.tree("wide-base")) as entries:
            await anext(entries)
    async with asyncio.timeout(60):
        while _descriptors(edge.pid) > before + 1:
            await asyncio.sleep(0.05)


def _descriptors(pid: int) -> int:
    """Directories of layers that are open, not connections."""
    count = 0
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed just now
            link = os.readlink(path)
            count += "/opt" in link or link == "/"
    return count
