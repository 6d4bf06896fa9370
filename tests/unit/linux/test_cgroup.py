"""The v2 driver on a directory tree that looks like one, and the choice of a driver."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from opendsec.linux import cgroup
from opendsec.linux.cgroup import CgroupClass, CgroupLimits, CgroupMounts, HybridDriver, UnifiedDriver, choose_driver
from opendsec.linux.mount import parse_mountinfo

pytestmark = pytest.mark.anyio
FILES = {
    "cgroup.procs": "",
    "cgroup.threads": "",
    "cgroup.subtree_control": "",
    "cgroup.freeze": "0\n",
    "cgroup.kill": "",
    "cgroup.events": "populated 0\nfrozen 0\n",
    "memory.max": "max",
    "memory.swap.max": "max\n",
    "memory.current": "4096\n",
    "memory.events": "low 0\noom 3\noom_kill 2\n",
    "pids.max": "max",
    "pids.events": "max 5\n",
    "cpu.max": "max 100000\n",
    "cpu.idle": "0\n",
    "cpu.stat": "usage_usec 1500000\nuser_usec 1\n",
}


def populate(directory: Path) -> None:
    for name, text in FILES.items():
        (directory / name).write_text(text)


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fake v2 mount: every directory made in it gets the kernel's files."""
    real_mkdir, real_rmdir, real_os_mkdir = Path.mkdir, os.rmdir, cgroup.make_directory

    def mkdir(self: Path, mode: int = 0o777, parents: bool = False, exist_ok: bool = False) -> None:
        real_mkdir(self, mode, parents, exist_ok)
        populate(self)

    def make_directory(name: str, dir_fd: int) -> None:
        real_os_mkdir(name, dir_fd)
        populate(Path(os.readlink(f"/proc/self/fd/{dir_fd}")) / name)

    def rmdir(name: str, *, dir_fd: int | None = None) -> None:
        directory = Path(os.readlink(f"/proc/self/fd/{dir_fd}")) / name if dir_fd is not None else Path(name)
        for file in FILES:
            (directory / file).unlink(missing_ok=True)
        real_rmdir(name, dir_fd=dir_fd)

    monkeypatch.setattr(Path, "mkdir", mkdir)
    monkeypatch.setattr(cgroup, "make_directory", make_directory)
    monkeypatch.setattr(os, "rmdir", rmdir)
    monkeypatch.setattr(os, "chown", lambda *_args, **_kwargs: None)
    populate(tmp_path)
    (tmp_path / "cgroup.controllers").write_text("cpu memory pids\n")
    return tmp_path


def driver(tree: Path, controllers: frozenset[str] = frozenset({"memory", "pids", "cpu", "io"})) -> UnifiedDriver:
    made = UnifiedDriver(tree, root="sandboxes", controllers=controllers)
    made.open()
    return made


async def test_controllers_are_enabled_in_the_parents_only(tree: Path) -> None:
    groups = driver(tree)
    with groups.create("box", CgroupLimits(), owner=1000) as leaf:
        assert leaf.procs == ()
        assert Path(os.readlink(f"/proc/self/fd/{leaf.cgroup2}")) == tree / "sandboxes/latency/box"
    for parent in (tree, tree / "sandboxes", tree / "sandboxes/latency", tree / "sandboxes/batch"):
        assert (parent / "cgroup.subtree_control").read_text() == "+memory +pids +cpu"
    assert (tree / "sandboxes/latency/box/cgroup.subtree_control").read_text() == ""
    assert (tree / "sandboxes/batch/cpu.idle").read_text().strip() == "1"
    assert (tree / "sandboxes/latency/cpu.idle").read_text().strip() == "0"
    groups.close()


async def test_limits_are_written_as_the_kernel_wants_them(tree: Path) -> None:
    groups = driver(tree)
    limits = CgroupLimits(memory_bytes=64 << 20, pids=100, cpu_cores=1.5)
    groups.create("box", limits, owner=1000, group_class=CgroupClass.BATCH).__exit__()
    box = tree / "sandboxes/batch/box"
    written = {name: (box / name).read_text() for name in ("memory.max", "pids.max", "cpu.max")}
    assert written == {"memory.max": "67108864", "pids.max": "100", "cpu.max": "150000 100000"}
    assert (box / "memory.swap.max").read_text().startswith("0")
    groups.close()


