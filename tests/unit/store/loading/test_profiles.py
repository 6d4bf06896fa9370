"""Profiles are advice: kept as recorded, and believed in nothing else."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from tests.unit.store.loading.faulty import FaultyFiles

from opendsec.model.image import Blob, Image, ImageConfig, Layer
from opendsec.store.chunks import CHUNK_BYTES
from opendsec.store.loading.profiles import (
    MOST_CHUNKS,
    MOST_PARTS,
    FileRead,
    Profile,
    decode_profile,
    encode_profile,
    forget_profiles,
    profile_name,
    read_profile,
    startup_bytes,
)
from opendsec.store.loading.sources import data_name


def digest(letter: str) -> str:
    return f"sha256:{letter * 64}"


LAYER = Layer(
    digest=digest("a"),
    size_bytes=0,
    meta=Blob(digest=digest("b"), size_bytes=1000),
    data=Blob(digest=digest("c"), size_bytes=9 * CHUNK_BYTES + 5),
)
PROFILE = Profile(
    layer=LAYER.digest,
    data=digest("c"),
    chunks=(9, 2, 3, 4, 0),
    recorded_at=1.5,
    reads=(FileRead(path="usr/bin/é", parts=((0, 4096), (65_536, 8192))), FileRead(path="etc/x", parts=((0, 4096),))),
    command="python3 -c 'é'",
)


def test_a_profile_survives_the_file() -> None:
    assert decode_profile(encode_profile(PROFILE), LAYER) == PROFILE


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}",
        b"\xff",
        b"[" * 5000,
        b'{"x":' + b"[" * 5000,
        json.dumps({"schema": 2, "layer": LAYER.digest, "data": digest("c"), "runs": [], "recorded_at": 1}).encode(),
        json.dumps({"schema": 1, "layer": digest("d"), "data": digest("c"), "runs": [], "recorded_at": 1}).encode(),
        json.dumps({"schema": 1, "layer": LAYER.digest, "data": digest("c"), "runs": 7, "recorded_at": 1}).encode(),
    ],
)
def test_what_is_no_profile_of_the_layer_is_none(content: bytes) -> None:
    assert decode_profile(content, LAYER) is None


def test_runs_are_kept_within_the_blob_and_within_reason() -> None:
    large = Layer(digest=LAYER.digest, size_bytes=0, meta=LAYER.meta, data=Blob(digest=digest("c"), size_bytes=1 << 40))
    fields = {"schema": 1, "layer": LAYER.digest, "data": digest("c"), "recorded_at": 1}
    wild = json.dumps(fields | {"runs": [[-5, 7], [8, 1 << 60], [3, -9], [1, 1]]}).encode()
    small = decode_profile(wild, LAYER)
    assert small is not None
    assert small.chunks == (0, 1, 8, 9)
    whole = decode_profile(wild, large)
    assert whole is not None
    assert len(whole.chunks) == MOST_CHUNKS


def test_what_a_start_reads() -> None:
    files = FaultyFiles()
    image = Image(name="i", digest=digest("e"), layers=(LAYER,), config=ImageConfig(), created_at=0)
    assert startup_bytes(files, image) is None
    files.write(profile_name(LAYER.digest), encode_profile(PROFILE))
    assert read_profile(files, LAYER) == PROFILE
    assert startup_bytes(files, image) == 1000 + 4 * CHUNK_BYTES + 5


def test_profiles_of_data_that_is_gone_are_forgotten(tmp_path: Path) -> None:
    assert forget_profiles(tmp_path) == 0
    (tmp_path / "profiles").mkdir()
    (tmp_path / "data/sha256").mkdir(parents=True)
    mine = tmp_path / profile_name(LAYER.digest)
    mine.write_bytes(encode_profile(PROFILE))
    (tmp_path / "profiles/other.json").write_bytes(b"no profile")
    (tmp_path / data_name(digest("c"))).touch()
    assert forget_profiles(tmp_path) == 1
    assert mine.exists()
    mine.with_suffix(".pack").touch()
    mine.with_suffix(".meta").touch()
    (tmp_path / data_name(digest("c"))).unlink()
    assert forget_profiles(tmp_path) == 1
    assert list((tmp_path / "profiles").iterdir()) == []


def test_a_profile_that_names_the_same_chunks_again_and_again_costs_nothing() -> None:
    """It comes from the store, which may lie: 80000 times nine chunks, instead of nine."""
    content = json.loads(encode_profile(PROFILE)) | {"runs": [[0, 9]] * 80_000 + [[9, 1]]}
    begun = time.process_time()
    profile = decode_profile(json.dumps(content).encode(), LAYER)
    assert time.process_time() - begun < 0.3
    assert profile is not None
    assert profile.chunks == tuple(range(9))


def test_parts_of_files_are_kept_within_reason() -> None:
    def reads_of(*reads: object) -> tuple[FileRead, ...]:
        content = json.loads(encode_profile(PROFILE)) | {"reads": reads}
        profile = decode_profile(json.dumps(content).encode(), LAYER)
        assert profile is not None
        return profile.reads

    assert reads_of(["a", [[-1, 5], [0, 0], [0, -7]]], ["b", []], ["c", [[5, 6]]]) == (
        FileRead(path="c", parts=((5, 6),)),
    )
    assert sum(len(read.parts) for read in reads_of(*[["a", [[0, 1]] * 40]] * 1000)) == MOST_PARTS
    whole = MOST_CHUNKS * CHUNK_BYTES
    assert reads_of(["a", [[0, whole + 1]]], ["b", [[0, whole - 1]]], ["c", [[0, 1], [1, 1]]]) == (
        FileRead(path="b", parts=((0, whole - 1),)),
        FileRead(path="c", parts=((0, 1),)),
    )
    old = json.loads(encode_profile(PROFILE))
    del old["reads"]
    profile = decode_profile(json.dumps(old).encode(), LAYER)
    assert profile is not None
    assert profile.reads == ()
