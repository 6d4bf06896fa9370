"""What a build consists of, as data: stages with steps that make layers, and the configuration they end with. Pure.

A step's key says what its layer follows from: what lies below it, what is done, and the digest of what is put in. Steps
of the same key have the same result as far as anybody can tell, so the second need not be taken.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from opendsec.model.image import ImageConfig

KEY_VERSION = 2
"""Goes into every key: steps taken by another version of these rules are not believed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Run a program."""

    line: int
    text: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    user: str
    workdir: str
    network: bool
    unkeyed_env: Mapping[str, str] = field(default_factory=dict)
    """Variables that do not count for the key: those of proxies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inline:
    """A file whose content stands in the Dockerfile."""

    name: str
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """Put files in."""

    line: int
    text: str
    sources: tuple[str, ...]
    target: str
    """Absolute."""
    into_directory: bool
    """The target was written with a slash at its end, or must be a directory."""
    inline: tuple[Inline, ...] = ()
    from_stage: int | None = None
    from_image: str = ""
    owner: str = ""
    """As `--chown`: a user, or user:group, by name or number. Empty: root, or the owner in the other image."""
    mode: int | None = None
    unpack: bool = False
    """Archives of this machine are unpacked (ADD)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MakeDirectory:
    """WORKDIR makes its directory."""

    line: int
    text: str
    path: str
    owner: str = ""
    """Of what has to be made: the user at that place of the file."""


Step = Run | Copy | MakeDirectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """From one FROM to the next."""

    index: int
    name: str
    line: int
    base_image: str = ""
    """Name in the store; empty: nothing, or another stage."""
    base_stage: int | None = None
    steps: tuple[Step, ...] = ()
    config: ImageConfig = field(default_factory=ImageConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All of it, in the order in which it is done; the last stage is the image."""

    stages: tuple[Stage, ...]
    notes: tuple[str, ...] = ()
    """What the user should know: instructions without effect, arguments nobody used."""


def step_key(parent: str, step: Step, inputs: str) -> str:
    """Hex SHA-256. `parent`: key of the step below, or digest of the image; `inputs`: digest of what is copied in."""
    fields = {key: value for key, value in asdict(step).items() if key not in {"line", "text", "unkeyed_env"}}
    return _digest(["step", KEY_VERSION, parent, type(step).__name__, fields, inputs])


def _digest(value: object) -> str:
    text = json.dumps(value, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("ascii")).hexdigest()
