"""Layers of OCI images become exactly the tree umoci makes of them, or the error names layer and entry."""

from __future__ import annotations

import gzip
import json
import subprocess
import tarfile
from pathlib import Path

import pytest
from tests.node.store.importers.showing import imported, leftovers, shown
from tests.oci_layout import Entry, LayoutMaker, directory, file, hardlink, make_layout, symlink, tar_of
from tests.tree_facts import difference, tree_of

from opendsec.errors import DigestMismatchError, ImageInvalidError
from opendsec.store.images import ImageStore
from opendsec.store.importers.limits import Limits
from opendsec.store.importers.oci import Layout
from opendsec.store.importers.tree import unpack_tar
from opendsec.store.progress import quietly

pytestmark = [pytest.mark.root, pytest.mark.erofs, pytest.mark.overlay]

CAPABILITY = bytes.fromhex("0100000200200000000000000000000000000000")
"""cap_net_raw+ep as a version 2 security.capability attribute, NULs included."""

BASE = [
    directory("./"),
    directory("bin/", mode=0o755),
    file("bin/su", b"#!", mode=0o4755),
    file("bin/ping", b"\x7fELF", mode=0o755, xattrs={"security.capability": CAPABILITY}),
    directory("etc", mode=0o750, gid=42),
    file("etc/passwd", b"root:x:0:0\n", uid=1000, gid=1001, mtime=1_234_567_890.123456789),
    symlink("lib", "usr/lib"),
    directory("usr"),
    directory("usr/lib"),
    directory("dev"),
    directory("run"),
    file("usr/lib/one", b"1"),
    file("usr/lib/two", b"2" * 100_000),
    directory("data"),
    file("data/a", b"a", xattrs={"user.note": b"x=1\ny"}),
    file("data/b", b"b"),
    directory("data/sub"),
    file("data/sub/c", b"c"),
    hardlink("data/a-again", "data/a"),
    Entry(name="dev/null", kind=tarfile.CHRTYPE, device=(1, 3), mode=0o666),
    Entry(name="dev/disk", kind=tarfile.BLKTYPE, device=(8, 300), mode=0o660, gid=6),
    Entry(name="run/pipe", kind=tarfile.FIFOTYPE, mode=0o600),
    file("spaced name\n\té.txt", b"odd"),
    symlink("data/dangling", "/no/such/thing"),
]

CASES: dict[str, list[list[Entry]]] = {
    "base alone": [BASE],
    "whiteout of a file": [BASE, [file("data/.wh.a")]],
    "whiteout of a directory": [BASE, [file(".wh.data")]],
    "whiteout of nothing": [BASE, [file("data/.wh.none"), file("none/.wh.x")]],
    "whiteout, then the same name again": [BASE, [file(".wh.data"), directory("data"), file("data/new", b"n")]],
    "opaque first": [BASE, [directory("data"), file("data/.wh..wh..opq"), file("data/new", b"n")]],
    "opaque last": [BASE, [directory("data"), file("data/new", b"n"), file("data/.wh..wh..opq")]],
    "opaque keeps deep new files": [
        BASE,
        # The last entry sets the directory's time, which umoci leaves to the clock.
        [file("data/sub/new", b"n"), file("data/.wh..wh..opq"), directory("data/sub")],
    ],
    "whiteout through a link": [BASE, [file("lib/.wh.one")]],
    "file through a link": [BASE, [file("lib/three", b"3")]],
    "directory becomes file": [BASE, [file("data", b"now a file")]],
    "file becomes directory": [BASE, [directory("bin/su"), file("bin/su/inside", b"i")]],
    "link becomes directory": [BASE, [directory("lib"), file("lib/own", b"o")]],
    "link becomes file": [BASE, [file("lib", b"f")]],
    "other mode and owner for a directory": [BASE, [directory("data", mode=0o1700, uid=7, gid=8, mtime=1.5)]],
    "attributes are replaced": [BASE, [file("data/a", b"a", xattrs={"user.other": b"2"})]],
    "new file breaks a hard link": [BASE, [file("data/a", b"changed")]],
    "hard link to a lower layer": [BASE, [hardlink("data/third", "data/a"), hardlink("lib/b-here", "data/b")]],
    "hard link whose target goes later": [BASE, [hardlink("kept", "data/b")], [file("data/.wh.b")]],
    "twice in one layer": [[directory("d"), file("d/f", b"1"), file("d/f", b"22", mode=0o600)]],
    "three layers over each other": [
        BASE,
        [file(".wh.data"), file("etc/new", b"n")],
        [directory("data"), file("data/z", b"z"), file("etc/.wh.new")],
    ],
    "root keeps its own mode": [[directory("./", mode=0o711, uid=5)], [file("x", b"x")]],
    "absolute and dotted names": [[directory("/a"), file("/a/./b", b"b"), file("./a//c", b"c")]],
    "long names": [[directory("d" * 200), file("d" * 200 + "/" + "f" * 250, b"x")]],
}


