"""The container backend's decisions and small parts, without a container."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest

from opendsec.backends.container_policy import CAPS, MASKS, MAX_SLOT, Shared, host_root, launch_plan
from opendsec.backends.container_rubbish import remove_contents
from opendsec.backends.container_templates import usable_resolvers

CAP_SYS_ADMIN, CAP_NET_ADMIN, CAP_NET_RAW, CAP_SYS_PTRACE, CAP_MKNOD = 21, 12, 13, 19, 27


def test_user_ranges_do_not_overlap_and_end_below_the_last_id() -> None:
    assert host_root(0) == 268_435_456
    assert host_root(1) - host_root(0) == 65_536
    assert host_root(MAX_SLOT) + 65_536 < 2**32 - 1
    for slot in (-1, MAX_SLOT + 1):
        with pytest.raises(ValueError, match="slot"):
            host_root(slot)


def test_the_plan_confines() -> None:
    plan = launch_plan(
        slot=3,
        lower=(1, 2),
        upper=Path("/u/upper"),
        work=Path("/u/work"),
        cgroup2=3,
        cgroup1=(4,),
        listen=5,
        shared=Shared(dev=6, sys=7, guest=8),
    )
    assert plan.lower == (1, 2)
    assert (plan.idmap.inside, plan.idmap.outside, plan.idmap.count) == (0, host_root(3), 65_536)
    assert all(bind.read_only for bind in plan.binds)
    assert [bind.target for bind in plan.binds if bind.devices] == ["/dev"]
    for capability in (CAP_SYS_ADMIN, CAP_NET_ADMIN, CAP_NET_RAW, CAP_SYS_PTRACE, CAP_MKNOD):
        assert not CAPS >> capability & 1
    assert {"/proc/kcore", "/proc/kpagecgroup"} <= set(MASKS)
    assert plan.rlimits[resource.RLIMIT_CORE] == (1, 1)


def test_resolvers_a_sandbox_cannot_reach_are_left_out() -> None:
    text = "# x\nnameserver 127.0.0.53\nnameserver 192.0.2.1 \nnameserver ::1\nnameserver fe80::1%eth0\nsearch a.b\n"
    text += "nameserver 169.254.1.1\nnameserver nonsense\nnameserver\n"
    usable, refused = usable_resolvers(text)
    assert usable == ["192.0.2.1"]
    assert refused == ["127.0.0.53", "::1", "fe80::1%eth0", "169.254.1.1", "nonsense"]


def empty(tree: Path) -> None:
    fd = os.open(tree, os.O_RDONLY | os.O_DIRECTORY)
    try:
        remove_contents(fd)
    finally:
        os.close(fd)
    assert list(tree.iterdir()) == []


def test_trees_go_and_links_are_not_followed(tmp_path: Path) -> None:
    tree, outside = tmp_path / "tree", tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_text("")
    (tree / "a/b").mkdir(parents=True)
    (tree / "a/link").symlink_to(outside)
    (tree / "a/b/file").write_text("")
    empty(tree)
    assert (outside / "kept").exists()


def test_large_trees_go(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    (tree / "many").mkdir(parents=True)
    for number in range(100):
        (tree / f"many/{number}").write_text("")
    empty(tree)


def test_no_depth_is_too_deep(tmp_path: Path) -> None:
    """Deeper than Python's stack and than the longest path."""
    tree = tmp_path / "tree"
    tree.mkdir()
    fd = os.open(tree, os.O_RDONLY | os.O_DIRECTORY)
    for _ in range(1500):
        os.mkdir("d" * 20, dir_fd=fd)
        below = os.open("d" * 20, os.O_RDONLY | os.O_DIRECTORY, dir_fd=fd)
        os.close(fd)
        fd = below
    os.close(fd)
    empty(tree)
