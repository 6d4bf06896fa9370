"""Which chunks of a layer a start reads, written down once so that later starts have them before they ask.

    <store>/profiles/<hex of the layer>.json     beside the store, for all nodes; best effort

A profile is advice: it is believed in nothing but which chunks to fetch first, and whoever wrote it can make a node
fetch at most MOST_CHUNKS of a layer it reads anyway.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
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
FOLDER = "profiles"
RECORD_S = 5.0
"""From the first read of a layer that has no profile."""
MOST_CHUNKS = 1024
"""64 MiB: what reads more than that does more than start."""
_MOST_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Chunks of one layer's data, in the order they were first read."""

    layer: str
    """Digest."""
    data: str
    """Digest of its data."""
    chunks: tuple[int, ...]
    recorded_at: float
    """Unix time, seconds."""
    command: str = ""
    """What was started, when it was recorded on purpose."""


class _Written(msgspec.Struct):
    schema: int
    layer: str
    data: str
    runs: list[tuple[int, int]]
    recorded_at: float
    command: str = ""


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
    )


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
        content = files.read_whole(profile_name(layer.digest), most=_MOST_BYTES)
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
            for beside in (path.with_suffix(".pack"), path):
                beside.unlink(missing_ok=True)
            forgotten += 1
    for pack in (root / FOLDER).glob("*.pack"):
        if not pack.with_suffix(".json").exists():
            pack.unlink(missing_ok=True)
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


class Recording:
    """What is read of one layer from the first read on, for RECORD_S or until it is told to end. Threads may share it.

    `done` gets the chunks once; not at all when nothing was read.
    """

    def __init__(
        self,
        done: Callable[[tuple[int, ...]], None],
        *,
        seconds: float = RECORD_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._done = done
        self._seconds = seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._seen: dict[int, None] = {}
        self._end = float("inf")
        self._is_over = False

    def saw(self, numbers: Sequence[int]) -> None:
        """The kernel asked for these chunks."""
        if self._is_over:
            return
        with self._lock:
            if not self._seen:
                self._end = self._clock() + self._seconds
            if len(self._seen) < MOST_CHUNKS:
                self._seen.update(dict.fromkeys(numbers))

    def tick(self) -> bool:
        """Called now and then: whether it is over."""
        if not self._is_over and self._clock() >= self._end:
            self.finish()
        return self._is_over

    def seen(self) -> tuple[int, ...]:
        """So far."""
        with self._lock:
            return tuple(self._seen)[:MOST_CHUNKS]

    def finish(self) -> None:
        """End it now."""
        with self._lock:
            if self._is_over:
                return
            self._is_over = True
        seen = self.seen()
        if seen:
            self._done(seen)
