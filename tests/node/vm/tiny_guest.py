"""The freestanding guest of `tiny/`: built by gcc, spoken to over the real guest protocol."""

from __future__ import annotations

import subprocess
from pathlib import Path

from opendsec.guest.base import Exit, Guest, Output, StartCommand

SOURCES = Path(__file__).with_name("tiny")
_FLAGS = (
    *("-O2", "-Wall", "-Wextra", "-Werror", "-ffreestanding", "-fno-stack-protector", "-fno-pie", "-no-pie"),
    *("-mno-red-zone", "-mgeneral-regs-only", "-mcmodel=small", "-fno-asynchronous-unwind-tables", "-nostdlib"),
    *("-fno-tree-loop-distribute-patterns", "-static", "-Wl,--build-id=none,--no-warn-rwx-segments"),
)


def build(directory: Path) -> Path:
    """A kernel for machines of 64 MiB and more."""
    target = directory / "tiny"
    sources = [str(path) for path in sorted(SOURCES.glob("*.c"))]
    argv = ["gcc", *_FLAGS, "-T", str(SOURCES / "tiny.ld"), "-o", str(target), *sources]
    subprocess.run(argv, check=True, timeout=120)
    return target


async def run(guest: Guest, command_id: int, script: str) -> tuple[int | None, bytes]:
    """(exit code, output) of one of its commands."""
    await guest.start(command_id, StartCommand(script=script))
    output = b""
    async for event in guest.events(command_id):
        if isinstance(event, Output):
            output += event.data
        elif isinstance(event, Exit):
            guest.release(command_id)
            return event.exit_code, output
    raise AssertionError("events ended without an exit")
