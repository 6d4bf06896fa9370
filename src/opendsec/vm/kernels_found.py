"""What all ways to a guest kernel share: what they find, and the programs they run."""

from __future__ import annotations

import lzma
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from opendsec.errors import HostCapabilityError, NodeError
from opendsec.store.programs import ENVIRONMENT, filtered, find_program, run_program
from opendsec.vm import kernel_image

Say = Callable[[str], None]
"""Gets a line about what is being done."""

DOWNLOAD_S: Final = 900.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A kernel about to be installed."""

    vmlinux: bytes
    source: str
    prefix: str
    """Its name is this and its release."""
    modules: tuple[tuple[str, bytes], ...] = ()
    """(file name, bytes) in the order they are loaded."""
    command_line_devices: bool = True


def vmlinux_of(content: bytes) -> bytes:
    """As `kernel_image.vmlinux_of`, with this machine's programs."""
    vmlinux = kernel_image.vmlinux_of(content, _decompress)
    kernel_image.check_vmlinux(vmlinux)
    return vmlinux


def _decompress(program: str, payload: bytes) -> bytes:
    with tempfile.TemporaryFile() as file:
        file.write(payload)
        file.seek(0)
        with filtered([find_program(program), "-dcq"], file.fileno()) as output:
            return output.read(kernel_image.MAX_VMLINUX)


def run(
    argv: list[str],
    *,
    what: str,
    timeout_s: float,
    remedy: str,
    environment: Mapping[str, str],
    cwd: Path | None = None,
) -> tuple[str, ...]:
    """A program to its end, and its last lines. Raises NodeError with them."""
    if cwd is not None:
        argv = [find_program("env"), f"--chdir={cwd}", *argv]
    ended = run_program(argv, timeout_s=timeout_s, environment=environment)
    if ended.status != 0:
        words = " ".join(ended.tail[-3:])
        raise NodeError(f"{what} failed (status {ended.status}): {words[-600:]}", remedy=remedy)
    return ended.tail


def uncompressed(name: str, content: bytes) -> bytes:
    """A module's bytes. Raises HostCapabilityError for a compression that is not known here."""
    if name.endswith(".ko"):
        return content
    if name.endswith(".ko.xz"):
        return lzma.decompress(content)
    if name.endswith(".ko.zst"):
        return _decompress("zstd", content)
    raise HostCapabilityError(f"the module {name} is compressed in a way that is not known")


def needs_programs(names: Mapping[str, str]) -> None:
    """HostCapabilityError that names every missing program's package: `names` are program → package."""
    missing = sorted(
        {package for name, package in names.items() if shutil.which(name, path=ENVIRONMENT["PATH"]) is None}
    )
    if missing:
        raise HostCapabilityError(
            f"programs of these Debian packages are missing: {', '.join(missing)}",
            detail={"packages": missing},
            remedy=f"apt-get install {' '.join(missing)}",
        )
