"""Reads of a blob, whatever store and disk do: the right bytes or EIO, each read answered once and in time."""

from __future__ import annotations

import errno
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.store.loading.faulty import Answer, Fault, FaultyFiles, all_of, blob_of, honest

from opendsec.store.chunks import CHUNK_BYTES
from opendsec.store.loading.cache import SLOT_BYTES, ChunkCache
from opendsec.store.loading.engine import Engine
from opendsec.store.loading.fetch import ChunkSource
from opendsec.store.loading.fetching import DEMAND_PER_BLOB
from opendsec.store.loading.reading import GIVEN_UP_S, BlobReader

SIZE = 40 * CHUNK_BYTES + 4321
CONTENT = random.Random(11).randbytes(SIZE)
OTHER = random.Random(12).randbytes(3 * CHUNK_BYTES)


@contextmanager
def readers(
    root: Path, files: FaultyFiles, *contents: bytes, patience_s: float = 5.0, limit_bytes: int = 1 << 30
) -> Iterator[list[BlobReader]]:
    engine = Engine(ChunkSource(files, patience_s=patience_s * 0.9), patience_s=patience_s)
    try:
        with ChunkCache(root, limit_bytes=limit_bytes, reserve_bytes=0) as cache:
            made = []
            for content in contents:
                blob, table = blob_of(content)
                made.append(BlobReader(engine, blob, table, cache.open(blob, table)))
            yield made
            engine.close()
            engine.demand.shutdown()
            engine.ahead.shutdown()
    finally:
        engine.close()


def asked(reader: BlobReader, offset: int, size: int) -> Answer:
    answer = Answer()
    reader.read(offset, size, answer)
    return answer


PARTS = st.lists(st.tuples(st.integers(0, SIZE - 1), st.integers(1, 600_000)), min_size=1, max_size=30)


@settings(max_examples=12, deadline=None)
@given(parts=PARTS, seed=st.integers(0, 1000), limit=st.sampled_from([0, 2, 1000]))
def test_all_reads_agree_with_the_truth_or_fail(
    tmp_path_factory: pytest.TempPathFactory, parts: list[tuple[int, int]], seed: int, limit: int
) -> None:
    """The store lies, cuts short, fails, or is honest, at random; the cache has no room, little room, much room."""
    chance = random.Random(seed)

    def fault(_name: str, _offset: int, content: bytes) -> bytes:
        match chance.randrange(6):
            case 0:
                return bytes(len(content))
            case 1:
                return content[: chance.randrange(len(content) + 1)]
            case 2:
                raise OSError(errno.EIO, "broken")
            case 3:
                return chance.randbytes(len(content))
            case _:
                return content

    root = tmp_path_factory.mktemp("cache")
    with readers(root, FaultyFiles(fault=fault), CONTENT, patience_s=1, limit_bytes=limit * SLOT_BYTES) as (reader,):
        reader._engine.source.files = FaultyFiles(CONTENT, fault=fault)
        cut = [(offset, min(size, SIZE - offset)) for offset, size in parts]
        got = all_of([asked(reader, offset, size) for offset, size in cut])
        assert all(
            content in (None, CONTENT[offset : offset + size]) for content, (offset, size) in zip(got, cut, strict=True)
        )


def test_a_chunk_is_fetched_once_however_many_wait(tmp_path: Path) -> None:
    hold = threading.Event()

    def fault(_name: str, _offset: int, content: bytes) -> bytes:
        hold.wait(60)
        return content

    files = FaultyFiles(CONTENT, fault=fault)
    with readers(tmp_path, files, CONTENT) as (reader,):
        answers = [asked(reader, 5, 3 * CHUNK_BYTES) for _ in range(50)]
        hold.set()
        assert set(all_of(answers)) == {CONTENT[5 : 5 + 3 * CHUNK_BYTES]}
        assert [(offset, size) for _, offset, size in files.reads] == [(0, 4 * CHUNK_BYTES)]


def test_a_store_that_hangs_costs_the_time_limit_and_no_other_blob(tmp_path: Path) -> None:
    release = threading.Event()
    slow, _ = blob_of(CONTENT)

    def fault(name: str, _offset: int, content: bytes) -> bytes:
        if name.endswith(slow.digest[7:]):
            release.wait(60)
        return content

    files = FaultyFiles(CONTENT, OTHER, fault=fault)
    with readers(tmp_path / "patient", files, CONTENT, OTHER, patience_s=60.0) as (hung, well):
        waiting = [asked(hung, number * CHUNK_BYTES, 10) for number in range(40)]
        assert asked(well, 0, len(OTHER)).wait().content == OTHER
        assert not any(answer.complete.is_set() for answer in waiting)
        release.set()
        assert None not in all_of(waiting)
    release.clear()
    with readers(tmp_path / "short", files, CONTENT, patience_s=1.0) as (hung,):
        begun = time.monotonic()
        waiting = [asked(hung, number * CHUNK_BYTES, 10) for number in range(40)]
        assert {answer.wait().error for answer in waiting} == {errno.EIO}
        assert time.monotonic() - begun > 0.9
        assert hung.failures == 40
        assert hung._fetches._active <= DEMAND_PER_BLOB
        release.set()
        time.sleep(GIVEN_UP_S)
        assert asked(hung, 0, SIZE).wait().content == CONTENT


