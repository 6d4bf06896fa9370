"""Layers stay apart, small ones come together, what was converted is not converted again, and a base is minded."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.node.store.importers.showing import imported, leftovers, shown
from tests.oci_layout import Entry, LayoutMaker, directory, file, hardlink, make_layout, symlink, tar_of
from tests.tree_facts import difference, tree_of

from opendsec.errors import ImageInvalidError, ImageNotFoundError, InvalidSpecError
from opendsec.linux.mount import mountinfo
from opendsec.model.image import Image, LayerRole
from opendsec.store.annotations import LAYER_ROLE
from opendsec.store.gc import collect
from opendsec.store.images import ImageStore
from opendsec.store.importers import ImportRequest, import_image
from opendsec.store.importers.conversions import Conversions
from opendsec.store.importers.source import parse_source
from opendsec.store.progress import Progress

pytestmark = [pytest.mark.root, pytest.mark.erofs, pytest.mark.overlay]

LARGE, SMALL = 100_000, 1000
LIMIT = 90_000


def layer(name: str, size: int) -> list[Entry]:
    return [directory("d"), file(f"d/{name}", name.encode() * size)]


BOTTOM = [layer("a", SMALL), layer("b", LARGE), layer("c", SMALL), layer("d", SMALL)]


def digests(image: Image) -> list[str]:
    return [one.digest for one in image.layers]


def mounts_of(disk: Path) -> list[str]:
    return [one.target for one in mountinfo() if str(disk) in one.target + one.source]


def put_in(store: ImageStore, disk: Path, name: str, layers: list[list[Entry]]) -> Image:
    return imported(store, name, make_layout(disk / f"layout-{name}", layers), collapse_bytes=LIMIT)


def test_small_layers_come_together_and_a_bottom_is_shared(store: ImageStore, disk: Path) -> None:
    one = put_in(store, disk, "one", [*BOTTOM, layer("e", LARGE), layer("f", SMALL)])
    two = put_in(store, disk, "two", [*BOTTOM, layer("e", LARGE), layer("g", LARGE)])
    assert [len(one.layers), len(two.layers)] == [3, 3]  # a+b, c+d+e, and the last one
    assert digests(one)[:2] == digests(two)[:2]
    assert digests(one)[2] != digests(two)[2]


def test_what_was_converted_before_has_no_say(disk: Path) -> None:
    """The same image has the same layers, whatever a store has seen."""
    fresh, used = ImageStore(disk / "fresh"), ImageStore(disk / "used")
    for count in (1, 2, 3, 4):
        put_in(used, disk, f"part{count}", BOTTOM[:count])
    whole = make_layout(disk / "whole", [*BOTTOM, [file("d/.wh.a"), hardlink("z", "d/d"), file("d/.wh..wh..opq")]])
    assert digests(imported(fresh, "x", whole, collapse_bytes=0)) == digests(
        imported(used, "x", whole, collapse_bytes=0)
    )
    assert digests(imported(fresh, "y", whole, collapse_bytes=LIMIT)) == digests(
        imported(used, "y", whole, collapse_bytes=LIMIT)
    )


def without_blobs(layout: Path, image: Image, keep: int) -> None:
    """Remove all large blobs but the last `keep`: what is not there cannot be unpacked."""
    blobs = sorted((layout / "blobs/sha256").iterdir(), key=lambda path: path.stat().st_mtime_ns)
    tars = [path for path in blobs if path.read_bytes()[:1] != b"{"]
    for path in tars[: len(tars) - keep]:
        path.unlink()


def test_a_bottom_that_was_converted_is_not_unpacked(store: ImageStore, disk: Path) -> None:
    first = put_in(store, disk, "first", [*BOTTOM, layer("e", LARGE)])
    layout = make_layout(disk / "second", [*BOTTOM, layer("e", LARGE), layer("f", SMALL)])
    without_blobs(layout, first, keep=1)
    second = imported(store, "second", layout, collapse_bytes=LIMIT)
    assert digests(second)[:2] == digests(first)
    with shown(store, second.layers) as tree:
        assert sorted(os.listdir(tree / "d")) == ["a", "b", "c", "d", "e", "f"]


def test_an_image_that_was_removed_is_converted_again(store: ImageStore, disk: Path) -> None:
    layout = make_layout(disk / "layout", BOTTOM)
    first = imported(store, "x", layout, collapse_bytes=LIMIT)
    store.remove("x")
    for kind in ("blobs", "data", "tables"):
        for path in (store.root / kind / "sha256").iterdir():
            path.unlink()
    assert digests(imported(store, "y", layout, collapse_bytes=LIMIT)) == digests(first)
    with shown(store, first.layers) as tree:
        assert (tree / "d/a").read_bytes() == b"a" * SMALL


def test_what_is_remembered_goes_with_its_layers(store: ImageStore, disk: Path) -> None:
    put_in(store, disk, "kept", BOTTOM)
    put_in(store, disk, "gone", [*BOTTOM[:2], layer("x", LARGE)])
    before = sum(path.is_file() for path in (store.root / "conversions").rglob("*"))
    assert Conversions(store).sweep() == 0
    store.remove("gone")
    collect(store, grace_s=0)
    assert Conversions(store).sweep() == 3  # Its last group, that one's size, and the whole.
    assert sum(path.is_file() for path in (store.root / "conversions").rglob("*")) == before - 3
    layout = make_layout(disk / "again", BOTTOM)
    without_blobs(layout, store.get("kept"), keep=0)
    assert imported(store, "again", layout, collapse_bytes=LIMIT).layers == store.get("kept").layers
    shutil.rmtree(store.root / "conversions")
    assert Conversions(store).sweep() == 0


def test_an_image_is_there_even_if_nothing_can_be_remembered(store: ImageStore, disk: Path) -> None:
    (store.root / "conversions").mkdir(exist_ok=True)
    (store.root / "conversions/layers").write_text("in the way")
    seen: list[Progress] = []
    request = ImportRequest(name="x", source=parse_source(str(make_layout(disk / "layout", BOTTOM))))
    image = import_image(store, request, on_progress=seen.append)
    assert store.get("x") == image
    assert "could not be remembered" in seen[-1].phase


@pytest.mark.parametrize(
    "damage", [b"", b"{}", b'{"digest": "", "meta": [], "data": []}', b"[1]", b'{"digest": "sha256:0"}', b"\xff" * 100]
)
def test_a_damaged_entry_is_none(store: ImageStore, disk: Path, damage: bytes) -> None:
    layout = make_layout(disk / "layout", BOTTOM)
    first = imported(store, "x", layout)
    for path in (store.root / "conversions").rglob("*"):
        if path.is_file():
            path.write_bytes(damage)
    assert imported(store, "y", layout).layers == first.layers
    for path in (store.root / "conversions").rglob("*"):
        if path.is_file():
            path.write_bytes(damage)
    assert Conversions(store).sweep() == 6


def test_a_layer_that_lost_bytes_is_not_taken(store: ImageStore, disk: Path) -> None:
    layout = make_layout(disk / "layout", BOTTOM)
    first = imported(store, "x", layout)
    data = first.layers[0].data
    assert data is not None
    path = store.data_path(data.digest)
    path.chmod(0o600)
    os.truncate(path, 4096)
    path.unlink()
    assert imported(store, "y", layout).layers == first.layers
    assert path.stat().st_size == data.size_bytes


def test_roles_are_kept_and_never_mixed(store: ImageStore, disk: Path) -> None:
    maker = LayoutMaker(disk / "layout")
    image = maker.image([tar_of(one) for one in BOTTOM])
    manifest = maker.read(image)
    for one, role in zip(manifest["layers"], ("base", "base", "workspace", "toolkit"), strict=True):
        one["annotations"] = {LAYER_ROLE: role}
    maker.index([maker.json(manifest, image["mediaType"])])
    kept = imported(store, "kept", maker.root, collapse_bytes=1 << 30)
    assert [one.role.value for one in kept.layers] == ["base", "workspace", "toolkit"]
    said = imported(store, "said", maker.root, collapse_bytes=1 << 30, role=LayerRole.WORKSPACE)
    assert [one.role.value for one in said.layers] == ["workspace"]
    manifest["layers"][0]["annotations"] = {LAYER_ROLE: "throne"}
    maker.index([maker.json(manifest, image["mediaType"])])
    with pytest.raises(ImageInvalidError, match="layer 1: 'throne' is not the role"):
        imported(store, "bad", maker.root)


SYSTEM = [
    [
        directory("./", mode=0o711, uid=3),
        directory("usr"),
        directory("usr/lib"),
        symlink("lib", "usr/lib"),
        file("usr/lib/libc", b"c"),
        directory("opt", mode=0o750, mtime=77),
        directory("etc"),
        file("etc/old", b"o"),
    ],
    [file("etc/new", b"n")],
]
WORK = [[file("lib/libwork", b"w"), file("etc/.wh.old"), directory("opt/work"), file("opt/work/f", b"f")]]


def composed(store: ImageStore, image: str, toolkits: tuple[str, ...] = (), workspace: str = "") -> Image:
    return store.compose(image, workspace=workspace, toolkits=toolkits)


def test_an_image_on_its_base_gives_only_what_is_above(store: ImageStore, disk: Path) -> None:
    base = imported(store, "base", make_layout(disk / "base", SYSTEM))
    layout = make_layout(disk / "whole", [*SYSTEM, *WORK])
    work = imported(store, "work", layout, on="base", role=LayerRole.WORKSPACE)
    assert (work.base, [one.role for one in work.layers]) == ("base", [LayerRole.WORKSPACE])
    whole = imported(store, "whole", layout, collapse_bytes=1 << 30)
    for seen in (composed(store, "work"), composed(store, "base", workspace="work")):
        assert len(seen.layers) == len(base.layers) + 1
        with shown(store, seen.layers) as left, shown(store, whole.layers) as right:
            assert not difference(tree_of(left), tree_of(right))
    with pytest.raises(InvalidSpecError, match="no layer beyond"):
        imported(store, "same", make_layout(disk / "same", SYSTEM), on="base")


def test_an_image_of_its_own_lies_on_its_base_whole(store: ImageStore, disk: Path) -> None:
    imported(store, "base", make_layout(disk / "base", SYSTEM))
    imported(store, "tool", make_layout(disk / "tool", WORK), on="base", role=LayerRole.TOOLKIT)
    imported(store, "whole", make_layout(disk / "whole", [*SYSTEM, *WORK]))
    seen = composed(store, "base", ("tool",))
    with shown(store, seen.layers) as left, shown(store, store.get("whole").layers) as right:
        assert not difference(tree_of(left), tree_of(right))


def test_a_directory_new_to_the_base_hides_nothing_of_others(store: ImageStore, disk: Path) -> None:
    """The kernel marks every new directory opaque; two toolkits may bring the same one."""
    imported(store, "base", make_layout(disk / "base", SYSTEM))
    for name in ("one", "two"):
        entries = [directory("opt/shared"), directory("opt/shared/in"), file(f"opt/shared/in/{name}", b"x")]
        imported(store, name, make_layout(disk / name, [entries]), on="base", role=LayerRole.TOOLKIT)
    with shown(store, composed(store, "base", ("one", "two")).layers) as tree:
        assert sorted(os.listdir(tree / "opt/shared/in")) == ["one", "two"]


def test_an_archive_is_unpacked_through_the_links_of_its_base(store: ImageStore, disk: Path) -> None:
    imported(store, "base", make_layout(disk / "base", SYSTEM))
    (disk / "a.tar").write_bytes(tar_of([directory("lib"), file("opt/.wh.kept", b"k")]))
    (disk / "b.tar").write_bytes(tar_of([file("lib/mine", b"m"), file("opt/.wh.kept", b"k")]))
    imported(store, "tool", disk / "b.tar", on="base", role=LayerRole.TOOLKIT)
    with shown(store, composed(store, "base", ("tool",)).layers) as tree:
        assert (tree / "lib").is_symlink()
        assert sorted(os.listdir(tree / "usr/lib")) == ["libc", "mine"]
        assert (tree / "opt/.wh.kept").read_bytes() == b"k"
        found = tree_of(tree)
    assert found["."][:2] == ("0o40711", (3, 0))
    assert found["opt"][:3] == ("0o40750", (0, 0), 77 * 10**9)


def test_a_directory_where_the_base_has_a_link_is_refused(store: ImageStore, disk: Path) -> None:
    imported(store, "base", make_layout(disk / "base", SYSTEM))
    (disk / "tree/lib").mkdir(parents=True)
    with pytest.raises(ImageInvalidError, match="entry 'lib': a directory, where the base has a symbolic link"):
        imported(store, "tool", disk / "tree", on="base", role=LayerRole.TOOLKIT)
    assert store.names() == ["base"]


@pytest.mark.parametrize(("on", "root"), [("", ("0o40755", (0, 0), 0)), ("base", ("0o40711", (3, 0)))])
def test_the_root_of_a_toolkit_directory_hides_no_other(
    store: ImageStore, disk: Path, on: str, root: tuple[object, ...]
) -> None:
    imported(store, "base", make_layout(disk / "base", SYSTEM))
    (disk / "tree/opt").mkdir(parents=True)
    (disk / "tree").chmod(0o700)
    (disk / "tree/opt/tool").write_text("t")
    before = tree_of(disk / "tree")
    tool = imported(store, "tool", disk / "tree", on=on, role=LayerRole.TOOLKIT)
    with shown(store, tool.layers) as tree:
        found = tree_of(tree)
    assert found["."][: len(root)] == root
    assert {name: facts for name, facts in found.items() if name != "."} == {
        name: facts for name, facts in before.items() if name != "."
    }
    assert tree_of(disk / "tree") == before


def test_a_base_that_is_not_there(store: ImageStore, disk: Path) -> None:
    with pytest.raises(ImageNotFoundError):
        imported(store, "x", make_layout(disk / "layout", WORK), on="nothing")
    assert leftovers(store) == []


def test_links_across_layers_stay_one_file(store: ImageStore, disk: Path) -> None:
    layers = [
        [file("a", b"x" * 5000), hardlink("b", "a"), directory("d"), hardlink("d/c", "a"), symlink("s", "a")],
        [hardlink("t", "s"), file("d/.wh.c"), hardlink("e", "b")],
        [hardlink("d/f", "e"), file(".wh.a")],
    ]
    image = imported(store, "x", make_layout(disk / "layout", layers), collapse_bytes=0)
    with shown(store, image.layers) as tree:
        inodes = {name: os.lstat(tree / name).st_ino for name in ("b", "e", "d/f")}
        assert len(set(inodes.values())) == 1
        assert os.lstat(tree / "s").st_ino == os.lstat(tree / "t").st_ino
        assert stat.S_ISLNK(os.lstat(tree / "t").st_mode)
        assert sorted(os.listdir(tree)) == ["b", "d", "e", "s", "t"]


def test_what_the_kernel_leaves_is_not_packed(store: ImageStore, disk: Path) -> None:
    """Origins, marks of impurity and the clock's times would make layers differ that are the same."""
    layers = [
        [directory("d"), directory("d/e"), file("d/e/f", b"f")],
        [file("d/e/g", b"g"), file("d/e/.wh.f"), directory("new"), directory("d", mode=0o700)],
        [file(".wh.d"), directory("d"), file("d/h", b"h")],
    ]
    image = imported(store, "x", make_layout(disk / "layout", layers), collapse_bytes=0)
    found: dict[str, tuple[object, ...]] = {}
    for number, one in enumerate(image.layers):
        with shown(store, [one]) as tree:
            found |= {f"{number}/{name}": facts for name, facts in tree_of(tree).items()}
    marked = {name: facts[6] for name, facts in found.items() if facts[6]}
    assert marked == {
        "1/d/e": (("trusted.overlay.origin", b""),),  # Not the kernel's: without it whiteouts may show their names.
        "2/d": (("trusted.overlay.opaque", b"y"),),
    }
    assert found["1/d/e/f"][:3] == ("0o20000", (0, 0), 0)


