"""A composed tree read from its layers is the tree the kernel's overlay shows, whiteouts and all."""

from __future__ import annotations

import base64
import os
import random
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from opendsec.errors import InvalidSpecError, NotFoundError
from opendsec.linux.libc import MS_RDONLY, mount, umount2
from opendsec.model.file import FileKind
from opendsec.model.image_view import TreeEntry
from opendsec.store.erofs import make_erofs
from opendsec.store.marks import OPAQUE
from opendsec.store.mounts import open_erofs
from opendsec.store.tree_view import ComposedTree, LayerTree

pytestmark = [pytest.mark.root, pytest.mark.erofs, pytest.mark.overlay]

NAMES = ("a", "b", "c", "d e", "\udcff")


def random_layer(root: Path, chance: random.Random, *, depth: int = 0) -> None:
    """A few names of a small set, so that layers meet: files, directories, links, devices, whiteouts, opaque ones."""
    root.mkdir()
    for name in NAMES:
        path = root / name
        match chance.choice(["none", "none", "file", "directory", "directory", "whiteout", "link", "device"]):
            case "file":
                path.write_text(f"{chance.random()}")
                path.chmod(chance.choice([0o644, 0o4755, 0o2600]))
                os.chown(path, chance.randrange(3), 70_000)
                if chance.random() < 0.3:
                    os.setxattr(path, "user.note", chance.randbytes(3))
            case "directory" if depth < 3:
                random_layer(path, chance, depth=depth + 1)
                path.chmod(chance.choice([0o755, 0o1777]))
                if chance.random() < 0.3:
                    os.setxattr(path, OPAQUE, b"y")
            case "whiteout":
                os.mknod(path, stat.S_IFCHR)
            case "link":
                path.symlink_to(chance.choice(["a", "../b", "nowhere"]))
            case "device":
                os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, chance.randrange(1, 4)))
            case _:
                pass


def seen_by_kernel(root: Path) -> dict[str, tuple[object, ...]]:
    """Every name below a mounted tree. Fails for a name that is shown and cannot be looked at."""
    found = {"/": _facts(root)}
    for directory, subdirectories, names in os.walk(root, onerror=_fail):
        for name in (*subdirectories, *names):
            path = Path(directory, name)
            found["/" + os.path.relpath(path, root)] = _facts(path)
    return found


def _fail(error: OSError) -> None:
    raise error


def _facts(path: Path) -> tuple[object, ...]:
    status = path.lstat()
    xattrs = {
        name: base64.b64encode(os.getxattr(path, name, follow_symlinks=False)).decode()
        for name in os.listxattr(path, follow_symlinks=False)
    }
    kind = stat.S_IFMT(status.st_mode)
    is_device = kind in (stat.S_IFCHR, stat.S_IFBLK)
    return (
        kind,
        stat.S_IMODE(status.st_mode),
        status.st_uid,
        status.st_gid,
        status.st_size if kind == stat.S_IFREG else 0,
        status.st_mtime_ns,
        os.readlink(path) if kind == stat.S_IFLNK else "",
        (os.major(status.st_rdev), os.minor(status.st_rdev)) if is_device else None,
        xattrs,
        path.read_bytes() if kind == stat.S_IFREG else b"",
    )


_FORMATS = {
    FileKind.FILE: stat.S_IFREG,
    FileKind.DIRECTORY: stat.S_IFDIR,
    FileKind.SYMLINK: stat.S_IFLNK,
    FileKind.CHAR_DEVICE: stat.S_IFCHR,
    FileKind.BLOCK_DEVICE: stat.S_IFBLK,
    FileKind.FIFO: stat.S_IFIFO,
    FileKind.SOCKET: stat.S_IFSOCK,
}


def seen_by_us(tree: ComposedTree) -> dict[str, tuple[object, ...]]:
    found = {}
    for node in tree.walk(tree.root()):
        entry = tree.entry(node)
        content = b""
        if entry.kind is FileKind.FILE:
            with os.fdopen(tree.open_file(node), "rb") as file:
                content = file.read()
        found[entry.path] = _told(entry, content)
    return found


def _told(entry: TreeEntry, content: bytes) -> tuple[object, ...]:
    return (
        _FORMATS[entry.kind],
        entry.mode,
        entry.uid,
        entry.gid,
        entry.size_bytes,
        entry.mtime_ns,
        entry.target,
        entry.device,
        dict(entry.xattrs),
        content,
    )


@contextmanager
def composed(*layers: Path) -> Iterator[ComposedTree]:
    """Directories as layers, highest first; each is made an EROFS layer, as a store would have it."""
    with ExitStack() as stack:
        trees = []
        for layer in layers:
            made = layer.with_name(f"{layer.name}.erofs")
            if not made.exists():
                make_erofs(made, layer)
            fd = open_erofs(made)
            stack.callback(os.close, fd)
            trees.append(LayerTree(digest=layer.name, fd=fd))
        yield ComposedTree(trees)


