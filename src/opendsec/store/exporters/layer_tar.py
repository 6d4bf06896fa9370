"""One layer of the store as the bytes of one OCI layer: a tar archive, made while it is read, never lying anywhere.

What the overlay file system says by special files is said the way the OCI image specification does: a whiteout
(character device 0:0) becomes an empty file `.wh.NAME`, an opaque directory gets `.wh..wh..opq`. Attributes overlayfs
keeps for itself are left out. Everything else is kept: owners by number, modes with set-id bits, times to the
nanosecond, hard links, devices, FIFOs, capabilities and other attributes, names of any length and any bytes.

The same layer gives the same bytes: entries in the order of their names' bytes, each directory before what is in it.

It refuses what an OCI layer cannot say (a file called `.wh.…`, a directory renamed inside the overlay, a file whose
bytes lie in another layer); sockets, which mean nothing without their process, are left out and named.
"""

from __future__ import annotations

import os
import stat
import tarfile
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field

from opendsec.errors import ImageInvalidError
from opendsec.store import marks

WHITEOUT = ".wh."
OPAQUE = ".wh..wh..opq"

_XATTR = "SCHILY.xattr."
_READ_BYTES = 1 << 20

OnLeftOut = Callable[[str], None]
"""Called with the path of a socket."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Node:
    """One entry of a layer: where it is and what lstat(2) and listxattr(2) say."""

    path: str
    status: os.stat_result
    xattrs: dict[str, bytes]
    where: str
    """A path to it by descriptor, good while the walk stands at it."""


@dataclass(slots=True)
class _Level:
    """A directory the walk is in."""

    fd: int
    path: str
    names: list[str] = field(default_factory=list)
    """Still to come, the next one last."""


def layer_tar(root_fd: int, *, on_left_out: OnLeftOut) -> Generator[bytes, None, None]:
    """The archive of the tree below an open directory, in pieces of at most about 1 MiB, its end mark included.

    Raises ImageInvalidError naming the entry an OCI layer cannot hold, OSError when the tree cannot be read.
    """
    links: dict[int, str] = {}
    size = 0
    for node in _walk(root_fd):
        if stat.S_ISSOCK(node.status.st_mode):
            on_left_out(node.path)
            continue
        for piece in _entry(node, links):
            size += len(piece)
            yield piece
    end = 2 * tarfile.BLOCKSIZE
    yield bytes(end + -(size + end) % tarfile.RECORDSIZE)


def _walk(root_fd: int) -> Iterator[_Node]:
    """Every entry, the root first; iterative and by descriptor, so neither depth nor long paths stop it."""
    root = _open_directory(".", root_fd)
    levels = [_Level(fd=root, path="", names=_names(root))]
    try:
        yield _node(levels[0], "")
        while levels:
            here = levels[-1]
            if not here.names:
                os.close(levels.pop().fd)
                continue
            name = here.names.pop()
            node = _node(here, name)
            if stat.S_ISDIR(node.status.st_mode):
                below = _open_directory(name, here.fd)
                levels.append(_Level(fd=below, path=node.path, names=_names(below)))
            yield node
    finally:
        for level in levels:
            os.close(level.fd)


def _open_directory(name: str, parent_fd: int) -> int:
    return os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent_fd)


def _names(fd: int) -> list[str]:
    return sorted(os.listdir(fd), key=os.fsencode, reverse=True)


def _node(level: _Level, name: str) -> _Node:
    where = f"/proc/self/fd/{level.fd}/{name or '.'}"
    attributes = os.listxattr(where, follow_symlinks=False)
    return _Node(
        path=f"{level.path}/{name}" if level.path else name,
        status=os.lstat(where),
        xattrs={key: os.getxattr(where, key, follow_symlinks=False) for key in sorted(attributes)},
        where=where,
    )


def _entry(node: _Node, links: dict[int, str]) -> Iterator[bytes]:
    """The bytes of one entry, and of the mark of an opaque directory after it."""
    if node.path.rpartition("/")[2].startswith(WHITEOUT):
        raise _bad(node, f"an OCI layer takes a name that begins with {WHITEOUT!r} for a removed file")
    if _is_whiteout(node):
        yield _header(_mark(node, WHITEOUT))
        return
    _check(node)
    status = node.status
    if not stat.S_ISDIR(status.st_mode) and status.st_nlink > 1:
        first = links.setdefault(status.st_ino, node.path)
        if first != node.path:
            link = _info(node)  # With all of it: some readers set what the header of a link says.
            link.type, link.linkname, link.size = tarfile.LNKTYPE, first, 0
            link.devmajor = link.devminor = 0
            yield _header(link)
            return
    info = _info(node)
    yield _header(info)
    if info.isreg():
        yield from _content(node)
    if node.xattrs.get(marks.OPAQUE) == b"y":
        yield _header(_mark(node, OPAQUE))


def _is_whiteout(node: _Node) -> bool:
    """As overlayfs sees it: a character device 0:0, or (Linux 6.8) an empty file with an attribute that says so."""
    if marks.is_whiteout(node.status):
        return True
    return stat.S_ISREG(node.status.st_mode) and node.status.st_size == 0 and marks.WHITEOUT in node.xattrs


def _check(node: _Node) -> None:
    for key in marks.ELSEWHERE:
        if key in node.xattrs:
            raise _bad(node, f"{key}: what it shows lies elsewhere, which an OCI layer cannot say")
    for key in node.xattrs:
        if "=" in key or not _is_utf8(key):
            raise _bad(node, f"a tar archive cannot hold an attribute called {key!r}")


def _is_utf8(text: str) -> bool:
    return not any("\ud800" <= letter <= "\udfff" for letter in text)


def _info(node: _Node) -> tarfile.TarInfo:
    status = node.status
    info = tarfile.TarInfo(node.path or ".")
    info.mode = stat.S_IMODE(status.st_mode)
    info.uid, info.gid = status.st_uid, status.st_gid
    seconds, fraction = divmod(status.st_mtime_ns, 10**9)
    info.mtime = seconds
    kept = {key: value for key, value in node.xattrs.items() if not key.startswith(marks.PRIVATE)}
    info.pax_headers = {_XATTR + key: value.decode("utf-8", "surrogateescape") for key, value in kept.items()}
    if fraction:
        info.pax_headers["mtime"] = _decimal(status.st_mtime_ns)
    match stat.S_IFMT(status.st_mode):
        case stat.S_IFDIR:
            info.type = tarfile.DIRTYPE
        case stat.S_IFREG:
            info.type, info.size = tarfile.REGTYPE, status.st_size
        case stat.S_IFLNK:
            info.type, info.linkname = tarfile.SYMTYPE, os.readlink(node.where)  # noqa: PTH115  # A Path would tidy it.
        case stat.S_IFIFO:
            info.type = tarfile.FIFOTYPE
        case kind:
            info.type = tarfile.CHRTYPE if kind == stat.S_IFCHR else tarfile.BLKTYPE
            info.devmajor, info.devminor = os.major(status.st_rdev), os.minor(status.st_rdev)
    return info


def _decimal(nanoseconds: int) -> str:
    """Seconds as decimal text: a float would round."""
    whole, fraction = divmod(abs(nanoseconds), 10**9)
    return f"{'-' if nanoseconds < 0 else ''}{whole}.{fraction:09d}".rstrip("0")


def _mark(node: _Node, mark: str) -> tarfile.TarInfo:
    """An empty file that says something: what `node` stands for is gone, or what lies below it."""
    if mark == OPAQUE:
        path = f"{node.path}/{OPAQUE}" if node.path else OPAQUE
    else:
        directory, slash, name = node.path.rpartition("/")
        path = f"{directory}{slash}{WHITEOUT}{name}"
    info = tarfile.TarInfo(path)
    info.mode, info.mtime = 0, 0
    return info


def _header(info: tarfile.TarInfo) -> bytes:
    return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")


def _content(node: _Node) -> Iterator[bytes]:
    """As many bytes as the header says, then zeros up to a whole block."""
    left = node.status.st_size
    fd = os.open(node.where, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        while left:
            piece = os.read(fd, min(left, _READ_BYTES))
            if not piece:
                raise _bad(node, f"it ends {left} bytes too early")
            left -= len(piece)
            yield piece
    finally:
        os.close(fd)
    yield bytes(-node.status.st_size % tarfile.BLOCKSIZE)


def _bad(node: _Node, why: str) -> ImageInvalidError:
    return ImageInvalidError(f"entry {node.path!r}: {why}", detail={"entry": node.path})