def test_many_layers_become_few(store: ImageStore, disk: Path) -> None:
    layout = make_layout(disk / "layout", [[file(f"f{number}", b"x")] for number in range(300)])
    image = imported(store, "x", layout)
    assert len(image.layers) == 1
    with shown(store, image.layers) as tree:
        assert len(os.listdir(tree)) == 300


def test_as_many_layers_as_an_overlay_takes(store: ImageStore, disk: Path) -> None:
    layout = make_layout(disk / "layout", [[file(f"f{number}", b"x")] for number in range(60)])
    image = imported(store, "x", layout, collapse_bytes=0)
    assert len(image.layers) == 60
    with shown(store, image.layers) as tree:
        assert len(os.listdir(tree)) == 60


def test_several_at_once(store: ImageStore, disk: Path) -> None:
    layouts = [make_layout(disk / f"layout{number}", [*BOTTOM, layer(f"x{number % 3}", LARGE)]) for number in range(6)]
    with ThreadPoolExecutor(6) as pool:
        images = list(pool.map(lambda one: put_again(store, *one), enumerate(layouts)))
    assert len({image.digest for image in images}) == 3
    assert len({digests(image)[0] for image in images}) == 1
    assert not list((store.root / "staging").iterdir())


def put_again(store: ImageStore, number: int, layout: Path) -> Image:
    return imported(store, f"x{number}", layout, collapse_bytes=LIMIT)