def test_a_store_that_comes_back_is_read_again(tmp_path: Path) -> None:
    files = FaultyFiles(CONTENT, fault=lambda _name, _offset, content: bytes(len(content)))
    with readers(tmp_path, files, CONTENT) as (reader,):
        assert asked(reader, 0, 100).wait().error == errno.EIO
        files.fault = lambda _name, _offset, content: content
        assert asked(reader, 0, 100).wait().content == CONTENT[:100]


def test_a_disk_that_fails_is_gone_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with readers(tmp_path, FaultyFiles(CONTENT), CONTENT) as (reader,):

        def broken(*_: object) -> None:
            raise OSError(errno.EROFS, "read-only now")

        monkeypatch.setattr(reader.cached.__class__, "write", broken)
        monkeypatch.setattr(reader.cached.__class__, "read", broken)
        assert asked(reader, 10, SIZE - 10).wait().content == CONTENT[10:]


def test_a_sequential_reader_is_helped_and_a_start_is_not(tmp_path: Path) -> None:
    files = FaultyFiles(CONTENT)
    with readers(tmp_path, files, CONTENT) as (reader,):
        for number in random.Random(1).sample(range(40), 12):
            asked(reader, number * CHUNK_BYTES, 4096).wait()
        assert sum(size for _, _, size in files.reads) == 12 * CHUNK_BYTES
    files = FaultyFiles(CONTENT)
    with readers(tmp_path / "2", files, CONTENT) as (reader,):
        for offset in range(0, 2 * 1024 * 1024, 131_072):
            asked(reader, offset, 131_072).wait()
        deadline = time.monotonic() + 10
        while reader.cached.missing(32, 2):  # a chunk is kept a moment after it is given to whoever waits
            assert time.monotonic() < deadline
            threading.Event().wait(0.01)


def test_loading_before_anybody_asks(tmp_path: Path) -> None:
    files = FaultyFiles(CONTENT)
    with readers(tmp_path, files, CONTENT) as (reader,):
        for future in reader.load([3, 4, 5, 20, 999, -1, 40]):
            future.result(timeout=60)
        assert reader.cached.missing(0, 41) == [n for n in range(41) if n not in (3, 4, 5, 20, 40)]
        assert len(files.reads) == 3
        assert (
            asked(reader, 3 * CHUNK_BYTES, 2 * CHUNK_BYTES).wait().content
            == CONTENT[3 * CHUNK_BYTES :][: 2 * CHUNK_BYTES]
        )
        assert len(files.reads) == 3


def test_the_end_answers_whoever_waits(tmp_path: Path) -> None:
    release = threading.Event()

    def hang(_name: str, _offset: int, content: bytes) -> bytes:
        release.wait(60)
        return content

    fault: Fault = hang
    with readers(tmp_path, FaultyFiles(CONTENT, fault=fault), CONTENT, patience_s=60) as (reader,):
        answer = asked(reader, 0, 10)
        threading.Timer(0.2, release.set).start()
        reader._engine.close()
        assert answer.wait().error == errno.EIO


def test_a_load_that_fails_keeps_no_chunk_from_later_reads(tmp_path: Path) -> None:
    """Two runs are asked for at once, since one chunk between them is here; the first fails."""
    files = FaultyFiles(CONTENT)
    with readers(tmp_path, files, CONTENT, patience_s=1.0) as (reader,):
        asked(reader, 2 * CHUNK_BYTES, 10).wait()
        files.fault = lambda _name, _offset, content: bytes(len(content))
        (first, *_) = reader.load([0, 1, 2, 3, 4], at_once=1)
        assert first.exception(timeout=10) is not None
        files.fault = honest
        assert asked(reader, 0, 5 * CHUNK_BYTES).wait().content == CONTENT[: 5 * CHUNK_BYTES]
        assert reader.is_idle


def test_who_waited_behind_a_read_that_failed_does_not_wait_anew(tmp_path: Path) -> None:
    """As the kernel has it: the next reader of a page asks when the one before it was told."""
    hold = threading.Event()

    def fault(_name: str, _offset: int, content: bytes) -> bytes:
        hold.wait(60)
        return content

    with readers(tmp_path, FaultyFiles(CONTENT, fault=fault), CONTENT, patience_s=1.0) as (reader,):
        begun = time.monotonic()
        assert [asked(reader, 10, 100).wait().error for _ in range(20)] == [errno.EIO] * 20
        assert time.monotonic() - begun < 19.0, "one by one they would have waited for 20"
        hold.set()
        time.sleep(GIVEN_UP_S)
        assert asked(reader, 10, 100).wait().content == CONTENT[10:110]
