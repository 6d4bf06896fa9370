"""What a pack has is asked for once, kept as it came, and never believed."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.unit.store.loading.faulty import Answer, FaultyFiles, blob_of, honest

from opendsec.model.image import Blob, Layer
from opendsec.store.chunks import CHUNK_BYTES
from opendsec.store.loading.cache import ChunkCache
from opendsec.store.loading.engine import Engine
from opendsec.store.loading.fetch import ChunkSource
from opendsec.store.loading.packed import kept_pack, open_pack
from opendsec.store.loading.packs import encode_pack, pack_name
from opendsec.store.loading.reading import BlobReader
from opendsec.store.loading.sources import data_name

CONTENT = b"".join(random.Random(n).randbytes(4000) * 17 for n in range(60))
BLOB, TABLE = blob_of(CONTENT)
LAYER = Layer(
    digest=f"sha256:{'ab' * 32}", size_bytes=0, meta=Blob(digest=f"sha256:{'ab' * 32}", size_bytes=1), data=BLOB
)
IN_PACK = tuple(random.Random(3).sample(range(2, 40), 38))
"""In no order, or they would be read ahead of."""
PACK, DATA = pack_name(LAYER.digest), data_name(BLOB.digest)


def chunk(number: int) -> bytes:
    return CONTENT[number * CHUNK_BYTES : (number + 1) * CHUNK_BYTES]


def store() -> FaultyFiles:
    files = FaultyFiles(CONTENT)
    files.write(PACK, encode_pack((number, chunk(number)) for number in IN_PACK))
    return files


@contextmanager
def reader_of(
    root: Path, files: FaultyFiles, *, limit_bytes: int = 1 << 30, again: bool = False, must_keep: bool = False
) -> Iterator[BlobReader]:
    engine = Engine(ChunkSource(files, patience_s=4.5), patience_s=5.0)
    try:
        with ChunkCache(root, limit_bytes=limit_bytes, reserve_bytes=0) as cache:
            reader = BlobReader(
                engine, BLOB, TABLE, cache.open(BLOB, TABLE, evictable=not must_keep), must_keep=must_keep
            )
            where = None if must_keep else cache
            reader.packed = (
                kept_pack(engine.source, LAYER, TABLE, cache)
                if again
                else open_pack(engine.source, LAYER, TABLE, where)
            )
            files.reads.clear()
            yield reader
            engine.close()
            engine.demand.shutdown()
            engine.ahead.shutdown()
    finally:
        engine.close()


def read(reader: BlobReader, *numbers: int) -> None:
    """All at once, and each is right."""
    answers = []
    for number in numbers:
        answers.append((number, Answer()))
        reader.read(number * CHUNK_BYTES, len(chunk(number)), answers[-1][1])
    for number, answer in answers:
        assert answer.wait().content == chunk(number)


def asked(files: FaultyFiles, name: str) -> int:
    """Bytes."""
    return sum(size for one, _, size in files.reads if one == name)


def test_chunks_of_the_pack_come_from_there_once(tmp_path: Path) -> None:
    files = store()
    with reader_of(tmp_path, files) as reader:
        read(reader, *IN_PACK, *reversed(IN_PACK))
        assert asked(files, DATA) == 0
        assert asked(files, PACK) < len(files.files[PACK])
        assert reader.cached.present_bytes == 0, "kept compressed, and nothing else"
        assert reader.present_bytes == len(IN_PACK) * CHUNK_BYTES
        read(reader, 0, 41)
        assert asked(files, DATA) == 2 * CHUNK_BYTES
        assert reader.cached.cache.used_bytes < len(files.files[PACK]) + 4 * 4 * CHUNK_BYTES


def test_after_a_restart_nothing_is_asked_for_though_the_store_is_gone(tmp_path: Path) -> None:
    files = store()
    with reader_of(tmp_path, files) as reader:
        assert reader.packed is not None
        for one in reader.load_packed(reader.packed):
            one.result(60)
    files.files.clear()
    with reader_of(tmp_path, files, again=True) as reader:
        read(reader, *IN_PACK)
        assert files.reads == []


def test_a_pack_that_lies_costs_time_and_no_more(tmp_path: Path) -> None:
    """Streams of other chunks, noise, a file that is cut short, and then none at all."""
    right = store().files[PACK]
    other = encode_pack((number, chunk(number + 1)) for number in IN_PACK)
    noise = right[:400] + random.Random(5).randbytes(len(right) - 400)
    for number, wrong in enumerate((other, noise, right[: len(right) // 2], b"")):
        files = store()
        with reader_of(tmp_path / str(number), files) as reader:
            files.files[PACK] = wrong
            read(reader, *IN_PACK)
            read(reader, *IN_PACK)
            assert asked(files, PACK) <= len(right), "asked for once"
        with reader_of(tmp_path / str(number), files, again=True) as reader:
            read(reader, *IN_PACK)


def test_what_was_kept_and_is_damaged_or_gone_is_fetched_again(tmp_path: Path) -> None:
    files = store()
    with reader_of(tmp_path, files) as reader:
        read(reader, *IN_PACK)
    kept = tmp_path / f"{LAYER.digest[7:]}.pack"
    content = kept.read_bytes()
    kept.write_bytes(content[:1000] + bytes(5000) + content[6000:])
    with reader_of(tmp_path, files, again=True) as reader:
        read(reader, *IN_PACK)
        assert 0 < asked(files, PACK) < len(content)
        reader.cached.cache.evict(1 << 30)
        reader._engine._recent.clear()
        read(reader, *IN_PACK)
    kept.unlink(missing_ok=True)
    with reader_of(tmp_path, files, again=True) as reader:
        assert reader.packed is None
        read(reader, *IN_PACK)


def test_without_room_everything_is_served_all_the_same(tmp_path: Path) -> None:
    files = store()
    with reader_of(tmp_path, files, limit_bytes=0) as reader:
        read(reader, *IN_PACK)
        assert reader.present_bytes == 0
        began, go_on = threading.Event(), threading.Event()

        def slow(name: str, _offset: int, content: bytes) -> bytes:
            if name == PACK:
                began.set()
                go_on.wait(60)
            return content

        files.fault = slow
        reader._engine._recent.clear()
        assert reader.packed is not None
        loading = reader.load_packed(reader.packed, at_once=1)
        assert began.wait(60)
        answer = Answer()
        reader.read(IN_PACK[0] * CHUNK_BYTES, CHUNK_BYTES, answer)
        go_on.set()
        assert answer.wait().content == chunk(IN_PACK[0]), "who waits gets what was brought"
        files.fault = honest
        assert loading[0].exception(timeout=10) is not None, "there is no use in loading more"


def test_where_the_kernel_reads_the_file_chunks_are_written_there(tmp_path: Path) -> None:
    files = store()
    with reader_of(tmp_path, files, must_keep=True) as reader:
        read(reader, 5, 20)
        assert asked(files, DATA) == 0
        assert reader.cached.missing(5, 1) == []
        assert reader.present_bytes == reader.cached.present_bytes
    assert not list(tmp_path.glob("*.pack"))


def test_a_disk_that_takes_nothing_costs_nothing(tmp_path: Path) -> None:
    files = store()
    engine = Engine(ChunkSource(files, patience_s=4.5), patience_s=5.0)
    with ChunkCache(tmp_path / "cache", limit_bytes=1 << 30, reserve_bytes=0) as cache:
        (tmp_path / "cache" / f"{LAYER.digest[7:]}.pack").symlink_to(tmp_path)
        reader = BlobReader(engine, BLOB, TABLE, cache.open(BLOB, TABLE))
        reader.packed = open_pack(engine.source, LAYER, TABLE, cache)
        read(reader, *IN_PACK)
        assert asked(files, DATA) == 0
        engine.close()
        engine.demand.shutdown()
        engine.ahead.shutdown()
