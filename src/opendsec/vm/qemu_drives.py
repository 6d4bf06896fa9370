"""Many read-only files behind one virtio-mmio slot: a disk of partitions, each of which is one of the files. Pure.

QEMU's microvm machine has 8 slots without ACPI, and an image of a few layers, two files each, would use them up. Its
VMDK driver puts a disk together of flat extents, so the disk is: a partition table, the files one after the other as
they are, and the table's second copy. No byte of an image is copied, and all guests share the host's page cache of the
files. The guest finds a file by the name of its partition.
"""

from __future__ import annotations

import struct
import uuid
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

SECTOR = 512
HEAD_SECTORS = 2048
"""Before the first partition: table and alignment, 1 MiB."""
_TABLE_SECTORS, MAX_PARTITIONS = 32, 128
TAIL_SECTORS = _TABLE_SECTORS + 1
_ENTRY_BYTES = 128
_LINUX_DATA = uuid.UUID("0fc63daf-8483-4772-8e79-3d69d8477de4")
_NAMESPACE = uuid.UUID("f4a4c1c2-7a73-4dd0-8a58-6a2f5ff0c3d1")
"""Identifiers follow from names: the same files give the same table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One file of the disk."""

    name: str
    path: str
    size: int
    """Bytes; the last sector is filled up."""

    @property
    def sectors(self) -> int:
        return -(-self.size // SECTOR)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ends:
    """What lies before the files and after them."""

    head: bytes
    tail: bytes


def ends_of(parts: Sequence[Part]) -> Ends:
    """Both tables of a disk of these files, each filled up to a sector. Raises ValueError for more than 128."""
    if len(parts) > MAX_PARTITIONS:
        raise ValueError(f"{len(parts)} drives, at most {MAX_PARTITIONS}")
    last = HEAD_SECTORS + sum(part.sectors for part in parts) + TAIL_SECTORS - 1
    table = _table(parts)
    disk = uuid.uuid5(_NAMESPACE, "\n".join(part.name for part in parts)).bytes_le
    first_head = _header(disk, table, at=1, other=last, entries=2, last=last)
    second_head = _header(disk, table, at=last, other=1, entries=last - _TABLE_SECTORS, last=last)
    return Ends(
        head=(_protective_record(last) + first_head + table).ljust(HEAD_SECTORS * SECTOR, b"\0"),
        tail=table + second_head,
    )


def _table(parts: Sequence[Part]) -> bytes:
    entries = b""
    at = HEAD_SECTORS
    for part in parts:
        own = uuid.uuid5(_NAMESPACE, part.name).bytes_le
        name = part.name.encode("utf-16-le").ljust(72, b"\0")
        entries += _LINUX_DATA.bytes_le + own + struct.pack("<QQQ", at, at + part.sectors - 1, 0) + name
        at += part.sectors
    return entries.ljust(_TABLE_SECTORS * SECTOR, b"\0")


def _header(disk: bytes, table: bytes, *, at: int, other: int, entries: int, last: int) -> bytes:
    """UEFI specification, 5.3.2."""
    fields = struct.pack(
        "<8sIIIIQQQQ16sQIII",
        *(b"EFI PART", 0x10000, 92, 0, 0, at, other, HEAD_SECTORS, last - TAIL_SECTORS, disk),
        *(entries, MAX_PARTITIONS, _ENTRY_BYTES, zlib.crc32(table)),
    )
    return (fields[:16] + struct.pack("<I", zlib.crc32(fields)) + fields[20:]).ljust(SECTOR, b"\0")


def _protective_record(last: int) -> bytes:
    entry = struct.pack("<8BII", 0, 0, 2, 0, 0xEE, 0xFF, 0xFF, 0xFF, 1, min(last, 0xFFFFFFFF))
    return bytes(446) + entry + bytes(48) + b"\x55\xaa"


def description(parts: Sequence[Part], *, head: str, tail: str) -> str:
    """What QEMU reads of the disk of these files; `head` and `tail` are the files of its two ends.

    Raises ValueError for paths it cannot hold.
    """
    for path in (head, tail, *(part.path for part in parts)):
        if len(path.encode()) > 511 or '"' in path or "\n" in path:
            raise ValueError(f"{path!r} cannot be named in a disk's description")
    # No empty lines: QEMU's reader would take the extent after one twice.
    lines = ["# Disk DescriptorFile", "version=1", "CID=fffffffe", "parentCID=ffffffff"]
    lines += ['createType="twoGbMaxExtentFlat"', "# Extents", f'RW {HEAD_SECTORS} FLAT "{head}" 0']
    lines += [f'RW {part.sectors} FLAT "{part.path}" 0' for part in parts]
    lines += [f'RW {TAIL_SECTORS} FLAT "{tail}" 0', "# Disk Data Base", 'ddb.adapterType = "ide"', ""]
    return "\n".join(lines)
