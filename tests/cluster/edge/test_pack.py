"""Packing what a sandbox has written: the new image shows the same tree, and nothing of what was left out."""

from __future__ import annotations

import asyncio
import os
import stat
import struct
from pathlib import Path

import pytest
from tests.cluster.edge.packs import PackFailedError, groups_of, is_frozen, ok, pack, staged, store_of, view_of
from tests.cluster.edge.processes import EdgeProcess
from tests.images import make_busybox_image
from tests.tree_facts import difference

from opendsec.model.image import Image, ImageConfig, LayerRole
from opendsec.store.images import ImageStore
from opendsec.store.layers import make_layer
from opendsec.store.merge import MOST

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
SPEC = {"init_user": "root", "lifetime": {"ttl_running_stop": None}}
NET_BIND = struct.pack("<IIIII", 0x02000001, 1 << 10, 1 << 10, 0, 0)
"""security.capability, linux/capability.h: cap_net_bind_service=ep."""


@pytest.fixture(scope="module")
def rich(containers_process: EdgeProcess) -> Image:
    """An image with everything that can be changed: two layers, so that a whiteout is below the sandbox, too."""
    store = ImageStore(store_of(containers_process))
    base = make_busybox_image(store, "plain")
    with store.staging() as work:
        tree = work / "tree"
        (tree / "data/deep/er").mkdir(parents=True)
        for name in ("one", "two", "three", "four", "linked"):
            (tree / "data" / name).write_text(f"{name}\n" * 100, encoding="ascii")
        (tree / "data/deep/file").write_bytes(b"deep")
        (tree / "data/deep/er/file").write_bytes(b"deeper")
        os.link(tree / "data/linked", tree / "data/deep/linked")
        (tree / "data/program").write_bytes(b"#!/bin/sh\n")
        (tree / "data/program").chmod(0o4755)
        for name in ("one", "three"):
            os.setxattr(tree / "data" / name, "security.capability", NET_BIND)
            os.setxattr(tree / "data" / name, "user.note", b"of the image")
        os.mknod(tree / "data/null", stat.S_IFCHR | 0o644, os.makedev(1, 3))
        os.mkfifo(tree / "data/fifo")
        (tree / "data/link").symlink_to("/data/one")
        (tree / "root").mkdir()
        (tree / "root/.netrc").write_bytes(b"of the image")
        (tree / "root/.cache/old").mkdir(parents=True)
        (tree / "root/.cache/old/entry").write_bytes(b"of the image")
        (tree / "bin").mkdir()
        os.mknod(tree / "bin/vi", stat.S_IFCHR, os.makedev(0, 0))
        layer = make_layer(store, work, tree, role=LayerRole.WORKSPACE)
        config = ImageConfig(env={**base.config.env, "KIND": "rich"}, workdir="/data")
        return store.publish("rich", layers=[*base.layers, layer], config=config, replace=True)


CHANGES = r"""
set -e
cd /data
echo more >> one
rm two
echo new > two.new && mv two.new two
mv three three-moved
rm -r deep && mkdir deep && echo only > deep/only
rm four && mkdir four && echo in > four/in
mv null null-moved
mv fifo fifo-moved
ln linked again
echo through >> again
ln -s ../nowhere dangling
chmod 2750 program
chown 1000:1000 link -h
mkfifo pipe
mkdir -p empty a/b/c/d
touch -d '2001-02-03 04:05:06' a/old
truncate -s 3000000 sparse && echo end >> sparse
head -c 1500000 /dev/urandom > random
touch "$(printf 'x%.0s' $(seq 254))" "$(printf 'no\377utf8')" 'with space' './-dash'
printf '#!/bin/sh\n' > set && chmod 6755 set
rm -rf /app
rmdir /var/tmp
mkdir -m 1777 /var/tmp
rm /etc/group
echo 'nobody:x:1:' > /etc/group
mkdir /new && chown 12:34 /new && chmod 700 /new
"""


