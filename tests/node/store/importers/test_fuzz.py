"""Damaged archives end in an error of ours or in a tree inside the directory, never in anything else."""

from __future__ import annotations

import gzip
import os
import random
import stat
import tarfile
from pathlib import Path

import pytest
from tests.node.store.importers.test_oci import BASE
from tests.oci_layout import Entry, directory, file, hardlink, symlink, tar_of

from opendsec.errors import ImageError
from opendsec.store.durable import remove_tree
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
        at = rng.randrange(len(result))
        match rng.randrange(3):
            case 0:
                result[at] = rng.randrange(256)
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
