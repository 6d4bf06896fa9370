"""Kernel files: what they hold, and the one form guests are started from, a 64-bit ELF with a PVH note.

QEMU's microvm machine starts such a file by its note (without one it needs a bzImage and firmware); Firecracker by its
note from version 1.12 on, by its entry point before. Pure, but for the two programs that know zstd and lz4.
"""

from __future__ import annotations

import lzma
import re
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from opendsec.errors import ImageInvalidError

ELF: Final = b"\x7fELF\x02\x01"
"""64-bit, little-endian."""
_X86_64, _PT_LOAD, _PT_NOTE, _NOTE_PVH = 62, 1, 4, 18
_PAGE = 0x1000
_SETUP_MAGIC, _SETUP_AT, _PAYLOAD_AT = b"HdrS", 0x202, 0x248
_SECTOR = 512
MAX_VMLINUX: Final = 256 << 20
_RELEASE = re.compile(rb"Linux version ([0-9][^ \0\n]{0,80}) ")

Decompress = Callable[[str, bytes], bytes]
"""(`zstd` or `lz4`, compressed bytes): the bytes. Raises OSError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatKernel:
    """A kernel as libkrun carries it: bytes, where they lie in memory, and where they begin."""

    content: bytes
    address: int
    entry: int


def vmlinux_of(content: bytes, decompress: Decompress) -> bytes:
    """The ELF file in a vmlinux or bzImage. Raises ImageInvalidError."""
    if content.startswith(ELF):
        return content
    if content[_SETUP_AT : _SETUP_AT + 4] != _SETUP_MAGIC or len(content) < _PAYLOAD_AT + 8:
        raise ImageInvalidError("this is neither an ELF kernel (vmlinux) nor a bzImage (vmlinuz)")
    sectors = content[0x1F1] or 4
    offset, length = struct.unpack_from("<II", content, _PAYLOAD_AT)
    start = (sectors + 1) * _SECTOR + offset
    payload = content[start : start + length]
    if len(payload) != length or not length:
        raise ImageInvalidError("the bzImage is cut: its payload is not all there")
    try:
        vmlinux = _decompressed(payload, decompress)
    except (zlib.error, lzma.LZMAError, OSError, EOFError) as error:
        raise ImageInvalidError(f"the bzImage's payload cannot be decompressed: {error}") from error
    if not vmlinux.startswith(ELF):
        raise ImageInvalidError("the bzImage does not hold a 64-bit ELF kernel")
    return vmlinux


def _decompressed(payload: bytes, decompress: Decompress) -> bytes:
    match payload[:4]:
        case b"\x1f\x8b\x08\x00" | b"\x1f\x8b\x08\x08":
            return zlib.decompressobj(31).decompress(payload, MAX_VMLINUX)
        case b"\xfd7zX":
            return lzma.LZMADecompressor().decompress(payload, MAX_VMLINUX)
        case b"\x28\xb5\x2f\xfd":
            return _with_size("zstd", payload, decompress)
        case b"\x02\x21\x4c\x18":
            return _with_size("lz4", payload, decompress)
        case other:
            raise ImageInvalidError(f"the bzImage is compressed in a way that is not known ({other.hex()})")


def _with_size(program: str, payload: bytes, decompress: Decompress) -> bytes:
    """The kernel's build appends the size of what it has compressed."""
    content = decompress(program, payload[:-4])
    if len(content) != int.from_bytes(payload[-4:], "little"):
        raise ImageInvalidError("the bzImage's payload is cut or damaged")
    return content


def check_vmlinux(vmlinux: bytes) -> None:
    """Raises ImageInvalidError unless it is an executable for x86-64 with memory to load."""
    try:
        machine = struct.unpack_from("<H", vmlinux, 18)[0]
        segments = _segments(vmlinux)
        loads = [kind for kind, _, _ in segments if kind == _PT_LOAD]
    except (struct.error, OverflowError) as error:
        raise ImageInvalidError("the ELF kernel is cut") from error
    if any(offset + size > len(vmlinux) for _, offset, size in segments):
        raise ImageInvalidError("the ELF kernel is cut: not all of what it says it holds is there")
    if not vmlinux.startswith(ELF) or machine != _X86_64 or not loads:
        raise ImageInvalidError("not a kernel for x86-64")


def pvh_entry(vmlinux: bytes) -> int | None:
    """Where PVH starts it; None: it has no such note (CONFIG_PVH is not set)."""
    for kind, offset, size in _segments(vmlinux):
        if kind == _PT_NOTE and (entry := _pvh_note(vmlinux[offset : offset + size])) is not None:
            return entry
    return None


def _segments(vmlinux: bytes) -> list[tuple[int, int, int]]:
    """(type, offset, size in the file)."""
    at, size, count = struct.unpack_from("<Q", vmlinux, 32)[0], *struct.unpack_from("<HH", vmlinux, 54)
    found = []
    for number in range(count):
        kind, _, offset, _, _, length = struct.unpack_from("<IIQQQQ", vmlinux, at + number * size)
        found.append((kind, offset, length))
    return found


def _pvh_note(notes: bytes) -> int | None:
    at = 0
    while at + 12 <= len(notes):
        name_bytes, size, kind = struct.unpack_from("<III", notes, at)
        name = notes[at + 12 : at + 12 + name_bytes]
        start = at + 12 + (-(-name_bytes // 4) * 4)
        if name == b"Xen\0" and kind == _NOTE_PVH and size in (4, 8):
            return int.from_bytes(notes[start : start + size], "little")
        at = start + (-(-size // 4) * 4)
    return None


def wrapped(kernel: FlatKernel) -> bytes:
    """A flat kernel as an ELF file that QEMU and Firecracker start. Raises ImageInvalidError without its note."""
    entry = _find_note(kernel.content)
    note = struct.pack("<III", 4, 8, _NOTE_PVH) + b"Xen\0" + struct.pack("<Q", entry)
    size = len(kernel.content)
    header = ELF + b"\1" + bytes(9)
    header += struct.pack("<HHIQQQIHHHHHH", 2, _X86_64, 1, kernel.entry, 64, 0, 0, 64, 56, 2, 0, 0, 0)
    load = struct.pack("<IIQQQQQQ", _PT_LOAD, 7, _PAGE, kernel.address, kernel.address, size, size, _PAGE)
    notes = struct.pack("<IIQQQQQQ", _PT_NOTE, 4, _PAGE + size, 0, 0, len(note), len(note), 4)
    return (header + load + notes).ljust(_PAGE, b"\0") + kernel.content + note


def _find_note(content: bytes) -> int:
    """The note lies somewhere in the bytes: a flat kernel has no table of segments."""
    for match in re.finditer(rb"\x04\0\0\0[\x04\x08]\0\0\0\x12\0\0\0Xen\0", content):
        return int.from_bytes(content[match.end() : match.end() + 4], "little")
    raise ImageInvalidError("the kernel has no PVH note")


def release_of(vmlinux: bytes) -> str:
    """What uname -r will say. Raises ImageInvalidError."""
    found = _RELEASE.search(vmlinux)
    if found is None:
        raise ImageInvalidError("the kernel does not say its version")
    return found[1].decode("ascii", "replace")


def needs_of(module: bytes) -> tuple[str, ...]:
    """Names of the modules a module needs, from its .modinfo section."""
    found = re.search(rb"\0depends=([a-zA-Z0-9_,-]*)\0", module)
    return tuple(name.replace("-", "_") for name in found[1].decode().split(",") if name) if found else ()