async def test_a_new_sandbox_shows_exactly_the_same_tree(shared_containers: EdgeProcess, rich: Image) -> None:
    edge = shared_containers
    source = await edge.create(image="rich", **SPEC)
    await edge.create(image="busybox", **SPEC)  # so that the next one has other ids on the host
    await ok(edge, source, CHANGES)
    before = view_of(edge, source)
    made = await pack(edge, source, "changed", defaults=False, scrub=[])
    assert (made["changed"], made["left_out"], made["name"]) == (True, 0, "changed")
    again = await edge.create(image=made["image"], **SPEC)
    assert difference(before, view_of(edge, again)) == ""
    assert difference(before, view_of(edge, source)) == "", "the source is as it was"
    assert {name for name, _ in before["data/three-moved"][4]} == {"security.capability", "user.note"}  # type: ignore[attr-defined]
    assert await ok(edge, again, "echo $KIND; pwd") == "rich\n/data\n"

    await ok(edge, source, "echo later > /data/later")
    await ok(edge, again, "rm -r /data/a /new; echo third > /data/third; rm /data/deep/only")
    third_view = view_of(edge, again)
    third = await pack(edge, again, "changed-twice", defaults=False)
    last = await edge.create(image=third["image"], **SPEC)
    assert difference(third_view, view_of(edge, last)) == ""
    image = ImageStore(store_of(edge)).get("changed-twice")
    assert [layer.role.value for layer in image.layers] == ["base", "workspace", "workspace", "workspace"]
    assert image.layers[:2] == rich.layers
    assert dict(image.config.env)["KIND"] == "rich"


async def test_nothing_written_is_nothing_packed(shared_containers: EdgeProcess, rich: Image) -> None:
    edge = shared_containers
    source = await edge.create(image="rich", **SPEC)
    untouched = await pack(edge, source, "untouched")
    assert (untouched["changed"], untouched["image"]) == (False, f"rich@{rich.digest}")
    await ok(
        edge,
        source,
        "cd /root; echo 'secret' > .bash_history; echo x > /tmp/x; mkdir -p .cache/pip; touch /data/x; rm /data/x",
    )
    scrubbed = await pack(edge, source, "untouched")
    assert (scrubbed["changed"], scrubbed["image"], scrubbed["layer"]) == (False, f"rich@{rich.digest}", "")
    assert scrubbed["left_out_paths"] == ["/root/.bash_history", "/root/.cache", "/tmp/x"]
    assert scrubbed["fell_back_paths"] == ["/root/.cache"]
    assert "untouched" not in [image.name for image in ImageStore(store_of(edge)).list()]
    with pytest.raises(PackFailedError, match="no layer") as failed:
        await pack(edge, source, "untouched", alone=True)
    assert failed.value.code == "conflict"
    assert staged(edge) == []


async def test_a_composition_that_is_unchanged_gets_the_name(shared_containers: EdgeProcess, rich: Image) -> None:
    edge = shared_containers
    tool = await edge.create(image="busybox", **SPEC)
    await ok(edge, tool, "mkdir /opt && echo tool > /opt/tool")
    toolkit = await pack(edge, tool, "toolkit", role="toolkit", alone=True)
    source = await edge.create(image="busybox", toolkits=[toolkit["image"]], **SPEC)
    made = await pack(edge, source, "with-toolkit")
    assert (made["changed"], made["name"]) == (False, "with-toolkit")
    again = await edge.create(image=made["image"], **SPEC)
    assert await ok(edge, again, "cat /opt/tool") == "tool\n"


async def test_what_is_left_out_brings_nothing_deleted_back(shared_containers: EdgeProcess, rich: Image) -> None:
    edge = shared_containers
    source = await edge.create(image="rich", **SPEC)
    await ok(
        edge,
        source,
        "cd /root; echo mine > .netrc; rm -r .cache; mkdir .cache; echo mine > .cache/mine; rm /data/four;"
        " mkdir /data/__pycache__; touch /data/__pycache__/x.pyc /data/stays",
    )
    made = await pack(edge, source, "scrubbed")
    assert made["left_out_paths"] == ["/data/__pycache__", "/root/.cache/mine", "/root/.netrc"]
    assert (made["left_out"], made["fell_back"], made["fell_back_paths"]) == (4, 1, ["/root/.netrc"])
    again = await edge.create(image=made["image"], **SPEC)
    assert await ok(edge, again, "cat /root/.netrc; ls -A /root/.cache; ls /data") == "of the image" + await ok(
        edge, source, "ls /data | grep -v pycache"
    )
    kept = await pack(edge, source, "kept", keep=["~/.cache/mine", "__pycache__"], scrub=["/data/stays"])
    assert kept["left_out_paths"] == ["/data/stays", "/root/.netrc"]
    again = await edge.create(image=kept["image"], **SPEC)
    assert await ok(edge, again, "cat /root/.cache/mine; ls /data/__pycache__") == "mine\nx.pyc\n"


async def test_a_whiteout_in_what_is_left_out_stays(shared_containers: EdgeProcess, rich: Image) -> None:
    edge = shared_containers
    source = await edge.create(image="rich", **SPEC)
    await ok(edge, source, "rm /root/.cache/old/entry /root/.netrc; touch /root/.cache/old/mine")
    made = await pack(edge, source, "whited")
    assert (made["left_out_paths"], made["fell_back"]) == (["/root/.cache/old/mine"], 0)
    again = await edge.create(image=made["image"], **SPEC)
    assert await ok(edge, again, "find /root -mindepth 1 | sort") == "/root/.cache\n/root/.cache/old\n"