@contextmanager
def overlay(disk: Path, *layers: Path) -> Iterator[Path]:
    """The kernel's own view of them, with an empty writable layer as a sandbox has it."""
    with ExitStack() as stack:
        places = []
        for layer in layers:
            place = disk / f"at-{layer.name}"
            place.mkdir()
            mount(str(layer.with_name(f"{layer.name}.erofs")), str(place), "erofs", MS_RDONLY)
            stack.callback(umount2, str(place))
            places.append(place)
        upper, work, at = disk / "upper", disk / "overlay-work", disk / "at"
        for directory in (upper, work, at):
            directory.mkdir()
        lower = ":".join(str(place) for place in places)
        mount("overlay", str(at), "overlay", 0, f"lowerdir={lower},upperdir={upper},workdir={work}")
        stack.callback(umount2, str(at))
        yield at


@pytest.mark.parametrize("seed", range(8))
def test_every_stack_of_layers_is_what_the_kernel_shows(disk: Path, seed: int) -> None:
    chance = random.Random(seed)
    layers = [disk / f"layer{number}" for number in range(chance.choice([1, 2, 3, 5]))]
    for layer in layers:
        random_layer(layer, chance)
    with composed(*layers) as tree, overlay(disk, *layers) as at:
        expected = seen_by_kernel(at)
        found = seen_by_us(tree)
    expected["/"] = found["/"]  # the overlay's root is the writable layer's
    assert found == expected


def test_a_whiteout_over_nothing_leaves_no_ghost(disk: Path) -> None:
    """A workspace that removed a file of its base, over another base that never had the directory."""
    base, work = disk / "base", disk / "work"
    (base / "etc").mkdir(parents=True)
    (work / "lib").mkdir(parents=True)
    (work / "lib/kept").write_text("k")
    os.mknod(work / "lib/gone", stat.S_IFCHR)
    with composed(work, base) as tree, overlay(disk, work, base) as at:
        assert os.listdir(at / "lib") == ["kept"]
        assert [node.path for node in tree.children(tree.find("/lib"))] == [b"lib/kept"]


def test_paths_are_found_and_links_are_not_followed(disk: Path) -> None:
    low, high = disk / "low", disk / "high"
    (low / "usr/bin").mkdir(parents=True)
    (low / "usr/bin/sh").write_text("sh")
    (low / "bin").symlink_to("usr/bin")
    (high / "usr/bin").mkdir(parents=True)
    os.mknod(high / "usr/bin/sh", stat.S_IFCHR)
    with composed(low) as tree:
        assert tree.entry(tree.find("//usr/./bin/sh/")).path == "/usr/bin/sh"
        assert tree.entry(tree.find("/bin")).target == "usr/bin"
        assert [tree.entry(node).path for node in tree.walk(tree.root(), depth=1)] == ["/", "/bin", "/usr"]
        with pytest.raises(NotFoundError, match="'/bin' is a symbolic link to 'usr/bin'") as caught:
            tree.find("/bin/sh")
        assert caught.value.detail["target"] == "usr/bin"
        with pytest.raises(NotFoundError):
            tree.find("/usr/bin/sh/deeper")
        for bad in ("usr", "/usr/../etc", "/a\0b"):
            with pytest.raises(InvalidSpecError):
                tree.find(bad)
    with composed(high, low) as tree, pytest.raises(NotFoundError, match="no '/usr/bin/sh'"):
        tree.find("/usr/bin/sh")


def test_a_tree_deeper_than_a_path_may_be_long(disk: Path) -> None:
    fd = os.open(disk, os.O_RDONLY)
    os.mkdir("deep", dir_fd=fd)
    name = "n" * 200
    at = os.open("deep", os.O_RDONLY, dir_fd=fd)
    for _ in range(30):
        os.mkdir(name, dir_fd=at)
        at = _inside(at, name)
    os.close(os.open("leaf", os.O_CREAT | os.O_WRONLY, dir_fd=at))
    os.close(at)
    os.close(fd)
    tree = ComposedTree([LayerTree(digest="d", fd=(root := os.open(disk / "deep", os.O_PATH)))])
    try:
        *_, last = tree.walk(tree.root())
        entry = tree.entry(last)
        assert (len(entry.path), entry.path[-5:], entry.kind) == (30 * 201 + 5, "/leaf", FileKind.FILE)
        os.close(tree.open_file(last))
    finally:
        os.close(root)


def _inside(fd: int, name: str) -> int:
    following = os.open(name, os.O_RDONLY, dir_fd=fd)
    os.close(fd)
    return following


def test_reading_a_tree_leaves_no_descriptor_open(disk: Path) -> None:
    layer = disk / "layer"
    random_layer(layer, random.Random(5))
    with composed(layer) as tree:
        before = len(os.listdir("/proc/self/fd"))
        seen_by_us(tree)
        walk = tree.walk(tree.root())
        next(walk)
        next(walk)
        assert len(os.listdir("/proc/self/fd")) == before
