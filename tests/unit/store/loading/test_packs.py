"""A pack gives back what was put into it, and nothing that it cannot hold."""

from __future__ import annotations

import random
import struct
import zlib
from pathlib import Path

import pytest

from opendsec.model.image import Blob, Layer
from opendsec.store.chunks import CHUNK_BYTES
from opendsec.store.loading.packs import (
    GROUP_BYTES,
    decode_index,
    encode_pack,
    groups,
    pack_name,
    read_group,
    read_index,
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
    entries = read_index(files, LAYER)
    assert [entry.number for entry in entries] == list(CHUNKS)
    parts = groups(entries)
    assert len(parts) == 2
    assert all(sum(entry.size for entry in part) <= GROUP_BYTES for part in parts)
    found: dict[int, bytes] = {}
    for part in parts:
        found.update(read_group(files, LAYER.digest, part))
    assert found == CHUNKS


def test_no_pack_is_no_chunks(tmp_path: Path) -> None:
    assert read_index(DirectoryFiles(tmp_path), LAYER) == ()


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
    (entry,) = read_index(files, LAYER)
    assert len(read_group(files, LAYER.digest, [entry])[1]) == CHUNK_BYTES
    files.write(pack_name(LAYER.digest), content[:-20] + b"\xff" * 20)
    (entry,) = read_index(files, LAYER)
    assert all(len(chunk) <= CHUNK_BYTES for chunk in read_group(files, LAYER.digest, [entry]).values())
