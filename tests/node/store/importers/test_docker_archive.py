"""What `docker save` wrote, old and new, is imported as the image it is; what only looks like it is an error."""

from __future__ import annotations

import hashlib
import json
import subprocess
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.node.store.importers.showing import imported, leftovers, shown
from tests.oci_layout import Entry, directory, file, hardlink, make_layout, symlink, tar_of

from opendsec.errors import DigestMismatchError, ImageInvalidError, UnsupportedError
from opendsec.model.image import ImageConfig
from opendsec.store.images import ImageStore

pytestmark = [pytest.mark.root, pytest.mark.erofs, pytest.mark.overlay]

LAYERS = [[directory("d"), file("d/a", b"a"), file("d/b", b"b")], [file("d/.wh.a"), file("d/c", b"c")]]


def config_of(tars: Sequence[bytes], **more: Any) -> bytes:
    diff_ids = [f"sha256:{hashlib.sha256(tar).hexdigest()}" for tar in tars]
    return json.dumps(
        {"os": "linux", "architecture": "amd64", "rootfs": {"diff_ids": diff_ids}, "config": {"User": "7"}, **more}
    ).encode()


def saved(
    path: Path, tars: Sequence[bytes], *, config: bytes | None = None, change: Mapping[str, Any] | None = None
) -> list[Entry]:
    """The entries of an old `docker save`, and the archive of them at `path`."""
    config = config_of(tars) if config is None else config
    name = f"{hashlib.sha256(config).hexdigest()}.json"
    entries = [file(name, config)]
    for number, tar in enumerate(tars):
        entries += [directory(f"id{number}"), file(f"id{number}/VERSION", b"1.0"), file(f"id{number}/layer.tar", tar)]
    layers = [f"id{number}/layer.tar" for number in range(len(tars))]
    described = {"Config": name, "RepoTags": ["host:5000/n:1"], "Layers": layers} | dict(change or {})
    entries += [file("manifest.json", json.dumps([described]).encode()), file("repositories", b"{}")]
    path.write_bytes(tar_of(entries))
    return entries


def by_skopeo(layout: Path, archive: Path, *names: str) -> Path:
    extra = [f"--additional-tag={name}" for name in names[1:]]
    target = f"docker-archive:{archive}:{names[0]}"
    subprocess.run(["skopeo", "copy", "-q", *extra, f"oci:{layout}:latest", target], check=True, timeout=120)
    return archive


def test_an_old_archive_is_the_image(store: ImageStore, disk: Path) -> None:
    saved(disk / "a.tar", [tar_of(one) for one in LAYERS])
    layout = make_layout(disk / "layout", LAYERS, config={"User": "7"})
    expected = imported(store, "layout", layout)
    assert imported(store, "x", disk / "a.tar").digest == expected.digest
    for number, ref in enumerate(("", ":n:1", ":host:5000/n:1")):
        assert imported(store, f"y{number}", f"docker-archive:{disk / 'a.tar'}{ref}").digest == expected.digest


def test_what_skopeo_writes_is_the_image(store: ImageStore, disk: Path) -> None:
    """Layers are names like <digest>.tar there, and layer.tar links to them."""
    layout = make_layout(disk / "layout", LAYERS, config={"User": "7"}, compress=True)
    archive = by_skopeo(layout, disk / "a.tar", "docker.io/library/x:1", "docker.io/library/x:2")
    assert imported(store, "a", archive).layers == imported(store, "layout", layout).layers
    assert imported(store, "b", f"docker-archive:{archive}:docker.io/library/x:2").config.user == "7"
    subprocess.run(["gzip", archive], check=True, timeout=120)
    assert imported(store, "c", f"{archive}.gz").digest == store.get("a").digest


def test_a_new_archive_is_read_as_the_layout_in_it(store: ImageStore, disk: Path) -> None:
    layout = make_layout(disk / "layout", LAYERS)
    index = json.loads((layout / "index.json").read_text())
    index["manifests"][0]["annotations"] = {
        "io.containerd.image.name": "docker.io/library/x:1",
        "org.opencontainers.image.ref.name": "1",
    }
    (layout / "index.json").write_text(json.dumps(index))
    (layout / "manifest.json").write_text("[]")
    subprocess.run(["tar", "-C", layout, "-cf", disk / "a.tar", "."], check=True, timeout=120)
    for number, ref in enumerate(("", ":1", ":docker.io/library/x:1")):
        assert imported(store, f"x{number}", f"docker-archive:{disk / 'a.tar'}{ref}").layers


def test_equal_layers_are_links_to_each_other(store: ImageStore, disk: Path) -> None:
    tars = [tar_of([file("a", b"a")])] * 2
    entries = saved(disk / "a.tar", tars)
    entries = [symlink(one.name, "../id0/layer.tar") if one.name == "id1/layer.tar" else one for one in entries]
    (disk / "a.tar").write_bytes(tar_of(entries))
    image = imported(store, "x", disk / "a.tar")
    with shown(store, image.layers) as tree:
        assert (tree / "a").read_bytes() == b"a"


