"""The guest's first file system: a cpio archive with the guest agent as /init, and the kernel's modules if it has any.

The same input gives the same bytes. It holds no shell and no other program: what is not in the archive cannot be
started from it.
"""

from __future__ import annotations

import hashlib
import lzma
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from opendsec.store.durable import appearing, disk_full_named

_DIRECTORIES = ("dev", "proc", "sys")
_NODES = {"dev/console": (5, 1), "dev/null": (1, 3)}
"""The kernel opens the console for init before anything is mounted."""
_TRAILER = "TRAILER!!!"
_ALIGN = 4
_BLOCK = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One file of the archive."""

    name: str
    mode: int
    data: bytes = b""
    device: tuple[int, int] = (0, 0)


def archive(entries: Sequence[Entry]) -> Iterator[bytes]:
    """A cpio archive in the format the kernel unpacks (`newc`, Documentation/driver-api/early-userspace). Pure."""
    total = 0
    for number, entry in enumerate([*entries, Entry(name=_TRAILER, mode=0)], start=1):
        name = entry.name.encode() + b"\0"
        links = 2 if stat.S_ISDIR(entry.mode) else 1
        numbers = [number, entry.mode, 0, 0, links, 0, len(entry.data), 0, 0, *entry.device, len(name), 0]
        head = b"070701" + b"".join(b"%08X" % value for value in numbers) + name
        for part in (_padded(head, _ALIGN), _padded(entry.data, _ALIGN)):
            total += len(part)
            yield part
    yield bytes(-total % _BLOCK)


def _padded(data: bytes, size: int) -> bytes:
    return data + bytes(-len(data) % size)


def entries_of(agent: bytes, modules: Sequence[tuple[str, bytes]]) -> list[Entry]:
    """What the archive holds; `modules` are (name, bytes), each after those it needs. Pure.

    The agent loads /modules/NNN-NAME.ko in the order of their names.
    """
    entries = [Entry(name=name, mode=stat.S_IFDIR | 0o755) for name in _DIRECTORIES]
    entries += [Entry(name=name, mode=stat.S_IFCHR | 0o600, device=device) for name, device in _NODES.items()]
    entries.append(Entry(name="init", mode=stat.S_IFREG | 0o755, data=agent))
    if modules:
        entries.append(Entry(name="modules", mode=stat.S_IFDIR | 0o755))
    for number, (name, data) in enumerate(modules):
        entries.append(Entry(name=f"modules/{number:03}-{name}.ko", mode=stat.S_IFREG | 0o644, data=data))
    return entries


def write_initrd(directory: Path, *, agent: Path, modules: Sequence[Path] = ()) -> Path:
    """The archive of this agent and these modules below `directory`, made unless it is there.

    Modules may be compressed with xz (`.ko.xz`). Raises OSError, DiskFullError, lzma.LZMAError.
    """
    read = [(_module_name(path), _module_bytes(path)) for path in modules]
    content = b"".join(archive(entries_of(agent.read_bytes(), read)))
    target = directory / f"initrd-{hashlib.sha256(content).hexdigest()[:16]}.cpio"
    if not target.is_file():
        with disk_full_named(directory), appearing(target) as partial:
            partial.write_bytes(content)
            partial.chmod(0o444)
    return target


def _module_name(path: Path) -> str:
    return path.name.removesuffix(".xz").removesuffix(".ko")


def _module_bytes(path: Path) -> bytes:
    data = path.read_bytes()
    return lzma.decompress(data) if path.suffix == ".xz" else data
