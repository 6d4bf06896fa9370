"""The cache of chunks: right bytes or none, whatever happened to the file; space given back; one process at a time."""

from __future__ import annotations

import hashlib
import os
import random
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opendsec.errors import ConflictError
from opendsec.model.image import Blob
from opendsec.store.chunks import CHUNK_BYTES, chunk_count, table_digest
from opendsec.store.loading.cache import SLOT_BYTES, CachedBlob, ChunkCache

PLENTY = 1 << 30


def content_of(chunks: int, *, tail: int = 0, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(chunks * CHUNK_BYTES + tail)


def pieces_of(content: bytes) -> list[bytes]:
    return [content[start : start + CHUNK_BYTES] for start in range(0, len(content), CHUNK_BYTES)]


def blob_of(content: bytes) -> tuple[Blob, bytes]:
    table = b"".join(hashlib.sha256(piece).digest() for piece in pieces_of(content))
    return Blob(digest=table_digest(table), size_bytes=len(content)), table


def opened(cache: ChunkCache, content: bytes) -> CachedBlob:
    return cache.open(*blob_of(content))


def fill(blob: CachedBlob, content: bytes) -> None:
    for number, piece in enumerate(pieces_of(content)):
        assert blob.write(number, piece)


def test_what_was_written_is_read_and_what_was_not_is_none(tmp_path: Path) -> None:
    content = content_of(5, tail=100)
    with ChunkCache(tmp_path, limit_bytes=PLENTY, reserve_bytes=0) as cache:
        blob = opened(cache, content)
        assert blob.missing(0, 99) == [0, 1, 2, 3, 4, 5]
        blob.write(5, pieces_of(content)[5])
        blob.write(1, pieces_of(content)[1])
        assert [blob.read(n) is not None for n in range(6)] == [False, True, False, False, False, True]
        assert blob.read(5) == content[-100:]
        assert blob.missing(0, 99) == [0, 2, 3, 4]


def test_the_next_process_finds_it(tmp_path: Path) -> None:
    content = content_of(9, tail=1)
    with ChunkCache(tmp_path, limit_bytes=PLENTY, reserve_bytes=0) as cache:
        fill(opened(cache, content), content)
    with ChunkCache(tmp_path, limit_bytes=PLENTY, reserve_bytes=0) as cache:
        assert cache.used_bytes == 3 * SLOT_BYTES
        blob = opened(cache, content)
        assert blob.check_all() == set(range(10))
        assert b"".join(blob.read(n) or b"" for n in range(10)) == content


@pytest.mark.parametrize("damage", ["zeros", "flip", "short", "hole"])
def test_a_damaged_chunk_is_not_here(tmp_path: Path, damage: str) -> None:
    """After a power loss a file system may show zeros where data was written and never reached the disk."""
    content = content_of(6)
    with ChunkCache(tmp_path, limit_bytes=PLENTY, reserve_bytes=0) as cache:
        blob = opened(cache, content)
        fill(blob, content)
        with blob.path.open("r+b") as file:
            if damage == "short":
                file.truncate(2 * CHUNK_BYTES + 17)
            elif damage == "hole":
                file.truncate(2 * CHUNK_BYTES)
                file.truncate(len(content))
            else:
                file.seek(2 * CHUNK_BYTES)
                file.write(bytes(CHUNK_BYTES) if damage == "zeros" else b"\xff")
        assert blob.read(2) is None
        assert blob.read(2) is None
        assert blob.missing(2, 1) == [2]
        assert blob.read(1) == pieces_of(content)[1]
        assert cache.counts.damaged == 1
        assert blob.write(2, pieces_of(content)[2])
        assert blob.read(2) == pieces_of(content)[2]


def test_the_least_recently_used_goes_first(tmp_path: Path) -> None:
    content = content_of(16)
    with ChunkCache(tmp_path, limit_bytes=3 * SLOT_BYTES, reserve_bytes=0) as cache:
        blob = opened(cache, content)
        pieces = pieces_of(content)
        for number in range(12):
            blob.write(number, pieces[number])
        blob.read(0)
        blob.write(12, pieces[12])
        assert cache.used_bytes == 3 * SLOT_BYTES
        assert blob.missing(0, 16) == [4, 5, 6, 7, 13, 14, 15]
        assert os.stat(blob.path).st_blocks * 512 <= 3 * SLOT_BYTES


def test_slots_of_blobs_nobody_opened_are_given_back_too(tmp_path: Path) -> None:
    old, new = content_of(8, seed=1), content_of(8, seed=2)
    with ChunkCache(tmp_path, limit_bytes=2 * SLOT_BYTES, reserve_bytes=0) as cache:
        fill(opened(cache, old), old)
        left = opened(cache, old).path
    with ChunkCache(tmp_path, limit_bytes=2 * SLOT_BYTES, reserve_bytes=0) as cache:
        fill(opened(cache, new), new)
        assert opened(cache, new).check_all() == set(range(8))
        assert not left.exists()


def test_what_may_not_be_evicted_stays_and_the_rest_is_not_kept(tmp_path: Path) -> None:
    kept, other = content_of(8, seed=1), content_of(8, seed=2)
    with ChunkCache(tmp_path, limit_bytes=2 * SLOT_BYTES, reserve_bytes=0) as cache:
        blob = cache.open(*blob_of(kept), evictable=False)
        fill(blob, kept)
        assert not opened(cache, other).write(0, pieces_of(other)[0])
        assert cache.counts.refused == 1
        assert blob.check_all() == set(range(8))


def test_no_room_on_the_disk_is_no_error(tmp_path: Path) -> None:
    content = content_of(1)
    with ChunkCache(tmp_path, limit_bytes=PLENTY, reserve_bytes=1 << 60) as cache:
        blob = opened(cache, content)
        assert not blob.write(0, content)
        assert blob.read(0) is None


def test_one_process_at_a_time(tmp_path: Path) -> None:
    with ChunkCache(tmp_path, limit_bytes=PLENTY), pytest.raises(ConflictError, match="another process"):
        ChunkCache(tmp_path, limit_bytes=PLENTY).__enter__()
    with ChunkCache(tmp_path, limit_bytes=PLENTY):
        pass


def test_readers_never_see_an_eviction(tmp_path: Path) -> None:
    """Six threads read and write eight slots through a cache with room for three."""
    content = content_of(32)
    pieces = pieces_of(content)
    wrong: list[int] = []
    with ChunkCache(tmp_path, limit_bytes=3 * SLOT_BYTES, reserve_bytes=0) as cache:
        blob = opened(cache, content)

        def go(seed: int) -> None:
            order = random.Random(seed)
            for _ in range(250):
                number = order.randrange(32)
                found = blob.read(number)
                if found is None:
                    blob.write(number, pieces[number])
                elif found != pieces[number]:
                    wrong.append(number)

        threads = [threading.Thread(target=go, args=(seed,)) for seed in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong
        assert cache.counts.damaged == 0
        assert cache.counts.evicted_bytes > 0
        assert cache.used_bytes <= 3 * SLOT_BYTES


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("write"), st.integers(0, 10)),
        st.tuples(st.just("read"), st.integers(0, 10)),
        st.tuples(st.just("damage"), st.integers(0, 10 * CHUNK_BYTES)),
        st.tuples(st.just("again"), st.just(0)),
        st.tuples(st.just("evict"), st.integers(1, 3)),
    ),
    max_size=40,
)


@settings(max_examples=30, deadline=None)
@given(steps=STEPS)
def test_whatever_happens_a_chunk_is_right_or_not_here(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int]]
) -> None:
    content = content_of(10, tail=999)
    pieces = pieces_of(content)
    assert len(pieces) == chunk_count(len(content))
    root = tmp_path_factory.mktemp("cache")
    cache = ChunkCache(root, limit_bytes=2 * SLOT_BYTES, reserve_bytes=0).__enter__()
    try:
        for what, value in steps:
            blob = opened(cache, content)
            match what:
                case "write":
                    blob.write(value, pieces[value])
                case "read":
                    assert blob.read(value) in (None, pieces[value])
                case "damage":
                    os.pwrite(blob.fd, bytes(5000)[: len(content) - value], value)
                case "evict":
                    cache.evict(value * SLOT_BYTES)
                case _:
                    cache.__exit__(None, None, None)
                    cache = ChunkCache(root, limit_bytes=2 * SLOT_BYTES, reserve_bytes=0).__enter__()
        assert all(opened(cache, content).read(n) in (None, piece) for n, piece in enumerate(pieces))
    finally:
        cache.__exit__(None, None, None)