def test_one_of_several_must_be_named(store: ImageStore, disk: Path) -> None:
    entries = saved(disk / "a.tar", [tar_of(LAYERS[0])])
    [described] = json.loads(next(one.content for one in entries if one.name == "manifest.json"))
    two = [described, described | {"RepoTags": ["other:2"]}]
    entries = [one for one in entries if one.name != "manifest.json"]
    (disk / "a.tar").write_bytes(tar_of([*entries, file("manifest.json", json.dumps(two).encode())]))
    with pytest.raises(ImageInvalidError, match="several images fit ''; it holds host:5000/n:1, other:2"):
        imported(store, "x", disk / "a.tar")
    with pytest.raises(ImageInvalidError, match="nothing fits 'gone'"):
        imported(store, "x", f"docker-archive:{disk / 'a.tar'}:gone")
    assert imported(store, "x", f"docker-archive:{disk / 'a.tar'}:other:2").layers


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"Layers": ["../../../etc/passwd"]}, "does not lie in the image"),
        ({"Layers": ["/etc/passwd"]}, "does not lie in the image"),
        ({"Layers": ["id0/../../../../etc/passwd"]}, "does not lie in the image"),
        ({"Layers": ["id0"]}, "is not a regular file"),
        ({"Layers": ["gone.tar"]}, "is missing"),
        ({"Layers": ["pipe"]}, "is not a regular file"),
        ({"Layers": ["out"]}, "does not lie in the image"),
        ({"Layers": ["up"]}, "does not lie in the image"),
        ({"Layers": ["circle"]}, "too many links"),
        ({"Layers": ["through/layer.tar"]}, "cannot be opened|is missing"),
        ({"Layers": ["a\0b"]}, "is missing"),
        ({"Layers": ["\ud800"]}, "is missing"),
        ({"Layers": "id0/layer.tar"}, "Layers is not a list"),
        ({"Layers": [1]}, "Layers is not a list"),
        ({"Layers": []}, "names 1 layers, the manifest 0"),
        ({"Layers": ["id0/layer.tar"] * 600}, "600 layers, at most 500"),
        ({"Config": 7}, "Config is not a name"),
        ({"Config": "../x.json"}, "does not lie in the image"),
        ({"Config": "id0/layer.tar"}, "the configuration"),
    ],
)
def test_names_that_lead_elsewhere(store: ImageStore, disk: Path, change: dict[str, Any], words: str) -> None:
    entries = [
        *saved(disk / "a.tar", [tar_of([file("a", b"a")])], change=change),
        Entry(name="pipe", kind=tarfile.FIFOTYPE),
        symlink("out", "/etc/passwd"),
        symlink("up", "../../../../../etc/passwd"),
        symlink("circle", "circle"),
        symlink("through", "/etc"),
    ]
    (disk / "a.tar").write_bytes(tar_of(entries))
    with pytest.raises(ImageInvalidError, match=words):
        imported(store, "x", f"docker-archive:{disk / 'a.tar'}")
    assert leftovers(store) == []


def test_bytes_that_are_not_what_was_said(store: ImageStore, disk: Path) -> None:
    tars = [tar_of([file("a", b"a")])]
    saved(disk / "layer.tar", tars, config=config_of([tar_of([file("b", b"b")])]))
    with pytest.raises(DigestMismatchError, match="layer 1 of 1"):
        imported(store, "x", disk / "layer.tar")
    saved(disk / "config.tar", tars, change={"Config": f"{'0' * 64}.json"})
    entries = saved(disk / "config.tar", tars, change={"Config": f"{'0' * 64}.json"})
    (disk / "config.tar").write_bytes(tar_of([*entries, file(f"{'0' * 64}.json", config_of(tars))]))
    with pytest.raises(DigestMismatchError, match="the configuration"):
        imported(store, "x", disk / "config.tar")
    saved(disk / "platform.tar", tars, config=config_of(tars, architecture="s390x"))
    with pytest.raises(ImageInvalidError, match="linux/s390x, wanted is linux/"):
        imported(store, "x", disk / "platform.tar")
    assert leftovers(store) == []


def test_a_file_system_with_such_a_file_is_one(store: ImageStore, disk: Path) -> None:
    for number, content in enumerate((b"{}", b"[]")):
        entries = [directory("usr"), file("manifest.json", content), hardlink("m", "manifest.json")]
        (disk / "a.tar").write_bytes(tar_of(entries))
        with shown(store, imported(store, f"x{number}", disk / "a.tar").layers) as tree:
            assert (tree / "m").read_bytes() == content
    (disk / "b.tar").write_bytes(tar_of([file("manifest.json", b"[]")]))
    assert imported(store, "said", f"tar:{disk / 'b.tar'}").layers
    with pytest.raises(ImageInvalidError, match="it holds nothing"):
        imported(store, "not-said", disk / "b.tar")
    (disk / "c.tar").write_bytes(tar_of([file("repositories", b"{}")]))
    with pytest.raises(ImageInvalidError, match=r"manifest\.json is missing"):
        imported(store, "very-old", f"docker-archive:{disk / 'c.tar'}")
    with pytest.raises(ImageInvalidError, match="oci-layout is missing"):
        imported(store, "no-layout", f"oci-archive:{disk / 'c.tar'}")


def test_its_configuration_is_its_own(store: ImageStore, disk: Path) -> None:
    saved(disk / "a.tar", [tar_of([file("a", b"a")])])
    with pytest.raises(UnsupportedError, match="brings its own"):
        imported(store, "x", disk / "a.tar", config=ImageConfig(user="root"))
