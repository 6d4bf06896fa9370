"""A test leaves nothing behind: descriptors, processes, mounts, namespaces, links, cgroups and sockets are counted.

A snapshot is taken before and after; what is new, and still there half a minute later (the kernel ends namespaces in
its own time), is a failure. It covers tests/node, tests/contract and tests/cluster. What belongs to the test process
(descriptors, children) is compared around each test. What belongs to the machine (mounts, namespaces, links, cgroups)
is compared around each module, once its platforms are stopped too, and only with `--leaks=machine`: on a machine shared
with others their objects would be counted.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path

import pytest

CHECKED = ("node", "contract", "cluster")
SETTLE_S = 30.0
_OURS = ("opendsec", "ods")
_CGROUPS = Path("/sys/fs/cgroup")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--leaks", choices=("own", "machine"), default="own", help="compare this process only, or all of the machine"
    )


def pytest_collection_finish() -> None:
    """What thousands of collected tests are made of is never garbage: to look through it twice for each of them took
    minutes in all."""
    gc.collect()
    gc.freeze()


def _descriptors() -> frozenset[str]:
    found = set()
    for number in os.listdir("/proc/self/fd"):
        try:
            found.add(f"{number} → {os.readlink(f'/proc/self/fd/{number}')}")
        except FileNotFoundError:
            continue  # the descriptor listdir itself used
    return frozenset(found)


def _children() -> frozenset[str]:
    found: set[str] = set()
    for task in Path("/proc/self/task").iterdir():
        try:
            pids = (task / "children").read_text(encoding="ascii").split()
        except (FileNotFoundError, ProcessLookupError):
            continue  # the thread has ended
        found.update(f"{pid} {_command(pid)}" for pid in pids)
    return frozenset(found)


def _command(pid: str) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
        return words.decode("utf-8", "replace").strip() or "(zombie)"
    except (FileNotFoundError, ProcessLookupError):
        return "(gone)"


def _mounts() -> frozenset[str]:
    lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    points = (line.split()[4] for line in lines)
    return frozenset(point for point in points if "opendsec" in point or "pytest-of-" in point)


def _named(folder: Path) -> frozenset[str]:
    return frozenset(str(path) for path in folder.iterdir()) if folder.is_dir() else frozenset()


def _links() -> frozenset[str]:
    return frozenset(path for path in _named(Path("/sys/class/net")) if Path(path).name.startswith(_OURS))


def _cgroups() -> frozenset[str]:
    found: set[str] = set()
    for top in [_CGROUPS, *(_CGROUPS.iterdir() if _CGROUPS.is_dir() else ())]:
        for ours in top.glob("opendsec*"):
            found.update(folder for folder, _, _ in os.walk(ours))
    return frozenset(found)


@dataclass(frozen=True, slots=True)
class Belongings:
    """What there is at one time."""

    descriptors: frozenset[str] = frozenset()
    children: frozenset[str] = frozenset()
    mounts: frozenset[str] = frozenset()
    namespaces: frozenset[str] = frozenset()
    links: frozenset[str] = frozenset()
    cgroups: frozenset[str] = frozenset()

    @classmethod
    def of_process(cls) -> Belongings:
        """What this process holds."""
        return cls(descriptors=_descriptors(), children=_children())

    @classmethod
    def of_machine(cls) -> Belongings:
        """What of ours is on the machine."""
        return cls(mounts=_mounts(), namespaces=_named(Path("/run/netns")), links=_links(), cgroups=_cgroups())

    def beyond(self, before: Belongings) -> list[str]:
        """Lines naming what is here and was not there before."""
        # By their pids: a process that has just begun has no command yet.
        known = {child.partition(" ")[0] for child in before.children}
        return [
            f"{field.name}: {new}"
            for field in fields(self)
            for new in sorted(getattr(self, field.name) - getattr(before, field.name))
            if field.name != "children" or new.partition(" ")[0] not in known
        ]


Look = Callable[[], Belongings]


def left_behind(before: Belongings, look: Look) -> list[str]:
    """What stays after half a minute of settling."""
    deadline = time.monotonic() + SETTLE_S
    while True:
        gc.collect()
        new = look().beyond(before)
        if not new or time.monotonic() > deadline:
            return new
        time.sleep(0.05)


def _checked(request: pytest.FixtureRequest, look: Look, *, wanted: bool) -> Iterator[None]:
    tier = request.path.relative_to(request.config.rootpath).parts[1]
    if not wanted or tier not in CHECKED:
        yield
        return
    gc.collect()
    before = look()
    yield
    new = left_behind(before, look)
    if new:
        pytest.fail("left behind:\n  " + "\n  ".join(new), pytrace=False)


@pytest.fixture(autouse=True)
def no_leaks_of_process(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails the test after which this process holds more than before."""
    yield from _checked(request, Belongings.of_process, wanted=True)


@pytest.fixture(autouse=True, scope="module")
def no_leaks_on_machine(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails the last test of a module after which something of ours is left on the machine."""
    wanted = request.config.getoption("--leaks") == "machine"
    yield from _checked(request, Belongings.of_machine, wanted=wanted)
