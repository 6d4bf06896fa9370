"""A disk with an operating system of 512 bytes (`boot_sector.S`), and what its screen shows, pixel for pixel."""

from __future__ import annotations

import io
import subprocess
from pathlib import Path

from PIL import Image

SOURCE = Path(__file__).with_name("boot_sector.S")
RED, GREEN, BLUE, YELLOW, WHITE = (255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 0), (255, 255, 255)
DISK_BYTES = 1 << 20
"""A BIOS starts nothing from a disk of one sector."""


def make_boot_disk(path: Path) -> Path:
    """Assemble it. `path` is a new file."""
    compiled, linked = path.with_suffix(".o"), path.with_suffix(".bin")
    subprocess.run(["as", "--32", "-o", str(compiled), str(SOURCE)], check=True)
    subprocess.run(
        ["ld", "-m", "elf_i386", "-Ttext", "0x7c00", "--oformat", "binary", "-o", str(linked), str(compiled)],
        check=True,
    )
    sector = linked.read_bytes()
    assert len(sector) == 512
    with path.open("xb") as file:
        file.write(sector)
        file.truncate(DISK_BYTES)
    return path


def picture(*, keys: int = 0, corner: tuple[int, int, int] = GREEN) -> Image.Image:
    """The screen after so many keys: mode 13h, each of its pixels drawn as four."""
    made = Image.new("RGB", (320, 200), RED)
    made.paste(corner, (40, 20, 60, 40))
    made.paste(BLUE, (0, 100, 10 * keys, 110))
    return made.resize((640, 400), Image.Resampling.NEAREST)


def decoded(png: bytes) -> Image.Image:
    """A screenshot."""
    return Image.open(io.BytesIO(png)).convert("RGB")


def same(png: bytes, expected: Image.Image) -> bool:
    """Whether every pixel is as expected."""
    found = decoded(png)
    return found.size == expected.size and found.tobytes() == expected.tobytes()
