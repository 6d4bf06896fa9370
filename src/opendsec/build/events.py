"""What a build tells while it goes on, and what comes out of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from opendsec.model.image import ImageConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBegun:
    """The next step; numbers count those of all stages that are needed, from 1."""

    number: int
    total: int
    stage: str
    line: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutput:
    """Bytes the step's program wrote."""

    number: int
    data: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDone:
    """How the step ended well."""

    number: int
    cached: bool
    seconds: float
    layer_bytes: int = 0
    """Of the layer it made; 0 when nothing changed, or it was not taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildNote:
    """Something to know."""

    text: str


BuildEvent = StepBegun | StepOutput | StepDone | BuildNote
OnEvent = Callable[[BuildEvent], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltImage:
    """What a build has made."""

    name: str
    digest: str
    config: ImageConfig
    steps: int
    """That make layers, of all stages that are needed."""
    cached: int
    """Of those, so many had been taken before."""
    notes: tuple[str, ...] = ()

    @property
    def reference(self) -> str:
        """`name@sha256:…`: this very image, for ever."""
        return f"{self.name}@{self.digest}"
