"""A directory and every kind of archive of it become the same image; bad archives leave nothing."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import subprocess
import tarfile
from pathlib import Path

import pytest
from tests.node.store.importers.showing import imported, leftovers, shown
from tests.node.store.test_erofs import odd_tree
from tests.oci_layout import LayoutMaker, directory, file, make_layout, tar_of
from tests.tree_facts import difference, tree_of

from opendsec.errors import ConflictError, ImageInvalidError, InvalidSpecError, UnsupportedError
from opendsec.model.image import ImageConfig
from opendsec.store.images import ImageStore
from opendsec.store.importers import ImportRequest, import_image
from opendsec.store.importers.source import parse_source
from opendsec.store.progress import Progress

pytestmark = [pytest.mark.root, pytest.mark.erofs]


def by_tar(tree: Path, archive: Path, *options: str) -> Path:
    command = [
        "tar",
        "--format=pax",
        "--xattrs",
        "--xattrs-include=*",
        *options,
        "-C",
        str(tree),
        "-cf",
        str(archive),
        ".",
    ]
    subprocess.run(command, check=True, timeout=120)
    return archive


@pytest.mark.parametrize("compression", ["", "gzip", "zstd", "bzip2", "xz"])
def test_archive_and_directory_give_the_same_layer(store: ImageStore, disk: Path, compression: str) -> None:
    tree = odd_tree(disk / "tree")
    options = [f"--{compression}"] if compression else []
    direct = imported(store, "direct", str(tree))
    archived = imported(store, "archived", str(by_tar(tree, disk / "archive", *options)))
    assert archived.layers == direct.layers
    assert (direct.source, archived.source) == (f"dir:{tree}", f"archive:{disk / 'archive'}")


def test_gnu_format_with_long_names_and_holes(store: ImageStore, disk: Path) -> None:
    tree = disk / "tree"
    (tree / ("d" * 150)).mkdir(parents=True)
    (tree / ("d" * 150) / ("f" * 200)).write_text("x")
    with (tree / "sparse").open("wb") as sparse:
        for start in range(0, 40 << 20, 4 << 20):
            sparse.seek(start)
            sparse.write(b"island")
    os.utime(tree / "sparse", (7, 7))
    for path in (tree, tree / ("d" * 150), tree / ("d" * 150) / ("f" * 200)):
        os.utime(path, (8, 8))
    archive = by_tar(tree, disk / "archive", "--format=gnu", "--no-xattrs", "--sparse")
    assert archive.stat().st_size < 1 << 20
    assert imported(store, "a", str(archive)).layers == imported(store, "b", str(tree)).layers


def test_the_layer_shows_the_tree(store: ImageStore, disk: Path) -> None:
    tree = odd_tree(disk / "tree")
    image = imported(store, "x", str(by_tar(tree, disk / "archive.tar")))
    with shown(store, image.layers) as found:
        assert not difference(tree_of(found), tree_of(tree))


def test_whiteout_names_in_a_plain_archive_are_files(store: ImageStore, disk: Path) -> None:
    (disk / "a.tar").write_bytes(tar_of([directory("d"), file("d/.wh.x", b"x"), file("d/.wh..wh..opq", b"y")]))
    tree = disk / "tree"
    subprocess.run(["tar", "-xf", disk / "a.tar", "--one-top-level=" + str(tree)], check=True, timeout=120)
    os.utime(tree, (0, 0))
    assert imported(store, "a", str(disk / "a.tar")).layers == imported(store, "b", str(tree)).layers


def test_given_and_default_configuration(store: ImageStore, disk: Path) -> None:
    (disk / "tree").mkdir()
    config = ImageConfig(env={"A": "1 2", "B": ""}, workdir="/x y", user="u:g")
    assert imported(store, "given", str(disk / "tree"), config=config).config == config
    assert imported(store, "default", str(disk / "tree")).config == ImageConfig()


def test_an_oci_image_keeps_its_own_configuration(store: ImageStore, disk: Path) -> None:
    own = {
        "Env": ["PATH=/x:/y", 'Q=it\'s "q" = \\ $HOME\n', "EMPTY="],
        "WorkingDir": "/a b",
        "User": "1000:video",
        "Entrypoint": ["/e e"],
        "Cmd": ["", "c"],
        "Labels": {"k": "v"},
    }
    layout = make_layout(disk / "layout", [[file("f")]], config=own)
    image = imported(store, "x", str(layout))
    assert image.config == ImageConfig(
        env={"PATH": "/x:/y", "Q": 'it\'s "q" = \\ $HOME\n', "EMPTY": ""},
        workdir="/a b",
        user="1000:video",
        entrypoint=("/e e",),
        cmd=("", "c"),
        labels={"k": "v"},
    )
    with pytest.raises(UnsupportedError, match="brings its own"):
        imported(store, "y", f"oci:{layout}:latest", config=ImageConfig(user="root"))


def test_a_packed_layout_is_an_oci_image(store: ImageStore, disk: Path) -> None:
    layout = make_layout(disk / "layout", [[file("f", b"f")]], config={"User": "7"})
    archive = by_tar(layout, disk / "image.tar")
    assert imported(store, "packed", str(archive)).digest == imported(store, "loose", str(layout)).digest
    assert store.get("packed").config.user == "7"
    with pytest.raises(UnsupportedError, match="brings its own"):
        imported(store, "other", str(archive), config=ImageConfig(user="root"))


def test_layers_of_every_compression(store: ImageStore, disk: Path) -> None:
    tar = tar_of([directory("./"), file("f", b"f" * 100_000)])
    zstd = subprocess.run(["zstd", "-q"], input=tar, capture_output=True, check=True, timeout=120).stdout
    kind = "application/vnd.oci.image.layer.v1.tar"
    plain = imported(store, "plain", str(make_layout(disk / "plain", [[directory("./"), file("f", b"f" * 100_000)]])))
    for suffix, content in (("+gzip", gzip.compress(tar)), ("+zstd", zstd)):
        maker = LayoutMaker(disk / suffix)
        image = maker.image([tar])
        manifest = (maker.root / "blobs/sha256" / image["digest"][7:]).read_text()
        fields = json.loads(manifest) | {"layers": [maker.blob(content, kind + suffix)]}
        maker.index([maker.json(fields, image["mediaType"])])
        assert imported(store, suffix[1:], str(maker.root)).layers == plain.layers


def packed(content: bytes, how: str) -> bytes:
    match how:
        case "gzip":
            return gzip.compress(content)
        case "bzip2":
            return bz2.compress(content)
        case "xz":
            return lzma.compress(content)
        case "zstd":
            return subprocess.run(["zstd", "-q"], input=content, capture_output=True, check=True, timeout=120).stdout
        case _:
            return content


@pytest.mark.parametrize("how", ["", "gzip", "bzip2", "xz", "zstd"])
def test_every_cut_of_an_archive_is_noticed(store: ImageStore, disk: Path, how: str) -> None:
    whole = tar_of([directory("d"), file("d/first", os.urandom(3000)), file("second", os.urandom(5000))])
    content = packed(whole, how)
    end_mark = 512 * 20 if not how else 0
    for size in sorted({*range(0, len(content) - end_mark, 512), len(content) - end_mark - 1}):
        (disk / "cut.tar").write_bytes(content[:size])
        with pytest.raises(ImageInvalidError, match=r"cut\.tar is truncated or damaged"):
            imported(store, "x", str(disk / "cut.tar"))
    assert leftovers(store) == []
    assert list((store.root / "staging").iterdir()) == []


@pytest.mark.parametrize("start", [bytes(446) + b"\x80" + bytes(63) + b"\x55\xaa", b"QFI\xfb" + bytes(508)])
def test_a_disk_is_told_from_a_damaged_archive(store: ImageStore, disk: Path, start: bytes) -> None:
    (disk / "vm.img").write_bytes(start + bytes(65536))
    with pytest.raises(ImageInvalidError, match=r"vm\.img is no archive") as refused:
        imported(store, "x", str(disk / "vm.img"))
    assert "--disk" in refused.value.remedy
    assert leftovers(store) == []


def test_damage_in_the_middle_names_the_entry_before(store: ImageStore, disk: Path) -> None:
    content = bytearray(tar_of([file("first", b"1"), file("second", b"2"), file("third", b"3")]))
    content[content.index(b"second")] ^= 1
    (disk / "bad.tar").write_bytes(content)
    with pytest.raises(ImageInvalidError, match=r"bad\.tar is truncated or damaged after entry 'first'"):
        imported(store, "x", str(disk / "bad.tar"))


def test_what_is_no_archive(store: ImageStore, disk: Path) -> None:
    (disk / "text").write_text("no archive\n" * 1000)
    with pytest.raises(ImageInvalidError, match="at its beginning"):
        imported(store, "x", str(disk / "text"))


def test_traversal_names_the_entry_and_leaves_nothing(store: ImageStore, disk: Path) -> None:
    (disk / "evil.tar").write_bytes(tar_of([file("fine"), file("../../../var/tmp/opendsec-evil", b"x")]))
    with pytest.raises(ImageInvalidError, match=r"evil\.tar: entry '\.\./\.\./\.\./var/tmp/opendsec-evil'"):
        imported(store, "x", str(disk / "evil.tar"))
    assert not Path("/var/tmp/opendsec-evil").exists()
    assert leftovers(store) == []


def test_a_taken_name_is_a_conflict(store: ImageStore, disk: Path) -> None:
    for name in ("one", "two"):
        (disk / name).mkdir()
        (disk / name / name).touch()
    first = imported(store, "x", str(disk / "one"))
    with pytest.raises(ConflictError):
        imported(store, "x", str(disk / "two"))
    assert store.get("x") == first
    assert len(leftovers(store)) == len({"tag", "manifest", "blob", "names.json"})


def test_a_taken_name_is_a_conflict_before_any_layer_is_unpacked(store: ImageStore, disk: Path) -> None:
    first = imported(store, "x", str(make_layout(disk / "one", [[file("one")]])))
    assert imported(store, "x", str(disk / "one")) == first, "the same again is no conflict"
    other = make_layout(disk / "two", [[file("one")], [file("two")]])
    seen: list[Progress] = []
    with pytest.raises(ConflictError, match="'x' exists with other content"):
        import_image(store, ImportRequest(name="x", source=parse_source(str(other))), on_progress=seen.append)
    assert [step.phase for step in seen if "layer" in step.phase] == []
    assert store.get("x") == first
    request = ImportRequest(name="x", source=parse_source(str(other)), replace=True)
    assert import_image(store, request).digest != first.digest


def test_bad_configuration_is_refused_before_any_work(store: ImageStore, disk: Path) -> None:
    seen: list[Progress] = []
    for config in (ImageConfig(workdir="relative"), ImageConfig(env={"": "x"}), ImageConfig(env={"A=B": "x"})):
        request = ImportRequest(name="x", source=parse_source(str(disk)), config=config)
        with pytest.raises(InvalidSpecError):
            import_image(store, request, on_progress=seen.append)
    assert seen == []


def test_progress_names_its_phases(store: ImageStore, disk: Path) -> None:
    seen: list[Progress] = []
    layout = make_layout(disk / "layout", [[file("f", b"f" * 9000)], [file("g")]], compress=True)
    import_image(store, ImportRequest(name="x", source=parse_source(str(layout))), on_progress=seen.append)
    phases = list(dict.fromkeys(step.phase.split(" (")[0] for step in seen if "verifying" not in step.phase))
    assert phases == [
        "unpacking layer 1 of 2",
        "unpacking layer 2 of 2",
        "writing the layers",
        "publishing",
    ]
    assert all(step.total is None or 0 <= step.done <= step.total for step in seen)


def test_a_million_byte_header_is_refused(store: ImageStore, disk: Path) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        info = tarfile.TarInfo("f")
        info.pax_headers = {"comment": "x" * (2 << 20)}
        tar.addfile(info)
    (disk / "a.tar").write_bytes(buffer.getvalue())
    with pytest.raises(ImageInvalidError, match="extended header claims"):
        imported(store, "x", str(disk / "a.tar"))
