"""Images that mean harm, or are broken, end in an error that names what and where, quickly, and leave nothing."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import resource
import subprocess
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.node.store.importers.showing import imported, leftovers, shown
from tests.oci_layout import INDEX, LAYER, MANIFEST, Entry, LayoutMaker, directory, file, make_layout, symlink, tar_of

from opendsec.errors import DigestMismatchError, DiskFullError, ImageError, ImageInvalidError
from opendsec.store.images import ImageStore
from opendsec.store.importers.limits import Limits

pytestmark = [pytest.mark.root, pytest.mark.erofs, pytest.mark.overlay]

SMALL = Limits(free_bytes=4 << 20, max_ratio=100, max_padding_bytes=1 << 20)
END = 1024
"""Bytes of the end mark of an archive."""


def refused(store: ImageStore, source: object, words: str, **more: Any) -> ImageError:
    """Import, and get the error; nothing is left and it took no time."""
    before = time.monotonic()
    with pytest.raises((ImageInvalidError, DigestMismatchError), match=words) as caught:
        imported(store, "x", source, **more)
    assert time.monotonic() - before < 60
    assert (store.names(), leftovers(store)) == ([], [])
    assert not list((store.root / "staging").iterdir())
    return caught.value


def layout_of(disk: Path, blob: bytes, *, uncompressed_sha256: str, suffix: str = "") -> Path:
    """A layout with one good layer, and above it these very bytes with all digests right."""
    maker = LayoutMaker(disk / "layout")
    image = maker.image([tar_of([file("fine", b"f")])])
    manifest = maker.read(image)
    config = maker.read(manifest["config"])
    config["rootfs"]["diff_ids"].append(f"sha256:{uncompressed_sha256}")
    manifest["layers"].append(maker.blob(blob, LAYER + suffix))
    manifest["config"] = maker.json(config, manifest["config"]["mediaType"])
    maker.index([maker.json(manifest, MANIFEST)])
    return maker.root


def zeros(count: int, *, before: bytes = b"") -> tuple[bytes, str]:
    """gzip of `before` and so many zeros, and the digest of what is in it."""
    buffer, digest = io.BytesIO(), hashlib.sha256(before)
    with gzip.GzipFile(fileobj=buffer, mode="wb", compresslevel=1, mtime=0) as packed:
        packed.write(before)
        for _ in range(count >> 20):
            packed.write(bytes(1 << 20))
            digest.update(bytes(1 << 20))
    return buffer.getvalue(), digest.hexdigest()


def test_zeros_without_end(store: ImageStore, disk: Path) -> None:
    content = tar_of([file("before", b"b")])
    blob, digest = zeros(64 << 20, before=content)
    error = refused(
        store, layout_of(disk, blob, uncompressed_sha256=digest, suffix="+gzip"), "follow its end mark", limits=SMALL
    )
    assert "layer 2 of 2" in str(error)


def test_a_small_archive_that_is_large(store: ImageStore, disk: Path) -> None:
    info = tarfile.TarInfo("zeros")
    info.size = 64 << 20
    blob, digest = zeros(64 << 20, before=info.tobuf())
    layout = layout_of(disk, blob, uncompressed_sha256=digest, suffix="+gzip")
    error = refused(store, layout, "more than 100 times its size", limits=SMALL)
    assert (error.detail["entry"], "layer 2 of 2" in str(error)) == ("zeros", True)


def test_a_plain_archive_that_is_large(store: ImageStore, disk: Path) -> None:
    info = tarfile.TarInfo("zeros")
    info.size = 64 << 20
    (disk / "a.tar.gz").write_bytes(zeros(64 << 20, before=info.tobuf())[0])
    refused(store, disk / "a.tar.gz", r"a\.tar\.gz .*more than 100 times its size", limits=SMALL)
    packed = subprocess.run(
        ["zstd", "-q", "-19", "--long=27"],
        input=info.tobuf() + bytes(64 << 20),
        capture_output=True,
        check=True,
        timeout=60,
    )
    (disk / "a.tar.zst").write_bytes(packed.stdout)
    refused(store, disk / "a.tar.zst", r"a\.tar\.zst .*more than 100 times its size", limits=SMALL)


def test_a_hole_that_claims_petabytes(store: ImageStore, disk: Path) -> None:
    headers = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": str(1 << 50)}
    entry = file("hole", b"1\n0\n1\n" + bytes(506) + b"x", headers={**headers, "GNU.sparse.name": "hole"})
    refused(
        store,
        make_layout(disk / "layout", [[entry]]),
        "layer 1 of 1.* entry 'hole': 1125899906842624 bytes, a file may",
    )


@pytest.mark.parametrize("size", [1 << 62, (1 << 63) - 1, 1 << 100])
def test_a_size_beyond_all_measure(store: ImageStore, disk: Path, size: int) -> None:
    layout = make_layout(
        disk / "layout", [[file("fine"), file("vast", b"", headers={"size": str(size)}), file("after")]]
    )
    error = refused(store, layout, "layer 1 of 1")
    assert "vast" in str(error) or "fine" in str(error)


@pytest.mark.parametrize(
    "entry",
    [
        file("odd", headers={"mtime": "nan"}),
        file("odd", headers={"mtime": "9" * 5000 + ".5"}),
        file("odd", headers={"SCHILY.xattr.user.a\0b": "x"}),
        symlink("odd", "x", headers={"linkpath": "a\0b"}),
        file("odd", headers={"GNU.sparse.map": "1,2,x"}),
        file("odd", headers={"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": "x"}),
    ],
    ids=["no time", "a time without end", "attribute", "link", "map", "size"],
)
def test_values_that_are_none(store: ImageStore, disk: Path, entry: Entry) -> None:
    error = refused(store, make_layout(disk / "layout", [[file("fine"), entry]]), "layer 1 of 1")
    assert "odd" in str(error) or "fine" in str(error)


@pytest.mark.parametrize("collapse_bytes", [0, 1 << 30])
def test_depth_is_no_obstacle(store: ImageStore, disk: Path, collapse_bytes: int) -> None:
    """A whiteout beside what it would hide, as deep as paths go; it hides what is below, and nothing else."""
    deep = "/".join(["d"] * 1200)
    layout = make_layout(disk / "layout", [[file("d/below")], [directory(deep), file(".wh.d")]])
    image = imported(store, "x", layout, collapse_bytes=collapse_bytes)
    with shown(store, image.layers) as tree:
        assert (tree / deep).is_dir()
        assert not (tree / "d/below").exists()


def json_layout(disk: Path, content: bytes, place: str) -> Path:
    """A layout whose index, manifest or configuration are these bytes, with digests that fit."""
    maker = LayoutMaker(disk / "layout")
    image = maker.image([tar_of([file("f")])])
    if place == "index.json":
        maker.index([image])
        (maker.root / "index.json").write_bytes(content)
    elif place == "manifest":
        maker.index([maker.blob(content, MANIFEST)])
    else:
        manifest = maker.read(image)
        maker.index([maker.json(manifest | {"config": maker.blob(content, manifest["config"]["mediaType"])}, MANIFEST)])
    return maker.root


BOMBS: dict[str, Callable[[], bytes]] = {
    "deep": lambda: b"[" * 1_000_000,
    "deep objects": lambda: b'{"a":' * 500_000,
    "long": lambda: b"[" + b"[]," * 2_000_000 + b"[]]",
    "a number without end": lambda: b'{"schemaVersion": ' + b"9" * 1_000_000 + b"}",
    "gzip": lambda: gzip.compress(bytes(10_000_000)),
    "no text": lambda: b"\xff\xfe\0\0",
    "a list": lambda: b"[]",
    "a word": lambda: b'"x"',
    "not a number": lambda: b'{"layers": [{"size": NaN}], "manifests": [{"size": NaN}], "rootfs": {"diff_ids": [NaN]}}',
    "nothing": lambda: b"",
    "half a letter": lambda: b'{"layers": "\\ud800"}',
}


@pytest.mark.parametrize("place", ["index.json", "manifest", "config"])
@pytest.mark.parametrize("bomb", BOMBS)
def test_json_that_is_none(store: ImageStore, disk: Path, bomb: str, place: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refused(store, json_layout(disk, BOMBS[bomb](), place), "is not|has more than|none of sha256|no descriptor|no text")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 400 << 10


def test_ten_thousand_layers(store: ImageStore, disk: Path) -> None:
    maker = LayoutMaker(disk / "layout")
    image = maker.image([tar_of([file("f")])])
    manifest = maker.read(image)
    config = maker.read(manifest["config"])
    manifest["layers"] *= 10_000
    config["rootfs"]["diff_ids"] *= 10_000
    manifest["config"] = maker.json(config, manifest["config"]["mediaType"])
    maker.index([maker.json(manifest, MANIFEST)])
    refused(store, maker.root, "10000 layers, at most 500")


def test_indexes_in_a_circle(store: ImageStore, disk: Path) -> None:
    """A circle of digests cannot be made; one of claims can: an index that says it is another."""
    maker = LayoutMaker(disk / "layout")
    index = maker.json({"schemaVersion": 2, "mediaType": INDEX, "manifests": []}, INDEX)
    path = maker.root / "blobs/sha256" / index["digest"][7:]
    path.write_text(json.dumps({"schemaVersion": 2, "mediaType": INDEX, "manifests": [index]}))
    maker.index([{**index, "size": path.stat().st_size}])
    refused(store, maker.root, "do not have the size or digest")
    nested = maker.image([])
    for _ in range(30):
        nested = maker.json({"schemaVersion": 2, "mediaType": INDEX, "manifests": [nested]}, INDEX)
    maker.index([nested])
    refused(store, maker.root, "nested deeper")


def test_an_index_of_a_hundred_thousand(store: ImageStore, disk: Path) -> None:
    maker = LayoutMaker(disk / "layout")
    entry = {"mediaType": MANIFEST, "digest": f"sha256:{'0' * 64}", "size": 1}
    maker.index([{**entry, "digest": f"sha256:{number:064x}"} for number in range(20_000)])
    error = refused(store, maker.root, "several images fit")
    assert len(str(error)) < 3000


def place_of(layout: Path, what: str) -> Path:
    if what in ("index.json", "oci-layout"):
        return layout / what
    [image] = json.loads((layout / "index.json").read_text())["manifests"]
    manifest = json.loads((layout / "blobs/sha256" / image["digest"][7:]).read_text())
    blob = {"manifest": image, "config": manifest["config"], "layer": manifest["layers"][0]}[what]
    return layout / "blobs/sha256" / str(blob["digest"][7:])


@pytest.mark.parametrize("what", ["index.json", "oci-layout", "manifest", "config", "layer"])
@pytest.mark.parametrize("how", ["FIFO", "link out", "link in", "device", "directory", "gone", "cut", "changed"])
def test_files_that_are_no_files(store: ImageStore, disk: Path, what: str, how: str) -> None:
    layout = make_layout(disk / "layout", [[file("f", b"f" * 3000)]])
    path = place_of(layout, what)
    content = path.read_bytes()
    path.rename(disk / "elsewhere")
    match how:
        case "FIFO":
            os.mkfifo(path)
        case "link out":
            path.symlink_to(disk / "elsewhere")
        case "link in":
            (layout / "copy").write_bytes(content)
            path.symlink_to(os.path.relpath(layout / "copy", path.parent))
        case "device":
            os.mknod(path, 0o20666, os.makedev(1, 5))  # zeros without end
        case "directory":
            path.mkdir()
        case "cut":
            path.write_bytes(content[: len(content) // 2])
        case "changed":
            old, new = {"layer": (b"f", b"g"), "index.json": (b'"size": ', b'"size": 9')}.get(what, (b"1", b"2"))
            path.write_bytes(content.replace(old, new, 1))
        case _:
            assert how == "gone"
    words = {"gone": "is missing", "link out": "cannot be opened", "link in": "cannot be opened"}
    words |= dict.fromkeys(("FIFO", "device"), "is not a regular file")
    words["directory"] = "is not a regular file|cannot be opened"
    words |= dict.fromkeys(
        ("cut", "changed"), "is not JSON|size or digest|is truncated|nothing fits|is not|none of|version"
    )
    error = refused(store, f"oci:{layout}", words[how])
    assert what != "layer" or "layer 1 of 1" in str(error)


@pytest.mark.parametrize("part", ["blobs", "blobs/sha256"])
def test_directories_that_are_links(store: ImageStore, disk: Path, part: str) -> None:
    layout = make_layout(disk / "layout", [[file("f")]])
    (layout / part).rename(disk / "elsewhere")
    (layout / part).symlink_to(disk / "elsewhere")
    refused(store, layout, "cannot be opened|is missing")


def test_a_packed_layout_with_links(store: ImageStore, disk: Path) -> None:
    layout = make_layout(disk / "layout", [[file("f")]])
    secret = place_of(layout, "config")
    secret.rename(disk / "secret")
    secret.symlink_to(disk / "secret")
    subprocess.run(["tar", "-C", layout, "-cf", disk / "a.tar", "."], check=True, timeout=120)
    refused(store, disk / "a.tar", "cannot be opened")


TRAVERSALS: dict[str, list[Entry]] = {
    "dots": [file("../../../../../../var/tmp/opendsec-evil", b"x")],
    "dots below": [directory("d"), file("d/../../opendsec-evil", b"x")],
    "a dot link out": [symlink("l", "../../../../../../var/tmp"), file("l/../../../opendsec-evil", b"x")],
    "a hard link out": [Entry(name="h", kind=tarfile.LNKTYPE, link="../../../../etc/passwd")],
    "a NUL": [file("fine", b"x", headers={"path": "a\0b"})],
}


@pytest.mark.parametrize("case", TRAVERSALS)
@pytest.mark.parametrize("collapse_bytes", [0, 1 << 30])
def test_names_that_climb(store: ImageStore, disk: Path, case: str, collapse_bytes: int) -> None:
    layout = make_layout(disk / "layout", [[file("before")], TRAVERSALS[case]])
    error = refused(store, layout, "layer 2 of 2", collapse_bytes=collapse_bytes)
    assert error.detail["entry"]
    assert not Path("/var/tmp/opendsec-evil").exists()


def test_links_to_the_host_lead_into_the_image(store: ImageStore, disk: Path) -> None:
    """Across layers too, where the kernel shows the lower one."""
    (disk / "host").mkdir()
    layers = [
        [symlink("abs", str(disk / "host")), symlink("rel", "../../../../../.." + str(disk / "host"))],
        [file("abs/a", b"a"), file("rel/b", b"b"), file("abs/.wh.c"), directory("rel/d")],
    ]
    (disk / "host/c").touch()
    image = imported(store, "x", make_layout(disk / "layout", layers), collapse_bytes=0)
    assert os.listdir(disk / "host") == ["c"]
    with shown(store, image.layers) as tree:
        assert sorted(os.listdir(tree / str(disk / "host").lstrip("/"))) == ["a", "b", "d"]


def test_a_directory_with_what_overlays_would_act_on(store: ImageStore, disk: Path) -> None:
    (disk / "tree/d").mkdir(parents=True)
    os.mknod(disk / "tree/d/w", 0o20666, 0)
    refused(store, disk / "tree", "entry 'd/w': the character device 0:0")
    (disk / "tree/d/w").unlink()
    os.setxattr(disk / "tree/d", "trusted.overlay.opaque", b"y")
    refused(store, disk / "tree", "entry 'd': the attribute trusted.overlay.opaque is reserved")


def test_a_full_disk_is_named_and_left_as_it_was(disk: Path) -> None:
    image = disk / "small.img"
    image.write_bytes(b"")
    os.truncate(image, 24 << 20)
    subprocess.run(["mkfs.ext4", "-q", image], check=True, timeout=120)
    (disk / "small").mkdir()
    subprocess.run(["mount", "-o", "loop", image, disk / "small"], check=True, timeout=120)
    try:
        store = ImageStore(disk / "small/store")
        layers = [[file("f", os.urandom(4 << 20))], [file("g", os.urandom(20 << 20))]]
        with pytest.raises(DiskFullError):
            imported(store, "x", make_layout(disk / "layout", layers), collapse_bytes=0)
        assert leftovers(store) == []
        assert not list((store.root / "staging").iterdir())
        assert imported(store, "y", make_layout(disk / "fits", layers[:1])).layers
    finally:
        subprocess.run(["umount", disk / "small"], check=True, timeout=120)
