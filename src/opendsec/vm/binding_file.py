"""What saved machines of all kinds have in common: a file of JSON that is written last, and the check of what it binds
them to.

A machine that goes on under another VMM, version, accelerator or processor would run wrong, not fail: so each
difference is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec

from opendsec.errors import SnapshotInvalidError
from opendsec.vm.base import Binding


class Bound(Protocol):
    """What such a file says at least."""

    @property
    def format(self) -> int: ...
    @property
    def vmm(self) -> str: ...
    @property
    def version(self) -> str: ...
    @property
    def accelerator(self) -> str: ...
    @property
    def cpu_model(self) -> str: ...


T = TypeVar("T", bound=Bound)


def write_last(directory: Path, name: str, saved: Bound) -> None:
    """The last file to be written: without it there is no saved machine."""
    partial = directory / f".{name}"
    partial.write_bytes(msgspec.json.encode(saved))
    partial.rename(directory / name)


def read_bound(directory: Path, name: str, kind: type[T], *, known: int) -> T:
    """What a saved machine says. Raises SnapshotInvalidError."""
    try:
        saved = msgspec.json.decode((directory / name).read_bytes(), type=kind)
    except (OSError, msgspec.DecodeError) as error:
        raise invalid(f"{name} cannot be read: {error}") from error
    if saved.format != known:
        raise invalid(f"it has format {saved.format}, this version reads {known}")
    return saved


def check_binding(saved: Bound, binding: Binding, more: Iterable[tuple[str, object, object]]) -> None:
    """`more`: what else may differ: its name, then and here. Raises SnapshotInvalidError naming what does."""
    wanted = (
        ("VMM", saved.vmm, binding.vmm),
        ("VMM version", saved.version, binding.version),
        ("accelerator", saved.accelerator, binding.accelerator.value),
        ("processor model", saved.cpu_model, binding.cpu_model),
        *more,
    )
    for what, had, have in wanted:
        if had != have:
            raise SnapshotInvalidError(
                f"the saved machine is bound to another {what}: it has {had!r}, here it is {have!r}",
                detail={"differs": what},
                remedy="start it on a node like the one it was saved on, or make it anew",
            )


def invalid(why: str) -> SnapshotInvalidError:
    """The error for what cannot be used whatever the node is like."""
    return SnapshotInvalidError(f"the saved machine cannot be used: {why}", remedy="make it anew")