async def test_a_layer_alone_lies_over_any_base(shared_containers: EdgeProcess, rich: Image) -> None:
    edge = shared_containers
    source = await edge.create(image="rich", **SPEC)
    await ok(edge, source, "rm -r /data/deep; mkdir /data/deep; echo mine > /data/deep/mine; rm /data/one")
    made = await pack(edge, source, "work", alone=True)
    assert [layer.role.value for layer in ImageStore(store_of(edge)).get("work").layers] == ["workspace"]
    on_same = await edge.create(image="rich", workspace="work", **SPEC)
    assert difference(view_of(edge, source), view_of(edge, on_same)) == ""
    on_other = await edge.create(image="busybox", workspace=made["image"], **SPEC)
    assert await ok(edge, on_other, "ls -A /data; cat /data/deep/mine") == "deep\nmine\n"


async def test_a_paused_sandbox_stays_paused_and_a_running_one_goes_on(shared_containers: EdgeProcess) -> None:
    edge = shared_containers
    source = await edge.create(image="busybox", **SPEC)
    await edge.begin(source, "i=0; while true; do i=$((i+1)); echo $i > /new; mv /new /count; done", user="root")
    await ok(edge, source, "sleep 0.2")
    first = await pack(edge, source, "running")
    assert first["frozen_ms"] > 0
    counted = await ok(edge, source, "cat /count; sleep 0.1; cat /count")
    assert len(set(counted.split())) == 2, "it goes on counting"
    await edge.client.post(f"/v1/sandboxes/{source}/pause")
    paused = await pack(edge, source, "paused")
    assert paused["frozen_ms"] == 0
    assert is_frozen(edge, source)
    assert (await edge.client.get(f"/v1/sandboxes/{source}")).json()["state"] == "paused"
    in_pack = await edge.create(image=paused["image"], **SPEC)
    assert int(await ok(edge, in_pack, "cat /count")) >= int(counted.split()[1])
    assert int(await ok(edge, source, "cat /count")) > 0, "and it can be resumed"


async def test_a_sandbox_with_a_disk_of_its_own_is_packed(shared_containers: EdgeProcess) -> None:
    edge = shared_containers
    source = await edge.create(image="busybox", resources={"disk_limit_mb": 64}, **SPEC)
    await ok(edge, source, "head -c 20000000 /dev/urandom > /data; rm -r /app; sha256sum /data > /sum")
    before = view_of(edge, source)
    made = await pack(edge, source, "of-a-disk")
    again = await edge.create(image=made["image"], **SPEC)
    await ok(edge, again, "sha256sum -c /sum")
    view = view_of(edge, again)
    assert difference({k: v for k, v in before.items() if k != "lost+found"}, view) == ""


async def test_what_cannot_be_packed_is_named(shared_containers: EdgeProcess) -> None:
    edge = shared_containers
    source = await edge.create(image="busybox", **SPEC)
    long = "y" * 255
    await ok(edge, source, f"mkdir /data; touch /data/{long}")
    with pytest.raises(PackFailedError, match="254") as failed:
        await pack(edge, source, "bad")
    assert (failed.value.code, failed.value.fields["detail"]["entry"]) == ("image_invalid", f"/data/{long}")
    await ok(edge, source, f"rm /data/{long}; cd /data; mkdir -p {'/'.join(['d' * 200] * 20)}")
    with pytest.raises(PackFailedError, match="too long") as failed:
        await pack(edge, source, "bad")
    assert failed.value.code == "image_invalid"
    for fields, field in (
        ({"name": "../up"}, "name"),
        ({"name": f"x@sha256:{'0' * 64}"}, "name"),
        ({"name": "x", "scrub": ["a/b"]}, "scrub"),
        ({"name": "x", "keep": ["*"]}, "keep"),
        ({"name": "x", "role": "boss"}, "role"),
        ({"name": "x", "colour": 1}, "colour"),
    ):
        answer = await edge.client.post(f"/v1/sandboxes/{source}/pack", json=fields)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["detail"]["field"]) == (422, "invalid_spec", field), fields
    assert not is_frozen(edge, source)
    assert staged(edge) == []


