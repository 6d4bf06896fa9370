"""Base, workspace and toolkits as sandboxes really see them, through an edge process and real containers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from tests.cluster.edge.processes import EdgeProcess
from tests.images import make_busybox_image, make_part

from opendsec.model.image import Image, LayerRole
from opendsec.store.compose import pinned
from opendsec.store.images import ImageStore
from opendsec.store.tagging import Composition, compose_image

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
LIFE = {"init_user": "root", "lifetime": {"ttl_running_stop": None}}


def store_of(edge: EdgeProcess) -> ImageStore:
    return ImageStore(edge.log.parent / "store")


def toolkit(store: ImageStore, name: str, files: dict[str, str], **given: Any) -> Image:
    return make_part(store, name, files, role=LayerRole.TOOLKIT, **given)


def workspace(store: ImageStore, name: str, files: dict[str, str], **given: Any) -> Image:
    return make_part(store, name, files, role=LayerRole.WORKSPACE, **given)


async def seen(edge: EdgeProcess, script: str, **spec: Any) -> list[str]:
    """What a sandbox of that composition says."""
    sandbox_id = await edge.create(**LIFE, **spec)
    lines = await said(edge, sandbox_id, script)
    await edge.delete(sandbox_id)
    return lines


async def said(edge: EdgeProcess, sandbox_id: str, script: str) -> list[str]:
    done = await edge.run(sandbox_id, script)
    assert done.result is not None
    assert done.result["exit_code"] == 0, done.stderr
    return done.stdout.decode().splitlines()


async def status(edge: EdgeProcess, sandbox_id: str) -> dict[str, Any]:
    return dict((await edge.client.get(f"/v1/sandboxes/{sandbox_id}")).json())


def error_of(answer: httpx.Response) -> tuple[int, str, object]:
    error = answer.json()["error"]
    return answer.status_code, error["code"], error["detail"].get("field")


async def test_higher_layers_win_in_their_order(shared_containers: EdgeProcess) -> None:
    edge, store = shared_containers, store_of(shared_containers)
    make_busybox_image(store, "base", files={"/opt/who": b"base", "/opt/base": b"base"})
    workspace(store, "work", {"/opt/who": "work", "/opt/work": "work"}, env={"WHO": "work", "WORK": "1"})
    toolkit(store, "one", {"/opt/who": "one", "/opt/one": "one"}, env={"WHO": "one"})
    toolkit(store, "two", {"/opt/who": "two", "/opt/two": "two"}, env={"WHO": "two"})
    script = 'cat /opt/who; echo; echo "$WHO $WORK"; ls /opt | tr "\\n" " "'
    ask = {"image": "base", "workspace": "work"}
    assert await seen(edge, script, image="base") == ["base", " ", "base who "]
    assert await seen(edge, script, **ask) == ["work", "work 1", "base who work "]
    for order in (["one", "two"], ["two", "one"]):
        assert await seen(edge, script, **ask, toolkits=order) == [
            order[-1],
            f"{order[-1]} 1",
            "base one two who work ",
        ]


async def test_a_workspace_hides_what_it_removed_and_leaves_no_ghosts(shared_containers: EdgeProcess) -> None:
    edge, store = shared_containers, store_of(shared_containers)
    files = {"/srv/gone": b"x", "/srv/kept": b"x", "/lib2/old": b"x", "/var/data/a": b"x", "/var/data/b": b"x"}
    make_busybox_image(store, "base", files=files)
    make_busybox_image(store, "other-base")
    workspace(
        store,
        "work",
        {"/srv/new": "n", "/var/data/c": "c"},
        removed=["/srv/gone", "/lib2"],
        opaque=["/var/data"],
    )
    script = "ls /srv | tr '\\n' ' '; echo; ls -d /lib2 2>&1 || true; ls /var/data | tr '\\n' ' '"
    gone = "ls: /lib2: No such file or directory"
    assert await seen(edge, script, image="base", workspace="work") == ["kept new ", gone, "c "]
    # over a base that never had any of it, nothing is left of what was removed
    assert await seen(edge, script, image="other-base", workspace="work") == ["new ", gone, "c "]
    script = "cd /; find srv var/data -exec ls -d {} + | sort | tr '\\n' ' '; rm -r /srv && echo removed"
    assert await seen(edge, script, image="other-base", workspace="work") == ["srv srv/new var/data var/data/c removed"]


async def test_what_a_sandbox_removed_stays_removed_over_any_base(shared_containers: EdgeProcess) -> None:
    edge, store = shared_containers, store_of(shared_containers)
    files = {"/srv/gone": b"x", "/srv/kept": b"x", "/old/a/b": b"x", "/var/data/a": b"x"}
    make_busybox_image(store, "base", files=files)
    make_busybox_image(store, "other-base")
    first = await edge.create(**LIFE, image="base")
    await said(
        edge, first, "rm /srv/gone; rm -r /old /var/data; mkdir /var/data; echo n > /var/data/n; echo w > /srv/w"
    )
    packed = await edge.client.post(
        f"/v1/sandboxes/{first}/pack", json={"name": "packed", "alone": True, "replace": True}, timeout=60
    )
    assert '"error":{' not in packed.text, packed.text
    script = (
        "ls -d /old 2>/dev/null; find /srv /var/data | sort | tr '\n' ' '; ls -R /srv /var/data >/dev/null && echo ok"
    )
    assert await seen(edge, script, image="base", workspace="packed") == [
        "/srv /srv/kept /srv/w /var/data /var/data/n ok"
    ]
    assert await seen(edge, script, image="other-base", workspace="packed") == ["/srv /srv/w /var/data /var/data/n ok"]


async def test_toolkits_of_the_image_unless_the_create_names_others(shared_containers: EdgeProcess) -> None:
    edge, store = shared_containers, store_of(shared_containers)
    make_busybox_image(store, "base")
    workspace(store, "work", {"/srv/task": "task"})
    toolkit(store, "rg", {"/opt/rg": "rg"})
    toolkit(store, "fd", {"/opt/fd": "fd"})
    compose_image(store, "task", Composition(base="base", workspace="work", toolkits=("rg",)), replace=True)
    script = "ls /srv /opt 2>/dev/null | tr '\\n' ' '; true"
    assert await seen(edge, script, image="task") == ["/opt: rg  /srv: task "]
    assert await seen(edge, script, image="task", toolkits=["fd"]) == ["/opt: fd  /srv: task "]
    assert await seen(edge, script, image="task", toolkits=[]) == ["/srv: task "]


async def test_names_move_on_while_sandboxes_keep_what_they_were_started_from(shared_containers: EdgeProcess) -> None:
    edge, store = shared_containers, store_of(shared_containers)
    base = make_busybox_image(store, "base")
    old = toolkit(store, "rg", {"/opt/version": "1"})
    first = await edge.create(**LIFE, image="base", toolkits=["rg"])
    new = toolkit(store, "rg", {"/opt/version": "2"})
    script = "cat /opt/version"
    assert await seen(edge, script, image="base", toolkits=["rg"]) == ["2"]
    assert await seen(edge, script, image="base", toolkits=[pinned(old)]) == ["1"]
    assert await said(edge, first, script) == ["1"]
    told = await status(edge, first)
    assert told["image_parts"] == [
        {"kind": "image", "name": "base", "digest": base.digest, "layers": [base.layers[0].digest]},
        {"kind": "toolkit", "name": "rg", "digest": old.digest, "layers": [old.layers[0].digest]},
    ]
    assert old.digest != new.digest
    # what the status tells starts the very same again
    pins = [f"{part['name']}@{part['digest']}" for part in told["image_parts"]]
    again = await edge.create(**LIFE, image=pins[0], toolkits=pins[1:])
    assert (await status(edge, again))["image_digest"] == told["image_digest"]
    assert await said(edge, again, script) == ["1"]


async def test_what_a_sandbox_was_made_of_outlives_the_edge(containers: EdgeProcess) -> None:
    edge, store = containers, store_of(containers)
    toolkit(store, "rg", {"/opt/version": "1"})
    sandbox_id = await edge.create(**LIFE, image="busybox", toolkits=["rg"])
    before = await status(edge, sandbox_id)
    edge.kill()
    toolkit(store, "rg", {"/opt/version": "2"})
    await edge.start()
    after = await status(edge, sandbox_id)
    assert (after["image_digest"], after["image_parts"]) == (before["image_digest"], before["image_parts"])
    assert await said(edge, sandbox_id, "cat /opt/version") == ["1"]


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ({"image": "nope"}, (404, "image_not_found", "image")),
        ({"image": "base", "workspace": "nope"}, (404, "image_not_found", "workspace")),
        ({"image": "base", "toolkits": ["rg", "nope"]}, (404, "image_not_found", "toolkits")),
        ({"image": "base", "toolkits": [f"rg@sha256:{'0' * 64}"]}, (404, "image_not_found", "toolkits")),
        ({"image": "rg"}, (422, "invalid_spec", "image")),
        ({"image": "base", "workspace": "rg"}, (422, "invalid_spec", "workspace")),
        ({"image": "base", "toolkits": ["work"]}, (422, "invalid_spec", "toolkits")),
        ({"image": "base", "toolkits": ["../x"]}, (422, "invalid_spec", "toolkits")),
        ({"image": "base", "workspace": ""}, (422, "invalid_spec", "workspace")),
        ({"image": "base", "toolkits": ["rg"] * 33}, (422, "invalid_spec", "toolkits")),
    ],
)
async def test_what_does_not_fit_is_refused_by_field_before_anything_is_made(
    shared_containers: EdgeProcess, spec: dict[str, Any], expected: tuple[int, str, str]
) -> None:
    edge, store = shared_containers, store_of(shared_containers)
    make_busybox_image(store, "base")
    toolkit(store, "rg", {"/opt/rg": "rg"})
    workspace(store, "work", {"/srv/task": "task"})
    sandboxes = Path(edge.log.parent, "edge/local/sandboxes")
    before = sorted(sandboxes.iterdir())
    assert error_of(await edge.client.post("/v1/sandboxes", json={"spec": spec})) == expected
    assert sorted(sandboxes.iterdir()) == before


async def test_a_name_that_is_gone_is_missed_and_running_sandboxes_do_not_mind(shared_containers: EdgeProcess) -> None:
    edge, store = shared_containers, store_of(shared_containers)
    make_busybox_image(store, "base")
    toolkit(store, "rg", {"/opt/version": "1"})
    compose_image(store, "task", Composition(base="base", toolkits=("rg",)), replace=True)
    running = await edge.create(**LIFE, image="task")
    store.remove("rg", force=True)
    answer = await edge.client.post("/v1/sandboxes", json={"spec": {**LIFE, "image": "task"}})
    assert error_of(answer) == (404, "image_not_found", "toolkits")
    assert "image 'task' needs 'rg'" in answer.json()["error"]["message"]
    assert await said(edge, running, "cat /opt/version") == ["1"]


async def test_toolkits_that_come_twice_and_as_many_as_may_be(shared_containers: EdgeProcess) -> None:
    edge, store = shared_containers, store_of(shared_containers)
    make_busybox_image(store, "base")
    names = [f"kit{number:02}" for number in range(32)]
    for number, name in enumerate(names):
        toolkit(store, name, {f"/opt/{name}": name, "/opt/last": str(number)})
    script = "ls /opt | wc -l; cat /opt/last"
    assert await seen(edge, script, image="base", toolkits=names) == ["33", "31"]
    assert await seen(edge, script, image="base", toolkits=["kit01", "kit02", "kit01"]) == ["3", "1"]


async def test_a_batch_is_composed_alike(shared_containers: EdgeProcess) -> None:
    edge, store = shared_containers, store_of(shared_containers)
    make_busybox_image(store, "base")
    workspace(store, "work", {"/srv/task": "task"})
    toolkit(store, "rg", {"/opt/version": "1"})
    spec = {**LIFE, "image": "base", "workspace": "work", "toolkits": ["rg"]}
    answer = await edge.client.post("/v1/sandbox-batches", json={"spec": spec, "count": 8})
    lines = [msgspec.json.decode(line) for line in answer.text.splitlines()]
    statuses = [line["status"] for line in lines if not line["done"]]
    assert len({one["image_digest"] for one in statuses}) == 1
    for one in statuses:
        assert [part["kind"] for part in one["image_parts"]] == ["image", "workspace", "toolkit"]
        assert await said(edge, one["sandbox_id"], "cat /srv/task /opt/version") == ["task1"]
    refused = await edge.client.post("/v1/sandbox-batches", json={"spec": {**spec, "toolkits": ["nope"]}, "count": 3})
    failed = [msgspec.json.decode(line) for line in refused.text.splitlines()]
    assert [line["error"]["code"] for line in failed if not line["done"]] == ["image_not_found"] * 3