def by_umoci(layout: Path, bundle: Path) -> Path:
    command = ["umoci", "unpack", "--image", f"{layout}:latest", str(bundle)]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    return bundle / "rootfs"


@pytest.mark.parametrize("case", CASES)
def test_same_tree_as_umoci(store: ImageStore, disk: Path, case: str) -> None:
    """Whether each layer stays alone or all become one."""
    expected = tree_of(by_umoci(make_layout(disk / "layout", CASES[case]), disk / "umoci"))
    for compress, collapse_bytes, layers in ((True, 0, len(CASES[case])), (False, 1 << 30, 1)):
        layout = make_layout(disk / f"layout{compress}", CASES[case], compress=compress)
        image = imported(store, f"x{compress}", layout, collapse_bytes=collapse_bytes)
        assert len(image.layers) == layers
        with shown(store, image.layers) as tree:
            assert not difference(tree_of(tree), expected)


def test_parents_nobody_describes_do_not_depend_on_the_clock(store: ImageStore, disk: Path) -> None:
    image = imported(store, "x", make_layout(disk / "layout", [[file("a/b/c", b"c")]]))
    with shown(store, image.layers) as tree:
        found = tree_of(tree)
    for name in (".", "a", "a/b"):
        assert found[name][:3] == ("0o40755", (0, 0), 0)


def test_metadata_of_aufs_is_no_whiteout(store: ImageStore, disk: Path) -> None:
    layers = [[directory("d"), file("d/.wh..wh.plnk", b""), file("d/kept", b"k")], [file("d/.wh..wh.aufs", b"")]]
    image = imported(store, "x", make_layout(disk / "layout", layers))
    with shown(store, image.layers) as tree:
        assert sorted(path.name for path in (tree / "d").iterdir()) == ["kept"]