async def test_a_name_that_is_taken_is_refused_unless_it_may_be_replaced(shared_containers: EdgeProcess) -> None:
    edge = shared_containers
    source = await edge.create(image="busybox", **SPEC)
    await ok(edge, source, "echo 1 > /data")
    first = await pack(edge, source, "taken")
    assert (await pack(edge, source, "taken"))["image"] == first["image"], "the same content is no conflict"
    await ok(edge, source, "echo 2 > /data")
    with pytest.raises(PackFailedError) as failed:
        await pack(edge, source, "taken")
    assert failed.value.code == "conflict"
    second = await pack(edge, source, "taken", replace=True)
    assert second["image"] != first["image"]
    for made, content in ((first, "1\n"), (second, "2\n")):
        sandbox_id = await edge.create(image=made["image"], **SPEC)
        assert await ok(edge, sandbox_id, "cat /data") == content


async def test_a_key_names_one_pack(shared_containers: EdgeProcess) -> None:
    edge = shared_containers
    source = await edge.create(image="busybox", **SPEC)
    await ok(edge, source, "echo 1 > /data")
    key = {"Idempotency-Key": f"pack-{source}"}
    first = await pack(edge, source, "keyed", headers=key)
    await ok(edge, source, "echo 2 > /data")
    assert await pack(edge, source, "keyed", headers=key) == first
    with pytest.raises(PackFailedError) as failed:
        await pack(edge, source, "other", headers=key)
    assert failed.value.code == "conflict"


async def test_only_who_may_build_packs(shared_containers: EdgeProcess) -> None:
    edge = shared_containers
    source = await edge.create(image="busybox", **SPEC)
    await ok(edge, source, "echo 1 > /data")
    project = {"X-OpenDSec-Project": "default"}
    for rights in ({}, {"X-OpenDSec-Rights": ""}, {"X-OpenDSec-Rights": "administer,built"}):
        with pytest.raises(PackFailedError) as failed:
            await pack(edge, source, "mine", headers={**project, **rights})
        assert failed.value.code == "forbidden"
    await pack(edge, source, "mine", headers={**project, "X-OpenDSec-Rights": "administer,build"})
    with pytest.raises(PackFailedError) as failed:
        await pack(edge, source, "mine", headers={"X-OpenDSec-Project": "other", "X-OpenDSec-Rights": "build"})
    assert failed.value.code == "not_found"


async def test_packs_of_one_sandbox_come_one_after_the_other(shared_containers: EdgeProcess) -> None:
    edge = shared_containers
    source = await edge.create(image="busybox", **SPEC)
    await ok(edge, source, "head -c 30000000 /dev/urandom > /data")
    made = await asyncio.gather(*(pack(edge, source, f"at-once-{number}") for number in range(4)))
    assert len({one["layer"] for one in made}) == 1
    assert not is_frozen(edge, source)
    freeze = groups_of(edge, source) / "cgroup.freeze"
    assert freeze.read_text(encoding="ascii") == "0\n"


def test_no_sandbox_of_these_is_left_frozen(containers_process: EdgeProcess) -> None:
    frozen = [
        str(file)
        for file in Path("/sys/fs/cgroup").rglob("cgroup.freeze")
        if containers_process.cgroup in str(file) and file.read_text(encoding="ascii") == "1\n"
    ]
    assert frozen == []


def long_chain(edge: EdgeProcess, count: int) -> Image:
    """An image of that many layers, each of which changes what the one below has."""
    store = ImageStore(store_of(edge))
    base = store.get("busybox")
    with store.staging() as work:
        layers = []
        for number in range(count - len(base.layers)):
            tree = work / f"tree-{number}"
            (tree / "data").mkdir(parents=True)
            (tree / "data/same").write_text(f"{number}\n", encoding="ascii")
            (tree / f"data/of-{number}").write_text("x" * number, encoding="ascii")
            if number:
                os.mknod(tree / f"data/of-{number - 1}", stat.S_IFCHR, os.makedev(0, 0))
            layers.append(make_layer(store, work, tree, name=f"layer-{number}", role=LayerRole.WORKSPACE))
        return store.publish("long", layers=[*base.layers, *layers], config=base.config)


async def test_a_chain_does_not_grow_for_ever(shared_containers: EdgeProcess) -> None:
    edge = shared_containers
    image = long_chain(edge, MOST)
    source = await edge.create(image=f"long@{image.digest}", **SPEC)
    for number in range(3):
        await ok(edge, source, f"rm /data/of-*; echo {number} > /data/of-pack-{number}; rm -rf /app; mkdir /app")
        before = view_of(edge, source)
        made = await pack(edge, source, f"longer-{number}")
        assert len(ImageStore(store_of(edge)).get(f"longer-{number}").layers) <= MOST
        source = await edge.create(image=made["image"], **SPEC)
        assert difference(before, view_of(edge, source)) == ""
