"""What is exported is, unpacked by another tool, just what a sandbox of the image sees; or the error names why not."""

from __future__ import annotations

import json
import os
import socket
import stat
import subprocess
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.node.store.test_erofs import odd_tree
from tests.tree_facts import difference, tree_of

from opendsec.errors import ConflictError, DigestMismatchError, ImageInvalidError, InvalidSpecError
from opendsec.linux.libc import umount2
from opendsec.model.image import Image, ImageConfig, LayerRole
from opendsec.store.exporters import export_image
from opendsec.store.exporters.compression import Compression
from opendsec.store.exporters.target import parse_target
from opendsec.store.images import ImageStore
from opendsec.store.importers import ImportRequest, import_image
from opendsec.store.importers.source import parse_source
from opendsec.store.layers import make_layer
from opendsec.store.loading.direct import DirectLoader
from opendsec.store.mounts import mount_erofs
from opendsec.store.progress import Progress

pytestmark = [pytest.mark.root, pytest.mark.erofs, pytest.mark.overlay]

CONFIG = ImageConfig(
    env={"PATH": "/bin", "EMPTY": "", "ODD": "a=b 'c' ü"},
    workdir="/work dir",
    user="1000:44",
    entrypoint=("/bin/sh", "-c"),
    cmd=("echo", ""),
    labels={"b": "2", "a": "1"},
)


@contextmanager
def overlay(target: Path, lower: Sequence[Path], *, upper: Path | None = None) -> Iterator[Path]:
    """Lower directories, topmost first, and a writable one on top."""
    target.mkdir(exist_ok=True)
    options = "lowerdir=" + ":".join(str(one) for one in lower)
    if upper is not None:
        work = upper.with_name(f"{upper.name}-work")
        for one in (upper, work):
            one.mkdir()
        options += f",upperdir={upper},workdir={work}"
    subprocess.run(["mount", "-t", "overlay", "overlay", "-o", options, str(target)], check=True, timeout=120)
    try:
        yield target
    finally:
        umount2(target, 0)


@contextmanager
def merged(store: ImageStore, image: Image, disk: Path) -> Iterator[Path]:
    """The image as a sandbox sees it."""
    places: list[Path] = []
    loader = DirectLoader(store, disk / "copies")
    try:
        for layer in reversed(image.layers):
            files = loader.attach(layer)
            place = disk / f"layer-{len(places)}"
            place.mkdir(exist_ok=True)
            mount_erofs(files.meta, place, data=files.data)
            places.append(place)
        (disk / "nothing").mkdir(exist_ok=True)
        with overlay(disk / "merged", [*places, disk / "nothing"]) as tree:
            yield tree
    finally:
        for place in places:
            umount2(place, 0)


def base_tree(root: Path) -> Path:
    """Something of every kind, and what the next layers change."""
    odd_tree(root)
    for name in ("gone", "emptied", "kept", "became-file"):
        (root / name / "below").mkdir(parents=True)
        (root / name / "file").write_text(name)
    (root / "became-dir").write_text("x")
    (root / "linked").write_text("one file, two names")
    os.link(root / "linked", root / "linked-again")
    return root


def changed(tree: Path) -> None:
    """What a sandbox might do to it, by the kernel's own overlay."""
    subprocess.run(["rm", "-r", tree / "gone", tree / "emptied"], check=True)
    (tree / "emptied").mkdir()
    (tree / "emptied" / "new").write_text("new")
    (tree / "kept" / "file").unlink()
    (tree / "kept").chmod(0o2755)
    subprocess.run(["rm", "-r", tree / "became-file"], check=True)
    (tree / "became-file").write_text("f")
    (tree / "became-dir").unlink()
    (tree / "became-dir").mkdir()
    (tree / "linked").write_text("copied up")
    (tree / "fresh").write_bytes(os.urandom(3 << 20))
    os.link(tree / "fresh", tree / "kept" / "fresh-again")
    os.mkfifo(tree / "kept" / "pipe")
    os.mknod(tree / "kept" / "tty", stat.S_IFCHR | 0o620, os.makedev(5, 0))
    os.setxattr(tree / "fresh", "security.capability", bytes.fromhex("0100000200200000000000000000000000000000"))
    os.setxattr(tree / "fresh", "user.note", b"\xff\0=\n")
    (tree / ("n" * 200) / ("m" * 120)).mkdir(parents=True)
    with open(os.fsencode(tree) + b"/not-text-\xff\xfe", "wb") as file:
        file.write(b"1")
    os.utime(tree / "kept" / "pipe", ns=(1, 1_234_567_890_987_654_321))
    os.utime(tree / "fresh", ns=(1, -2_500_000_000))


