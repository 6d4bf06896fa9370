"""A microVM sandbox's files, process and errors: what its backend asks of them, each in a few lines."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import msgspec

from opendsec.backends.base import Handle
from opendsec.backends.container_rubbish import empty
from opendsec.backends.microvm_shape import Kept
from opendsec.errors import BackendUnavailableError, DiskFullError, OpenDSecError, SnapshotInvalidError, StartError
from opendsec.guest.base import GuestError, GuestLostError
from opendsec.model.ids import SandboxId
from opendsec.store.durable import FULL, NO_LINKS, disk_full_named, remove_tree

PLACE, BASE, PAUSED, SAVING, PACKED, KEPT = "vm", "base", "paused", ".saving", "packed", "vm.json"


def not_open() -> BackendUnavailableError:
    """The error of whoever asks before `open`."""
    return BackendUnavailableError("the microVM backend is not open")


def state_of(handle: Handle) -> Path:
    """Its state directory."""
    return Path(str(handle.data["state_dir"]))


def place_of(handle: Handle) -> Path:
    """Where its VMM lives."""
    return Path(str(handle.data["run_dir"])) / PLACE


def write_kept(directory: Path, kept: Kept) -> None:
    """Raises DiskFullError, OSError."""
    with disk_full_named(directory):
        (directory / KEPT).write_bytes(msgspec.json.encode(kept))


def read_kept(directory: Path) -> Kept:
    """Raises SnapshotInvalidError."""
    try:
        return msgspec.json.decode((directory / KEPT).read_bytes(), type=Kept)
    except (OSError, msgspec.DecodeError) as error:
        raise SnapshotInvalidError(f"{KEPT} cannot be read: {error}") from error


def fresh(directory: Path) -> None:
    """Make it anew, empty. Raises OSError, DiskFullError."""
    remove_tree(directory)
    with disk_full_named(directory.parent):
        directory.mkdir(mode=0o700)


def start_error(error: OSError | GuestError | GuestLostError, sandbox_id: SandboxId) -> OpenDSecError:
    """What a start that ended so tells its caller."""
    if isinstance(error, OSError):
        if error.errno in FULL:
            return DiskFullError(f"no room to start a sandbox: {error}", sandbox_id=sandbox_id)
        return StartError(f"the sandbox could not be prepared: {error}", sandbox_id=sandbox_id)
    return StartError(f"the sandbox's guest agent did not answer: {error}", sandbox_id=sandbox_id)


def link_files(source: Path, target: Path) -> bool:
    """Links to all files of a directory in another, an empty one. False: there are none to be had from one to the
    other, and the target is empty. Raises OSError (FileNotFoundError: some are gone).
    """
    for path in sorted(source.iterdir()):
        try:
            os.link(path, target / path.name)
        except OSError as error:
            if error.errno not in NO_LINKS and error.errno != errno.EXDEV:
                raise
            empty(target)
            return False
    return True