REFUSED: dict[str, tuple[list[list[Entry]], str]] = {
    "climbing out": ([[file("../../etc/passwd", b"x")]], "../../etc/passwd"),
    "climbing out in the middle": ([[file("a/../../b", b"x")]], "a/../../b"),
    "hard link that climbs": ([[hardlink("shadow", "../../../etc/shadow")]], "shadow"),
    "hard link to nothing": ([[hardlink("x", "gone")]], "x"),
    "hard link to a directory": ([[directory("d"), hardlink("x", "d")]], "x"),
    "links in a circle": ([[symlink("a", "b"), symlink("b", "a"), file("a/f", b"x")]], "a/f"),
    "whiteout of dots": ([[file("d/.wh...", b"")]], "d/.wh..."),
    "whiteout of nothing": ([[file("d/.wh.", b"")]], "d/.wh."),
    "root as a file": ([[file("./", b"x")]], "."),
    "overlay's own attributes": ([[file("f", b"", xattrs={"trusted.overlay.redirect": b"/etc"})]], "f"),
    "a whiteout of overlayfs": ([[Entry(name="d/w", kind=tarfile.CHRTYPE, device=(0, 0))]], "d/w"),
    "access list as text": ([[file("f", b"", headers={"SCHILY.acl.access": "user::rw-,user:7:r--"})]], "f"),
    "unknown type": ([[Entry(name="what", kind=b"Z")]], ""),
    "too long a name": ([[file("n" * 256, b"")]], "n" * 256),
    "owner beyond 32 bits": ([[file("f", b"", uid=1 << 40)]], "f"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_layer_and_entry(store: ImageStore, disk: Path, case: str) -> None:
    layers, entry = REFUSED[case]
    layout = make_layout(disk / "layout", [[file("before", b"")], *layers])
    for collapse_bytes in (0, 1 << 30):
        with pytest.raises(ImageInvalidError, match="layer 2 of 2") as caught:
            imported(store, "x", layout, collapse_bytes=collapse_bytes)
        assert entry in str(caught.value)
    assert leftovers(store) == []


@pytest.mark.parametrize("collapse_bytes", [0, 1 << 30])
def test_links_cannot_lead_out_of_the_tree(store: ImageStore, disk: Path, collapse_bytes: int) -> None:
    (disk / "outside").mkdir()
    layers = [
        [symlink("abs", str(disk / "outside")), symlink("up", "../../../outside"), directory("outside")],
        [file("abs/planted", b"x"), file("up/planted", b"y"), file("abs/.wh.keep"), hardlink("h", "up/planted")],
    ]
    (disk / "outside" / "keep").touch()
    image = imported(store, "x", make_layout(disk / "layout", layers), collapse_bytes=collapse_bytes)
    assert [path.name for path in (disk / "outside").iterdir()] == ["keep"]
    with shown(store, image.layers) as tree:
        assert (tree / "outside/planted").read_bytes() == b"y"
        assert (tree / str(disk).lstrip("/") / "outside/planted").read_bytes() == b"x"


@pytest.mark.parametrize("compress", [False, True], ids=["tar", "gzip"])
def test_every_cut_is_noticed(store: ImageStore, disk: Path, *, compress: bool) -> None:
    """Even with all digests made to fit, an archive that stops early is never taken for a short one."""
    whole = tar_of([directory("d"), file("d/f", b"f" * 3000), file("g", b"g")])
    packed = gzip.compress(whole) if compress else whole
    content = whole.rstrip(b"\0")
    for size in (0, 1, 100, 512, 1024, 1536, 3000, len(content) // 512 * 512, len(content)):
        cut = packed[: size * len(packed) // len(whole)] if compress else whole[:size]
        maker = LayoutMaker(disk / f"layout-{size}")
        descriptor = maker.image([whole])
        manifest = json.loads((maker.root / "blobs/sha256" / descriptor["digest"][7:]).read_text())
        manifest["layers"] = [maker.blob(cut, manifest["layers"][0]["mediaType"])]
        maker.index([maker.json(manifest, descriptor["mediaType"])])
        with pytest.raises((ImageInvalidError, DigestMismatchError), match="layer 1 of 1"):
            imported(store, "x", maker.root)
    assert leftovers(store) == []


def test_truncated_blob_names_the_layer(store: ImageStore, disk: Path) -> None:
    layout = make_layout(disk / "layout", [[file("a", b"a" * 5000)], [file("b", b"b")]])
    path = layout / Layout(layout, limits=Limits()).find().layers[0].name
    path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(ImageInvalidError, match=r"layer 1 of 2 .*truncated: 2000 of"):
        imported(store, "x", layout)


def test_changed_byte_is_a_digest_mismatch(store: ImageStore, disk: Path) -> None:
    layout = make_layout(disk / "layout", [[file("a", b"a" * 5000)]])
    path = layout / Layout(layout, limits=Limits()).find().layers[0].name
    content = bytearray(path.read_bytes())
    content[1000] ^= 1
    path.write_bytes(content)
    with pytest.raises(DigestMismatchError, match="layer 1 of 1"):
        imported(store, "x", layout)


def test_missing_blob_names_the_layer(store: ImageStore, disk: Path) -> None:
    layout = make_layout(disk / "layout", [[file("a", b"a")]])
    (layout / Layout(layout, limits=Limits()).find().layers[0].name).unlink()
    with pytest.raises(ImageInvalidError, match=r"layer 1 of 1 .* is missing"):
        imported(store, "x", layout)


def test_wrong_diff_id_is_a_digest_mismatch(store: ImageStore, disk: Path) -> None:
    maker = LayoutMaker(disk / "layout")
    descriptor = maker.image([tar_of([file("a", b"a")])])
    other = maker.image([tar_of([file("b", b"b")])])
    read = {
        d["digest"]: json.loads((maker.root / "blobs/sha256" / d["digest"][7:]).read_text())
        for d in (descriptor, other)
    }
    mixed = read[descriptor["digest"]] | {"layers": read[other["digest"]]["layers"]}
    maker.index([maker.json(mixed, descriptor["mediaType"])])
    with pytest.raises(DigestMismatchError, match="uncompressed"):
        imported(store, "x", maker.root)


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        (Limits(max_total_bytes=5000), "more than 5000 bytes"),
        (Limits(max_file_bytes=2000), "a file may have 2000"),
        (Limits(max_entries=2), "more than 2 entries"),
        (Limits(max_header_bytes=400), "extended header claims"),
    ],
)
def test_absurd_sizes_are_refused(store: ImageStore, disk: Path, limits: Limits, words: str) -> None:
    entries = [file("small", b"s"), file("large", b"l" * 3000), file("x", b"x" * 2500, xattrs={"user.a": b"a" * 500})]
    layout = make_layout(disk / "layout", [entries], compress=True)
    with pytest.raises(ImageInvalidError, match=words):
        imported(store, "x", layout, limits=limits)
    assert leftovers(store) == []


def test_holes_stay_holes_while_unpacking(disk: Path) -> None:
    source = disk / "sparse"
    with source.open("wb") as sparse:
        sparse.seek(50 << 20)
        sparse.write(b"end")
        sparse.truncate(60 << 20)
    command = ["tar", "--sparse", "--format=pax", "-C", str(disk), "-cf", str(disk / "layer.tar"), "sparse"]
    subprocess.run(command, check=True, timeout=120)
    unpack_tar(disk / "layer.tar", disk / "tree", limits=Limits(), on_progress=quietly)
    result = disk / "tree/sparse"
    assert result.stat().st_size == 60 << 20
    assert result.stat().st_blocks * 512 < 1 << 20
    subprocess.run(["cmp", source, result], check=True, timeout=120)
