"""What a profile says is read before a start is ready, never for longer than may be waited, and from nowhere else."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from tests.unit.store.loading.faulty import FaultyFiles

from opendsec.model.image import Blob, Layer
from opendsec.store.loading import starting
from opendsec.store.loading.base import LayerFiles
from opendsec.store.loading.profiles import FileRead, Profile, encode_profile, profile_name
from opendsec.store.loading.starting import Patience, Starts

HEX = "ab" * 32
WAIT_S = 40.0
LAYER = Layer(
    digest=f"sha256:{HEX}",
    size_bytes=0,
    meta=Blob(digest=f"sha256:{HEX}", size_bytes=1),
    data=Blob(digest=f"sha256:{HEX}", size_bytes=1 << 30),
)
Read = tuple[str, tuple[tuple[int, int], ...]]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    tree = tmp_path / "tree"
    (tree / "d").mkdir(parents=True)
    for name in ("a", "d/b"):
        (tree / name).write_bytes(bytes(100_000))
    return tree


@pytest.fixture
def brought(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What files were read, as the kernel calls them."""
    found: list[str] = []
    bring = starting._bring

    def noted(fd: int, parts: tuple[tuple[int, int], ...]) -> None:
        bring(fd, parts)
        found.append(Path(f"/proc/self/fd/{fd}").readlink().name)

    monkeypatch.setattr(starting, "_bring", noted)
    return found


def store_of(*reads: Read) -> FaultyFiles:
    files = FaultyFiles()
    profile = Profile(
        layer=LAYER.digest,
        data=f"sha256:{HEX}",
        chunks=(0,),
        recorded_at=0.0,
        reads=tuple(FileRead(path=path, parts=parts) for path, parts in reads),
    )
    files.write(profile_name(LAYER.digest), encode_profile(profile))
    return files


@contextmanager
def starts_of(files: FaultyFiles, tmp_path: Path, *, wait_s: float = WAIT_S) -> Iterator[Starts]:
    starts = Starts(files, tmp_path / "local", wait_s=wait_s, record_s=None)
    try:
        yield starts
    finally:
        starts.close()


def begin(starts: Starts, tree: Path, *, is_far: bool = True) -> None:
    fd = os.open(tree, os.O_RDONLY | os.O_DIRECTORY)
    starts.begin(LAYER, LayerFiles(meta=tree, data=tree, is_far=is_far), fd)
    os.close(fd)


def waited(starts: Starts) -> float:
    """Seconds until it was time to say ready."""
    begun = time.monotonic()
    asyncio.run(starts.ready([LAYER]))
    return time.monotonic() - begun


def test_patience() -> None:
    patience = Patience(wait_s=1.0)
    assert patience.until(waited_s=0.0, done=0.0) == 0.25
    assert patience.until(waited_s=0.2, done=0.9) == pytest.approx(0.05)
    assert patience.until(waited_s=0.2, done=1.0) == 0.0
    assert patience.until(waited_s=0.3, done=0.12) == 0.0, "it would be in vain"
    assert patience.until(waited_s=0.3, done=0.13) == pytest.approx(0.7)
    assert patience.until(waited_s=1.0, done=0.99) == 0.0
    assert Patience(wait_s=0.0).until(waited_s=0.0, done=0.0) == 0.0


def test_ready_is_when_all_was_read(tmp_path: Path, tree: Path, brought: list[str]) -> None:
    files = store_of(("a", ((0, 4096), (8192, 300_000))), ("d/b", ((4096, 4096),)))
    with starts_of(files, tmp_path) as starts:
        starts.expect(LAYER)
        begin(starts, tree)
        waited(starts)
        assert sorted(brought) == ["a", "b"]
        waited(starts)  # and then it always is
        assert len(brought) == 2


