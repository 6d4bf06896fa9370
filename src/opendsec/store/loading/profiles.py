"""What of a layer a start reads, written down once (`recording`) so that later starts have it before they ask.

    <store>/profiles/<hex of the layer>.json     beside the store, for all nodes; best effort

It says so twice: as parts of files, for whoever has the layer mounted (`starting`), and as chunks of its data, for
whoever serves it (`daemon`). A profile is advice: it is believed in nothing but what to read first, and whoever wrote
it can make a node read at most MOST_CHUNKS, in MOST_PARTS, of a layer it reads anyway.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import msgspec

from opendsec.errors import ImageInvalidError
from opendsec.model.image import Image, Layer
from opendsec.store.chunks import CHUNK_BYTES, chunk_count
from opendsec.store.loading.sources import StoreFiles, data_name
from opendsec.store.manifest import hex_of

SCHEMA = 1
BESIDE = (".pack", ".meta")
"""What lies beside a profile (`packs`), and goes with it."""
FOLDER = "profiles"
MOST_CHUNKS = 1024
"""64 MiB: what reads more than that does more than start."""
MOST_PARTS = 16_384
"""Of files."""
MOST_BYTES = 2 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRead:
    """Parts of one file that are read."""

    path: str
    """Relative to the layer's root; not believed to be one."""
    parts: tuple[tuple[int, int], ...]
    """Offset and length in bytes."""

    @property
    def size_bytes(self) -> int:
        """Of all parts."""
        return sum(length for _, length in self.parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """What is read of one layer, in the order in which it lies in the layer's data."""

    layer: str
    """Digest."""
    data: str
    """Digest of its data."""
    chunks: tuple[int, ...]
    recorded_at: float
    """Unix time, seconds."""
    reads: tuple[FileRead, ...] = ()
    """Empty in profiles of earlier versions."""
    command: str = ""
    """What was started, when it was recorded on purpose."""


class _Written(msgspec.Struct):
    schema: int
    layer: str
    data: str
    runs: list[tuple[int, int]]
    recorded_at: float
    command: str = ""
    reads: list[tuple[str, list[tuple[int, int]]]] = []


def profile_name(layer_digest: str) -> str:
    """Of the file, relative to the store."""
    return f"{FOLDER}/{hex_of(layer_digest)}.json"


def encode_profile(profile: Profile) -> bytes:
    """The bytes of the file."""
    runs: list[tuple[int, int]] = []
    for number in profile.chunks:
        if runs and runs[-1][0] + runs[-1][1] == number:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((number, 1))
    return msgspec.json.encode(
        _Written(
            schema=SCHEMA,
            layer=profile.layer,
            data=profile.data,
            runs=runs,
            recorded_at=profile.recorded_at,
            command=profile.command,
            reads=[(read.path, list(read.parts)) for read in profile.reads],
        )
    )


def decode_profile(content: bytes, layer: Layer) -> Profile | None:
    """The profile of that layer; None when the bytes are none, or of another one."""
    try:
        written = msgspec.json.decode(content, type=_Written)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    if (
        layer.data is None
        or written.schema != SCHEMA
        or (written.layer, written.data) != (layer.digest, layer.data.digest)
    ):
        return None
    chunks = tuple(_bounded(written.runs, chunk_count(layer.data.size_bytes)))
    return Profile(
        layer=layer.digest,
        data=layer.data.digest,
        chunks=chunks,
        recorded_at=written.recorded_at,
        command=written.command,
        reads=tuple(_bounded_reads(written.reads)),
    )


def _bounded_reads(reads: Iterable[tuple[str, list[tuple[int, int]]]]) -> Iterable[FileRead]:
    """No more bytes and parts than an honest one could have."""
    left_parts, left_bytes = MOST_PARTS, MOST_CHUNKS * CHUNK_BYTES
    for path, parts in reads:
        kept = []
        for offset, length in parts:
            if left_parts <= 0 or length > left_bytes:
                break
            if offset >= 0 and length > 0:
                kept.append((offset, length))
                left_parts, left_bytes = left_parts - 1, left_bytes - length
        if kept:
            yield FileRead(path=path, parts=tuple(kept))


def _bounded(runs: Iterable[tuple[int, int]], count: int) -> Sequence[int]:
    """Each chunk once, inside the blob, and no more than MOST_CHUNKS: whoever wrote the file is not believed.

    One that names chunks again and again is only followed for as long as an honest one could be.
    """
    named = (number for first, length in runs for number in range(max(first, 0), min(first + length, count)))
    return tuple(dict.fromkeys(islice(named, MOST_CHUNKS)))


def read_profile(files: StoreFiles, layer: Layer) -> Profile | None:
    """The layer's profile, if the store has a good one and answers."""
    if layer.data is None:
        return None
    try:
        content = files.read_whole(profile_name(layer.digest), most=MOST_BYTES)
    except OSError:
        return None
    return decode_profile(content, layer)


def forget_profiles(root: Path) -> int:
    """Remove the profiles of a directory store whose data is not there any more; how many."""
    forgotten = 0
    for path in (root / FOLDER).glob("*.json"):
        try:
            data = msgspec.json.decode(path.read_bytes(), type=_Written).data
            is_there = (root / data_name(data)).exists()
        except (FileNotFoundError, msgspec.DecodeError, UnicodeDecodeError, RecursionError, ImageInvalidError):
            is_there = False  # advice nobody can read is none
        if not is_there:
            path.unlink(missing_ok=True)
            forgotten += 1
    for beside in (one for suffix in BESIDE for one in (root / FOLDER).glob(f"*{suffix}")):
        if not beside.with_suffix(".json").exists():
            beside.unlink(missing_ok=True)
    return forgotten


def startup_bytes(files: StoreFiles, image: Image) -> int | None:
    """How much of an image a start reads, as recorded: all metadata, and the chunks in the profiles of its layers.

    None when no layer has a profile. Layers without one count with their metadata alone.
    """
    profiles = {layer.digest: read_profile(files, layer) for layer in image.layers}
    if not any(profiles.values()):
        return None
    total = sum(layer.mounted.size_bytes for layer in image.layers)
    for layer in image.layers:
        profile = profiles[layer.digest]
        if profile is not None and layer.data is not None:
            last = chunk_count(layer.data.size_bytes) - 1
            total += sum(
                CHUNK_BYTES if number != last else layer.data.size_bytes - last * CHUNK_BYTES
                for number in profile.chunks
            )
    return total