async def test_a_limit_without_its_controller_leaves_nothing(tree: Path) -> None:
    groups = driver(tree)
    del FILES["pids.max"]
    try:
        with pytest.raises(FileNotFoundError):
            groups.create("box", CgroupLimits(pids=10), owner=1000)
    finally:
        FILES["pids.max"] = "max"
    assert groups.names() == set()
    groups.close()


async def test_counters(tree: Path) -> None:
    groups = driver(tree)
    groups.create("box", CgroupLimits(), owner=1000).__exit__()
    usage = groups.usage("box")
    assert (usage.memory_bytes, usage.oom_kills, usage.pids_denied, usage.cpu_s) == (4096, 2, 5, 1.5)
    none = groups.usage("nobody")
    assert (none.memory_bytes, none.oom_kills, none.pids_denied, none.cpu_s) == (None, None, None, None)
    groups.close()


async def test_removal_takes_groups_below_with_it(tree: Path) -> None:
    groups = driver(tree)
    groups.create("box", CgroupLimits(), owner=1000).__exit__()
    (tree / "sandboxes/latency/box/cmd-1/deeper").mkdir(parents=True)
    assert groups.names() == {("box", CgroupClass.LATENCY)}
    with pytest.raises(FileExistsError):
        groups.create("box", CgroupLimits(), owner=1000)
    await groups.remove("box")
    await groups.remove("box")
    groups.kill("box")
    assert groups.names() == set()
    groups.remove_root()
    assert not (tree / "sandboxes").exists()


async def test_a_group_in_use_is_named_at_the_deadline(tree: Path) -> None:
    groups = driver(tree)
    groups.create("box", CgroupLimits(), owner=1000).__exit__()
    (tree / "sandboxes/latency/box/cgroup.events").write_text("populated 1\nfrozen 0\n")
    (tree / "sandboxes/latency/box/busy").write_text("")
    with pytest.raises(TimeoutError, match="box"):
        await groups.wait_empty("box", timeout_s=0.01)
    with pytest.raises(TimeoutError, match="box"):
        await groups.remove("box", timeout_s=0.01)
    groups.close()


async def test_freeze_waits_for_the_kernel(tree: Path) -> None:
    groups = driver(tree)
    groups.create("box", CgroupLimits(), owner=1000).__exit__()
    with pytest.raises(TimeoutError, match="did not freeze"):
        await groups.freeze("box", timeout_s=0.01)
    assert not groups.is_frozen("box")
    await groups.thaw("box")
    with pytest.raises(FileNotFoundError):
        await groups.freeze("nobody")
    groups.close()


def test_mounts_are_told_apart() -> None:
    lines = [
        rb"25 18 0:22 / /sys/fs/cgroup rw - tmpfs tmpfs rw",
        rb"26 25 0:23 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct",
        rb"27 25 0:24 /nested /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory",
        rb"28 25 0:25 / /mnt/a\040b rw - cgroup2 cgroup2 rw",
        rb"29 25 0:25 / /other rw - cgroup2 cgroup2 rw",
    ]
    unified, legacy = cgroup.sort_mounts(parse_mountinfo(lines))
    assert unified == Path("/mnt/a b")
    assert legacy == {"cpu": Path("/sys/fs/cgroup/cpu,cpuacct"), "memory": Path("/sys/fs/cgroup/memory")}


@pytest.mark.parametrize(
    ("controllers", "legacy", "kind"),
    [
        ({"memory", "pids"}, {}, UnifiedDriver),
        ({"hugetlb"}, {"memory": Path("/m")}, HybridDriver),
        (set(), {}, UnifiedDriver),
        ({"memory"}, {"pids": Path("/p")}, UnifiedDriver),
    ],
)
def test_the_driver_follows_the_mounts(controllers: set[str], legacy: dict[str, Path], kind: type) -> None:
    chosen = choose_driver(CgroupMounts(Path("/c"), frozenset(controllers), legacy))
    assert type(chosen) is kind
    assert chosen.limits == (controllers if kind is UnifiedDriver else set(legacy)) & {"memory", "pids", "cpu"}


def test_no_v2_tree_is_an_error_with_a_remedy() -> None:
    with pytest.raises(OSError, match="mount one"):
        choose_driver(CgroupMounts(None, frozenset(), {"memory": Path("/m")}))