@pytest.mark.parametrize("is_far", [True, False])
def test_nothing_is_read_of_what_has_no_profile_or_lies_here(
    tmp_path: Path, tree: Path, brought: list[str], is_far: bool
) -> None:
    files = FaultyFiles() if is_far else store_of(("a", ((0, 4096),)))
    with starts_of(files, tmp_path) as starts:
        begin(starts, tree, is_far=is_far)
        assert waited(starts) < WAIT_S
        assert brought == []


def test_a_hostile_profile_opens_no_file_but_those_of_the_layer(tmp_path: Path, tree: Path, brought: list[str]) -> None:
    (tmp_path / "secret").write_bytes(bytes(5000))
    (tree / "link").symlink_to(tmp_path / "secret")
    (tree / "out").symlink_to("..")
    (tree / "magic").symlink_to("/proc/self/root")
    os.mkfifo(tree / "fifo")
    part = ((0, 4096),)
    names = ["../secret", str(tmp_path / "secret"), "link", "out/secret", "magic/etc/passwd", "fifo", "d", ".", ""]
    names += ["d/../../secret", "nothing", "x" * 5000, "a"]
    with starts_of(store_of(*((name, part) for name in names)), tmp_path) as starts:
        begin(starts, tree)
        assert waited(starts) < WAIT_S
        assert brought == ["a"]


def test_a_store_that_is_slow_or_silent_is_not_waited_for(
    tmp_path: Path, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()
    monkeypatch.setattr(starting, "_bring", lambda _fd, _parts: go_on.wait(60))
    monkeypatch.setattr(starting, "Patience", partial(Patience, look_s=0.005))
    files = store_of(("a", ((0, 4096),)))
    with starts_of(files, tmp_path) as starts:
        begin(starts, tree)
        assert waited(starts) < WAIT_S, "after a part of the time nothing is there"
        go_on.set()
    go_on.clear()
    with starts_of(files, tmp_path, wait_s=0.0) as starts:
        begin(starts, tree)
        assert waited(starts) < WAIT_S
        go_on.set()

    def silent(_name: str, _offset: int, content: bytes) -> bytes:
        go_on.wait(60)
        return content

    go_on.clear()
    files.fault = silent
    with starts_of(files, tmp_path) as starts:
        begin(starts, tree)
        assert waited(starts) < WAIT_S
        go_on.set()


def test_what_cannot_be_read_is_left_to_whoever_needs_it(
    tmp_path: Path, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_fd: int, _parts: object) -> None:
        raise OSError(5, "broken")

    monkeypatch.setattr(starting, "_bring", broken)
    with starts_of(store_of(("a", ((0, 4096),)), ("d/b", ((0, 4096),))), tmp_path) as starts:
        begin(starts, tree)
        assert waited(starts) < WAIT_S


def test_nothing_stays_open(tmp_path: Path, tree: Path) -> None:
    before = set(os.listdir("/proc/self/fd"))
    with starts_of(store_of(("a", ((0, 4096),))), tmp_path) as starts:
        for _ in range(3):
            begin(starts, tree)
            waited(starts)
    assert set(os.listdir("/proc/self/fd")) == before


def test_creates_that_wait_leave_room_for_those_that_need_not(
    tmp_path: Path, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()
    monkeypatch.setattr(starting, "_bring", lambda _fd, _parts: go_on.wait(60))

    async def many(starts: Starts) -> tuple[int, int]:
        tasks = [asyncio.create_task(starts.ready([LAYER])) for _ in range(3 * starting.MOST_WAITING)]
        expected = len(tasks) - starting.MOST_WAITING
        async with asyncio.timeout(30):
            while sum(task.done() for task in tasks) < expected:
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        found = sum(task.done() for task in tasks)
        go_on.set()
        await asyncio.gather(*tasks)
        return found, len(tasks)

    with starts_of(store_of(("a", ((0, 4096),))), tmp_path, wait_s=60.0) as starts:
        begin(starts, tree)
        done, count = asyncio.run(many(starts))
    assert count - done == starting.MOST_WAITING