def test_a_failure_ends_what_runs_beside_it(store: ImageStore, disk: Path) -> None:
    """The first group is being packed when the second turns out bad; `leaks` sees processes and descriptors."""
    big = [file(f"f{number}", os.urandom(1 << 20)) for number in range(64)]
    layout = make_layout(disk / "layout", [big, [file("x", b"x"), file("../x", b"x")]])
    with pytest.raises(ImageInvalidError, match="layer 2 of 2"):
        imported(store, "x", layout, collapse_bytes=0)
    assert leftovers(store) == []
    assert not list((store.root / "staging").iterdir())
    assert mounts_of(disk) == []


KILLED = """
import os, signal, sys
from pathlib import Path
from opendsec.store.images import ImageStore
from opendsec.store.importers import ImportRequest, import_image
from opendsec.store.importers.source import parse_source

def seen(step):
    if step.phase.startswith(sys.argv[3]):
        os.kill(os.getpid(), signal.SIGKILL)

request = ImportRequest(name="x", source=parse_source(sys.argv[2]), collapse_bytes=0)
import_image(ImageStore(Path(sys.argv[1])), request, on_progress=seen)
"""


@pytest.mark.parametrize("phase", ["unpacking layer 1", "unpacking layer 2", "writing", "publishing"])
def test_killed_at_any_point_it_leaves_nothing(disk: Path, phase: str) -> None:
    layout = make_layout(disk / "layout", [*SYSTEM, *WORK])
    command = [sys.executable, "-c", KILLED, str(disk / "store"), str(layout), phase]
    assert subprocess.run(command, timeout=120, check=False).returncode == -signal.SIGKILL
    store = ImageStore(disk / "store")
    assert (store.names(), leftovers(store)) == ([], [])
    assert mounts_of(disk) == []
    assert imported(store, "x", layout).layers