@pytest.fixture
def image(store: ImageStore, disk: Path) -> Image:
    """A base, and a workspace made by overlayfs itself."""
    with store.staging() as work:
        base = make_layer(store, work, base_tree(disk / "base"), name="base")
        with overlay(disk / "mnt", [disk / "base"], upper=disk / "upper") as tree:
            changed(tree)
        top = make_layer(store, work, disk / "upper", name="top", role=LayerRole.WORKSPACE)
        return store.publish("two/layers", layers=[base, top], config=CONFIG)


def by_umoci(layout: Path, ref: str, bundle: Path) -> Path:
    command = ["umoci", "unpack", "--image", f"{layout}:{ref}", str(bundle)]
    done = subprocess.run(command, check=False, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr.decode()
    return bundle / "rootfs"


def test_umoci_unpacks_what_a_sandbox_sees(store: ImageStore, image: Image, disk: Path) -> None:
    export_image(store, image.name, parse_target(f"oci:{disk / 'layout'}"))
    with merged(store, image, disk) as tree:
        ours = tree_of(tree)
    theirs = tree_of(by_umoci(disk / "layout", image.name, disk / "bundle"))
    assert not difference(ours, theirs)
    config = json.loads((disk / "bundle" / "config.json").read_bytes())["process"]
    assert config["cwd"] == "/work dir"
    assert config["args"] == ["/bin/sh", "-c", "echo", ""]


@pytest.mark.parametrize("target", ["oci:layout", "archive.tar", "docker-archive:docker.tar"])
@pytest.mark.parametrize("compression", list(Compression))
def test_imported_again_it_is_the_same(
    store: ImageStore, image: Image, disk: Path, target: str, compression: Compression
) -> None:
    kind, _, name = target.rpartition(":")
    place = parse_target(f"{kind}:{disk / name}" if kind else str(disk / name))
    export_image(store, image.name, place, compression=compression)
    again = import_image(store, ImportRequest(name="again", source=parse_source(str(place.path))))
    assert again.config == image.config
    assert [one.role for one in again.layers] == [one.role for one in image.layers]
    with merged(store, image, disk) as tree:
        before = tree_of(tree)
    with merged(store, again, disk) as tree:
        assert not difference(before, tree_of(tree))


@pytest.mark.parametrize("compression", list(Compression))
def test_the_same_bytes_every_time(store: ImageStore, image: Image, disk: Path, compression: Compression) -> None:
    results = [
        export_image(store, image.name, parse_target(str(disk / name)), compression=compression) for name in ("a", "b")
    ]
    assert (disk / "a").read_bytes() == (disk / "b").read_bytes()
    assert results[0] == results[1]


def test_skopeo_reads_every_form(store: ImageStore, image: Image, disk: Path) -> None:
    store.publish("plain", layers=image.layers, config=CONFIG)
    gzip, zstd, none = Compression
    for kind, compressions in (("oci", (zstd,)), ("oci-archive", (gzip, none)), ("docker-archive", (gzip, none))):
        for compression in compressions:
            where = f"{kind}:{disk / f'{kind}-{compression.value}'}"
            export_image(store, "plain", parse_target(where), compression=compression)
            shown = subprocess.run(
                ["skopeo", "inspect", "--config", where], check=True, capture_output=True, timeout=30
            )
            assert json.loads(shown.stdout)["config"]["Labels"] == {"a": "1", "b": "2"}
            copied = ["skopeo", "copy", "-q", where, f"dir:{disk / f'copy-{kind}-{compression.value}'}"]
            subprocess.run(copied, check=True, timeout=120)  # Checks every digest, diff_ids too.


def test_references_are_followed_and_roles_kept(store: ImageStore, image: Image, disk: Path) -> None:
    with store.staging() as work:
        tool = make_layer(store, work, odd_tree(disk / "tool"), role=LayerRole.TOOLKIT)
        store.publish("tool", layers=[tool], config=ImageConfig())
    store.publish("whole", layers=[], config=ImageConfig(env={"X": "1"}), base=image.name, toolkits=["tool"])
    exported = export_image(store, "whole", parse_target(f"oci:{disk / 'layout'}"))
    manifest = json.loads((disk / "layout" / "blobs" / "sha256" / exported.manifest.digest[7:]).read_bytes())
    roles = [layer["annotations"]["dev.opendsec.layer.role"] for layer in manifest["layers"]]
    assert roles == ["base", "workspace", "toolkit"]
    assert exported.image.config.env == {**CONFIG.env, "X": "1"}


def test_every_name_of_a_file_says_all_of_it(store: ImageStore, image: Image, disk: Path) -> None:
    """buildah sets mode, owner and time of a file again from the header of each hard link to it."""
    export_image(store, image.name, parse_target(str(disk / "archive")), compression=Compression.NONE)
    links = 0
    with tarfile.open(disk / "archive") as archive:
        layers = [one for one in archive.getmembers() if one.size > 1 << 20]
        for layer in layers:
            with tarfile.open(fileobj=archive.extractfile(layer), errors="surrogateescape") as tar:
                for link in [one for one in tar if one.islnk()]:
                    links += 1
                    first = tar.getmember(link.linkname)
                    same = ("mode", "uid", "gid", "mtime", "pax_headers")
                    assert [getattr(link, key) for key in same] == [getattr(first, key) for key in same]
    assert links >= 3


def one_layer(store: ImageStore, tree: Path) -> str:
    with store.staging() as work:
        layer = make_layer(store, work, tree)
        return store.publish("one", layers=[layer], config=ImageConfig(), replace=True).name


def refused(store: ImageStore, disk: Path, words: str) -> None:
    with pytest.raises(ImageInvalidError, match=words):
        export_image(store, one_layer(store, disk / "tree"), parse_target(str(disk / "archive")))
    assert not [path for path in disk.iterdir() if "archive" in path.name]


def test_a_file_that_looks_like_a_whiteout_is_refused(store: ImageStore, disk: Path) -> None:
    (disk / "tree" / "d").mkdir(parents=True)
    (disk / "tree" / "d" / ".wh.x").write_text("")
    refused(store, disk, r"layer 1 of 1: entry 'd/\.wh\.x'")


@pytest.mark.parametrize("attribute", ["redirect", "metacopy"])
def test_what_lies_elsewhere_is_refused(store: ImageStore, disk: Path, attribute: str) -> None:
    (disk / "tree" / "d").mkdir(parents=True)
    os.setxattr(disk / "tree" / "d", f"trusted.overlay.{attribute}", b"/x")
    refused(store, disk, f"entry 'd': trusted.overlay.{attribute}")


def test_a_configuration_that_is_no_text_is_refused(store: ImageStore, disk: Path) -> None:
    (disk / "tree").mkdir()
    with store.staging() as work:
        layer = make_layer(store, work, disk / "tree")
        store.publish("odd", layers=[layer], config=ImageConfig(env={"A": "\udcff"}))
    with pytest.raises(ImageInvalidError, match="no UTF-8"):
        export_image(store, "odd", parse_target(str(disk / "archive")))
    assert not [path for path in disk.iterdir() if "archive" in path.name]


def test_sockets_are_left_out_and_named(store: ImageStore, disk: Path) -> None:
    (disk / "tree").mkdir()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(disk / "tree" / "sock"))
    exported = export_image(store, one_layer(store, disk / "tree"), parse_target(str(disk / "archive")))
    assert exported.left_out == ("sock",)


