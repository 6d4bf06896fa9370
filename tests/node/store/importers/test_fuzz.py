"""Damaged archives end in an error of ours or in a tree inside the directory, never in anything else; and layers laid
over each other by the kernel show what the same layers written into one tree do, whatever is in them."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import random
import stat
import tarfile
from pathlib import Path

import pytest
from tests.node.store.importers.showing import imported, shown
from tests.node.store.importers.test_oci import BASE
from tests.oci_layout import Entry, directory, file, hardlink, make_layout, symlink, tar_of
from tests.tree_facts import difference, tree_of

from opendsec.errors import ImageError
from opendsec.store.durable import remove_tree
from opendsec.store.images import ImageStore
from opendsec.store.importers.limits import Limits
from opendsec.store.importers.tar import opened_archive
from opendsec.store.importers.unpack import TreeWriter

pytestmark = pytest.mark.root

ROUNDS = int(os.environ.get("OPENDSEC_TEST_FUZZ_ROUNDS", "100"))
LIMITS = Limits(max_total_bytes=1 << 22, max_file_bytes=1 << 21, max_entries=200)
NAMES = ("a", "a/b", "a/b/c", "l", "l/x", ".wh.a", "a/.wh..wh..opq", "a/.wh.b", "./", "l/../a", "/a", "b")


def unpack(content: bytes, tree: Path) -> None:
    archive_file = tree.parent / "archive"
    archive_file.write_bytes(content)
    writer = TreeWriter(tree, limits=LIMITS)
    for label in ("lower", "upper"):
        with (
            archive_file.open("rb") as source,
            opened_archive(source, label=label, limits=LIMITS) as archive,
            writer.layer(label),
        ):
            for member in archive.entries():
                writer.apply(archive, member)


def damaged(content: bytes, rng: random.Random) -> bytes:
    result = bytearray(content)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(result) or 1)
        match rng.randrange(3):
            case 0:
                result[at : at + 1] = bytes([rng.randrange(256)])
            case 1:
                del result[at : at + rng.randint(1, 700)]
            case _:
                result[at:at] = rng.randbytes(rng.randint(1, 600))
    return bytes(result)


def fixed_sums(content: bytes) -> bytes:
    """Header check sums made right again, so that the damage is believed."""
    result = bytearray(content)
    for at in range(0, len(result) - 511, 512):
        if result[at + 257 : at + 262] == b"ustar":
            result[at + 148 : at + 156] = b" " * 8
            result[at + 148 : at + 156] = b"%06o\0 " % sum(result[at : at + 512])
    return bytes(result)


def random_entries(rng: random.Random) -> list[Entry]:
    def one() -> Entry:
        name = rng.choice(NAMES)
        match rng.randrange(5):
            case 0:
                return directory(name)
            case 1:
                return file(name, rng.randbytes(rng.randrange(900)))
            case 2:
                return symlink(name, rng.choice(("a", "..", "/", "../../..", "l", "/etc", "a/b", "nowhere")))
            case 3:
                return hardlink(name, rng.choice(NAMES))
            case _:
                return Entry(name=name, kind=rng.choice((tarfile.FIFOTYPE, tarfile.CHRTYPE)), device=(1, 3))

    return [one() for _ in range(rng.randint(1, 12))]


@pytest.mark.parametrize("kind", ["bytes", "sums", "gzip", "entries"])
@pytest.mark.timeout(600)
def test_damage_never_surprises(disk: Path, kind: str) -> None:
    rng = random.Random(kind)
    (disk / "outside").write_text("outside")
    before = os.lstat(disk / "outside")
    base = tar_of(BASE)
    accepted = 0
    for _ in range(ROUNDS):
        match kind:
            case "bytes":
                content = damaged(base, rng)
            case "sums":
                content = fixed_sums(damaged(base, rng))
            case "gzip":
                content = damaged(gzip.compress(base), rng)
            case _:
                content = tar_of(random_entries(rng))
        try:
            unpack(content, disk / "tree")
            accepted += 1
        except ImageError:
            pass
        assert stat.S_ISDIR(os.lstat(disk / "tree").st_mode)
        remove_tree(disk / "tree")
        assert sorted(os.listdir(disk)) == ["archive", "outside"]
    assert os.lstat(disk / "outside") == before
    assert accepted > 0 or kind == "gzip"


LAYERED = ("a", "a/b", "a/b/c", "a/d", "l", "l/x", "b", "b/c", "b/d", "c", "/a", "./")
HIDING = (
    ".wh.a",
    ".wh.b",
    ".wh.l",
    "a/.wh.b",
    "a/.wh.c",
    "a/b/.wh.c",
    ".wh..wh..opq",
    "a/.wh..wh..opq",
    "l/.wh..wh..opq",
)


def layered_entry(rng: random.Random, files: list[str]) -> Entry:
    """Mostly entries that can be applied; `files` remembers names that links may lead to."""
    if rng.random() < 0.3:
        return file(rng.choice(HIDING))
    name, mtime = rng.choice(LAYERED), rng.randrange(1, 10**9)
    xattrs = {"user.x": b"%d" % mtime} if rng.random() < 0.3 else {}
    kind = rng.randrange(6)
    if kind == 0 or name == "./":
        return directory(
            name, mode=rng.choice((0o755, 0o700, 0o3777)), uid=rng.randrange(3), mtime=mtime, xattrs=xattrs
        )
    if kind == 1:
        return symlink(name, rng.choice(("a", "..", "/", "b", "a/b", "b/c")), mtime=mtime)
    if kind == 2 and files:
        return hardlink(name, rng.choice(files))
    if kind == 3:
        return Entry(name=name, kind=rng.choice((tarfile.FIFOTYPE, tarfile.CHRTYPE)), device=(1, 3), mtime=mtime)
    files.append(name)
    return file(name, rng.randbytes(rng.randrange(900)), mtime=mtime, mode=rng.choice((0o644, 0o4755)), xattrs=xattrs)


@pytest.mark.erofs
@pytest.mark.overlay
@pytest.mark.timeout(600)
def test_layers_apart_and_together_are_the_same_tree(store: ImageStore, disk: Path) -> None:
    rng = random.Random("layers")
    same = 0
    for number in range(ROUNDS // 4):
        files: list[str] = []
        layers = [[layered_entry(rng, files) for _ in range(rng.randint(1, 8))] for _ in range(rng.randint(2, 4))]
        layout = make_layout(disk / f"layout{number}", layers)
        found: list[dict[str, tuple[object, ...]] | str] = []
        for collapse_bytes in (0, 1 << 30):
            try:
                image = imported(store, "x", layout, collapse_bytes=collapse_bytes, replace=True)
                with shown(store, image.layers) as tree:
                    found.append(tree_of(tree))
            except ImageError as error:
                found.append(error.message)
        apart, together = found
        if isinstance(apart, str) or isinstance(together, str):
            assert apart == together
        else:
            assert not difference(apart, together), layers
            same += 1
    assert same > ROUNDS // 20


@pytest.mark.erofs
@pytest.mark.overlay
@pytest.mark.parametrize("kind", ["layout", "docker"])
@pytest.mark.timeout(600)
def test_damaged_images_are_refused_or_imported(store: ImageStore, disk: Path, kind: str) -> None:
    """Damage anywhere in a packed image, its descriptions too: an image, or an error of ours, and nothing left."""
    rng = random.Random(kind)
    entries = [[directory("d"), file("d/a", b"a" * 600)], [file("d/.wh.a"), file("d/b", b"b" * 600)]]
    if kind == "layout":
        layout = make_layout(disk / "layout", entries)
        files = {str(path.relative_to(layout)): path.read_bytes() for path in layout.rglob("*") if path.is_file()}
    else:
        files = docker_files([tar_of(one) for one in entries])
    for _ in range(ROUNDS // 4):
        broken = dict(files)
        name = rng.choice(sorted(files))
        broken[name] = damaged(broken[name], rng)
        content = tar_of([file(one, content) for one, content in broken.items()])
        (disk / "a.tar").write_bytes(fixed_sums(damaged(content, rng)) if rng.random() < 0.2 else content)
        try:
            imported(store, "x", f"{'oci' if kind == 'layout' else 'docker'}-archive:{disk / 'a.tar'}", replace=True)
        except ImageError:
            pass
        assert not list((store.root / "staging").iterdir())


def docker_files(tars: list[bytes]) -> dict[str, bytes]:
    """The files of an old archive of `docker save`."""
    diff_ids = [f"sha256:{hashlib.sha256(tar).hexdigest()}" for tar in tars]
    config = json.dumps({"os": "linux", "architecture": "amd64", "rootfs": {"diff_ids": diff_ids}}).encode()
    name = f"{hashlib.sha256(config).hexdigest()}.json"
    layers = {f"{number}/layer.tar": tar for number, tar in enumerate(tars)}
    manifest = [{"Config": name, "RepoTags": ["x:1"], "Layers": list(layers)}]
    return {"manifest.json": json.dumps(manifest).encode(), name: config, **layers}