def test_layers_are_the_same_where_trees_are_made_elsewhere(disk: Path) -> None:
    layout = make_layout(disk / "layout", [*SYSTEM, *WORK])
    near, far = ImageStore(disk / "near"), ImageStore(disk / "far", scratch=disk / "scratch")
    assert digests(imported(near, "x", layout, collapse_bytes=0)) == digests(
        imported(far, "x", layout, collapse_bytes=0)
    )
    assert [path for path in (disk / "scratch").iterdir() if path.is_dir()] == []
    shutil.rmtree(disk / "scratch")


def test_a_store_that_cannot_back_mounts_is_read_through_copies(disk: Path) -> None:
    (disk / "memory").mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "none", disk / "memory"], check=True, timeout=120)
    try:
        store = ImageStore(disk / "memory/store", scratch=disk / "scratch")
        base = imported(store, "base", make_layout(disk / "base", SYSTEM), collapse_bytes=0)
        more = imported(store, "more", make_layout(disk / "more", [*SYSTEM, *WORK]), collapse_bytes=0)
        assert digests(more)[:2] == digests(base)
        near = ImageStore(disk / "near")
        assert digests(imported(near, "x", disk / "more", collapse_bytes=0)) == digests(more)
    finally:
        subprocess.run(["umount", disk / "memory"], check=True, timeout=120)


def test_a_layer_the_kernel_cannot_read_is_named(store: ImageStore, disk: Path) -> None:
    base = imported(store, "base", make_layout(disk / "base", SYSTEM))
    path = store.blob_path(base.layers[0].mounted.digest)
    path.chmod(0o600)
    path.write_bytes(bytes(path.stat().st_size))
    with pytest.raises(ImageInvalidError, match="is no EROFS file"):
        imported(store, "x", make_layout(disk / "x", WORK), on="base")
    assert store.names() == ["base"]
