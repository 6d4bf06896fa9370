"""Collecting and checking a store that two nodes share: neither takes what the other needs."""

from __future__ import annotations

import multiprocessing
import os

import pytest
from tests.images import make_scratch_image
from tests.node.shared.conftest import NodeView
from tests.unit.store.test_races import Life

from opendsec.errors import ConflictError
from opendsec.store.fsck import check
from opendsec.store.gc import collect, keeping
from opendsec.store.leases import Leases
from opendsec.store.loading.direct import DirectLoader
from opendsec.store.mounts import LayerMounts
from opendsec.store.portability import probe_directory

pytestmark = [pytest.mark.root, pytest.mark.erofs, pytest.mark.moosefs]

Nodes = tuple[NodeView, NodeView]


def test_the_file_system_offers_what_is_asked_of_it(nodes: Nodes) -> None:
    staging = nodes[0].store().layout.staging
    assert [one.sentence for one in probe_directory(staging) if not one.ok] == []
    assert list(staging.iterdir()) == []


def test_one_node_at_a_time_collects_or_checks(nodes: Nodes) -> None:
    with keeping(nodes[0].store()), pytest.raises(ConflictError, match="another process"):
        check(nodes[1].store())


def test_what_one_node_has_mounted_the_other_does_not_collect(nodes: Nodes) -> None:
    first, second = nodes
    content = os.urandom(1 << 20)
    image = make_scratch_image(first.store(), "big", files={"/big": content})
    store, root = second.store(), second.local / "layers"
    loader = DirectLoader(store, second.local / "metadata")
    with LayerMounts(loader, root, leases=Leases(store.layout, root)) as layers:
        [fd] = layers.acquire(image)
        try:
            first.store().remove("big")
            assert len(collect(first.store(), grace_s=0).files) == 1
            assert check(first.store()).findings == ()
            with open(os.open("big", os.O_RDONLY, dir_fd=fd), "rb") as file:
                assert file.read() == content
        finally:
            layers.unmount_all()
    assert len(collect(first.store(), grace_s=0).files) == 3


def _live(node: NodeView, seed: int) -> None:
    Life(node.shared / "store", seed, turns=40).run()


def test_both_publish_remove_and_collect_at_once(nodes: Nodes) -> None:
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_live, args=(nodes[seed % 2], seed)) for seed in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
        process.close()
    assert check(nodes[0].store()).findings == ()
    assert {image.name for image in nodes[0].store().list()} == {image.name for image in nodes[1].store().list()}