def test_a_damaged_layer_is_not_exported(store: ImageStore, image: Image, disk: Path) -> None:
    data = image.layers[1].data
    assert data is not None
    path = store.data_path(data.digest)
    path.chmod(0o644)
    with path.open("r+b") as file:
        file.seek(data.size_bytes // 2)
        file.write(b"damage")
    with pytest.raises(DigestMismatchError, match="damaged in the store"):
        export_image(store, image.name, parse_target(str(disk / "archive")))
    assert not (disk / "archive").exists()
    assert not list(store.root.glob("staging/*"))


def test_a_target_that_is_there_is_not_overwritten(store: ImageStore, disk: Path) -> None:
    (disk / "tree").mkdir()
    name = one_layer(store, disk / "tree")
    (disk / "archive").write_text("mine")
    with pytest.raises(ConflictError, match="there already"):
        export_image(store, name, parse_target(str(disk / "archive")))
    assert (disk / "archive").read_text() == "mine"
    export_image(store, name, parse_target(str(disk / "archive")), replace=True)
    assert (disk / "archive").stat().st_size > 1000
    (disk / "layout").mkdir()
    with pytest.raises(ConflictError, match="there already"):
        export_image(store, name, parse_target(f"oci:{disk / 'layout'}"), replace=True)
    with pytest.raises(InvalidSpecError, match="not a directory"):
        export_image(store, name, parse_target(str(disk / "none" / "archive")))


def test_what_a_killed_export_left_goes_with_the_next(store: ImageStore, disk: Path) -> None:
    (disk / "tree").mkdir()
    name = one_layer(store, disk / "tree")
    (disk / ".layout.0badcafe.partial" / "blobs").mkdir(parents=True)
    (disk / ".other.0badcafe.partial").mkdir()
    export_image(store, name, parse_target(f"oci:{disk / 'layout'}"))
    assert sorted(path.name for path in disk.iterdir()) == [".other.0badcafe.partial", "layout", "store", "tree"]


def test_interrupted_it_leaves_nothing(store: ImageStore, image: Image, disk: Path) -> None:
    def stop(step: Progress) -> None:
        if step.done > 1 << 20:
            raise KeyboardInterrupt

    before = len(os.listdir("/proc/self/fd"))
    for compression in Compression:
        with pytest.raises(KeyboardInterrupt):
            export_image(
                store, image.name, parse_target(str(disk / "archive")), compression=compression, on_progress=stop
            )
        assert not [path for path in disk.iterdir() if "archive" in path.name]
        assert not list(store.root.glob("staging/*"))
    assert len(os.listdir("/proc/self/fd")) == before
