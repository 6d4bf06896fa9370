"""What a disk made of an image is given, and how large it is; nothing of a hostile image leads out of it."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from opendsec.errors import InvalidSpecError
from opendsec.store.disk_writing import MIB, ROOT_AT
from opendsec.vm.disk_building import (
    BLOCK,
    DiskRecipe,
    _bytes_below,
    add_files,
    add_modules,
    host_name,
    kernel_options,
    size_mib,
)
from opendsec.vm.disk_kernels import DiskKernel, DiskKernelFacts


def kernel(place: Path) -> DiskKernel:
    """With one module."""
    tree = place / "modules"
    (tree / "kernel").mkdir(parents=True)
    (tree / "kernel/one.ko").write_bytes(b"one")
    (tree / "build").symlink_to("/usr/src")
    facts = DiskKernelFacts(package="linux-image-1", version="1", sha256="0")
    return DiskKernel(facts=facts, image=place / "vmlinuz", release="6.1.0-1", modules=(), tree=tree)


def test_the_size_is_what_the_image_takes_and_room() -> None:
    recipe = DiskRecipe(image="i")
    assert size_mib(recipe, 0) == ROOT_AT // MIB + 64 + 4096
    assert size_mib(recipe, 1000 * MIB) == ROOT_AT // MIB + 64 + 4096 + 1100
    assert size_mib(DiskRecipe(image="i", size_mib=500), 100 * MIB) == 500


@pytest.mark.parametrize("asked", [1, 192, (2 << 20) + 1])  # an MBR holds 2 TiB
def test_a_size_that_cannot_be_is_refused(asked: int) -> None:
    with pytest.raises(InvalidSpecError, match="size_mb") as refused:
        size_mib(DiskRecipe(image="i", size_mib=asked), 10 * MIB)
    assert refused.value.detail["least"] == ROOT_AT // MIB + 64 + 11


def test_an_image_that_no_table_can_hold_is_refused() -> None:
    with pytest.raises(InvalidSpecError, match="size_mb"):
        size_mib(DiskRecipe(image="i"), 2 << 40)


def test_hard_links_take_their_room_once(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(BLOCK + 1))
    one = _bytes_below(tmp_path)
    for number in range(5):
        os.link(tmp_path / "a", tmp_path / str(number))
    assert _bytes_below(tmp_path) == one == BLOCK + 3 * BLOCK


@pytest.mark.parametrize(
    ("image", "host"),
    [("debian", "debian"), ("A/b:1.2", "a-b-1-2"), ("--", "sandbox"), ("é" * 3, "sandbox"), ("x" * 80, "x" * 63)],
)
def test_host_names(image: str, host: str) -> None:
    assert host_name(image) == host


def test_the_kernel_finds_its_root_and_the_agent_its_port() -> None:
    words = kernel_options().split()
    assert "opendsec.root=/dev/vda2" in words
    assert "opendsec.transport=serial:org.opendsec.agent" in words
    assert "opendsec.address=10.0.2.15/24" in words


def test_what_is_missing_is_added_and_what_is_there_stays(tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir(mode=0o700)
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/hostname").write_text("other\n")
    add_files(tmp_path, "Some/Image")
    assert (tmp_path / "etc/hostname").read_text() == "some-image\n"
    assert (tmp_path / "etc/resolv.conf").read_text() == "nameserver 10.0.2.3\n"
    assert "127.0.0.1\tlocalhost some-image\n" in (tmp_path / "etc/hosts").read_text()
    assert stat.S_IMODE((tmp_path / "tmp").stat().st_mode) == 0o700
    assert {path.name for path in tmp_path.iterdir()} == {"dev", "etc", "proc", "run", "sys", "tmp"}


def test_links_of_the_image_are_not_followed(tmp_path: Path) -> None:
    outside, tree = tmp_path / "outside", tmp_path / "tree"
    outside.mkdir()
    tree.mkdir()
    for name in ("etc", "lib", "usr"):
        (tree / name).symlink_to(outside)
    add_files(tree, "i")
    add_modules(tree, kernel(tmp_path))
    assert list(outside.iterdir()) == []


def test_a_file_that_is_a_link_is_replaced_and_its_target_left_alone(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("mine")
    tree = tmp_path / "tree"
    (tree / "etc").mkdir(parents=True)
    (tree / "etc/resolv.conf").symlink_to(target)
    (tree / "etc/hosts").mkdir()
    add_files(tree, "i")
    assert target.read_text() == "mine"
    assert not (tree / "etc/resolv.conf").is_symlink()
    assert (tree / "etc/hosts").is_dir()


@pytest.mark.parametrize("merged", [True, False])
def test_modules_go_where_the_image_keeps_libraries(tmp_path: Path, merged: bool) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    if merged:
        (tree / "usr/lib").mkdir(parents=True)
        (tree / "lib").symlink_to("usr/lib")
    add_modules(tree, kernel(tmp_path))
    place = tree / ("usr/lib" if merged else "lib") / "modules/6.1.0-1"
    assert (place / "kernel/one.ko").read_bytes() == b"one"
    assert "build" not in os.listdir(place)
    add_modules(tree, kernel(tmp_path / "other"))  # the image's own stay
