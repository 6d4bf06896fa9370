"""A pack gives back what was put into it, and nothing that it cannot hold."""

from __future__ import annotations

import random
import struct
import zlib
from dataclasses import replace
from pathlib import Path

import pytest

from opendsec.model.image import Blob, Layer
from opendsec.store.chunks import CHUNK_BYTES
from opendsec.store.loading.packs import (
    GROUP_BYTES,
    LEAST_METADATA_BYTES,
    chunks_of,
    decode_index,
    encode_metadata,
    encode_pack,
    groups,
    metadata_name,
    pack_name,
    read_group,
    read_head,
    read_metadata,
)
from opendsec.store.loading.sources import DirectoryFiles

HEX = "ab" * 32
LAYER = Layer(
    digest=f"sha256:{HEX}",
    size_bytes=0,
    meta=Blob(digest=f"sha256:{HEX}", size_bytes=1),
    data=Blob(digest=f"sha256:{HEX}", size_bytes=100 * CHUNK_BYTES),
)
CHUNKS = {
    n: random.Random(n).randbytes(CHUNK_BYTES // 2) + bytes(CHUNK_BYTES // 2) for n in (9, 3, 50, 4, 99, 0, 77, 60)
}


@pytest.fixture
def files(tmp_path: Path) -> DirectoryFiles:
    files = DirectoryFiles(tmp_path)
    files.write(pack_name(LAYER.digest), encode_pack(CHUNKS.items()))
    return files


def test_chunks_come_back_in_their_order_in_groups(files: DirectoryFiles) -> None:
    entries = decode_index(read_head(files, LAYER), LAYER)
    assert [entry.number for entry in entries] == list(CHUNKS)
    parts = groups(entries)
    assert len(parts) == 2
    assert all(sum(entry.size for entry in part) <= GROUP_BYTES for part in parts)
    found: dict[int, bytes] = {}
    for part in parts:
        found.update(chunks_of(part, read_group(files, LAYER.digest, part)))
    assert found == CHUNKS


def test_no_pack_is_no_chunks(tmp_path: Path) -> None:
    assert decode_index(read_head(DirectoryFiles(tmp_path), LAYER), LAYER) == ()


@pytest.mark.parametrize(
    "head",
    [
        b"",
        b"ODSPACK1",
        b"ODSPACK2" + struct.pack("<III", 1, 1, 1),
        b"ODSPACK1" + struct.pack("<III", 2, 1, 1),
        b"ODSPACK1" + struct.pack("<I", 1 << 31),
        b"ODSPACK1" + struct.pack("<III", 1, 100, 1),
        b"ODSPACK1" + struct.pack("<III", 1, 1, 1 << 20),
    ],
)
def test_what_cannot_be_is_nothing(head: bytes) -> None:
    assert decode_index(head, LAYER) == ()


def test_a_stream_is_never_more_than_a_chunk(files: DirectoryFiles) -> None:
    bomb = zlib.compress(bytes(50 * CHUNK_BYTES))
    content = b"ODSPACK1" + struct.pack("<III", 1, 1, len(bomb)) + bomb
    files.write(pack_name(LAYER.digest), content)
    (entry,) = decode_index(read_head(files, LAYER), LAYER)
    assert len(chunks_of([entry], read_group(files, LAYER.digest, [entry]))[1]) == CHUNK_BYTES
    files.write(pack_name(LAYER.digest), content[:-20] + b"\xff" * 20)
    (entry,) = decode_index(read_head(files, LAYER), LAYER)
    assert all(
        len(chunk) <= CHUNK_BYTES for chunk in chunks_of([entry], read_group(files, LAYER.digest, [entry])).values()
    )


def test_metadata_comes_back_or_is_none(tmp_path: Path) -> None:
    files = DirectoryFiles(tmp_path)
    content = random.Random(1).randbytes(1000) * (LEAST_METADATA_BYTES // 1000 + 1)
    layer = replace(LAYER, meta=Blob(digest=f"sha256:{HEX}", size_bytes=len(content)))
    assert read_metadata(files, layer) is None
    files.write(metadata_name(layer.digest), encode_metadata(content))
    assert read_metadata(files, layer) == content
    assert read_metadata(files, LAYER) is None, "not worth it"
    for stream in (b"", b"no stream", encode_metadata(content[:-1]), encode_metadata(content)[:-10]):
        files.write(metadata_name(layer.digest), stream)
        assert read_metadata(files, layer) is None
    files.write(metadata_name(layer.digest), encode_metadata(content + bytes(1 << 24)))
    found = read_metadata(files, layer)
    assert found is not None
    assert len(found) == len(content), "a bomb gives what fits"
