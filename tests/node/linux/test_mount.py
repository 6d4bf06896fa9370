"""Mounts of the host's side on the real kernel."""

from __future__ import annotations

import errno
import os
import subprocess
from pathlib import Path

import pytest

from opendsec.linux import libc, mount

pytestmark = [pytest.mark.root]


@pytest.mark.erofs
def test_an_erofs_file_is_mounted_without_a_loop_device(tmp_path: Path) -> None:
    source, image, target = tmp_path / "source", tmp_path / "image", tmp_path / "target"
    source.mkdir()
    target.mkdir()
    (source / "file").write_text("content")
    subprocess.run(["mkfs.erofs", "--quiet", image, source], check=True, timeout=120, capture_output=True)
    tree = mount.erofs(image)
    mount.attach(tree, target)
    os.close(tree)
    entry = next(entry for entry in mount.mountinfo() if entry.target == str(target))
    assert (entry.fstype, entry.source) == ("erofs", str(image))
    assert "ro" in entry.options
    assert (target / "file").read_text() == "content"
    assert mount.unmount(target)
    assert not mount.unmount(target)


@pytest.mark.erofs
def test_what_is_no_image_is_refused_by_its_name(tmp_path: Path) -> None:
    image = tmp_path / "image"
    image.write_bytes(bytes(8192))
    with pytest.raises(OSError, match="fsconfig create") as caught:
        mount.erofs(image)
    assert (caught.value.errno, caught.value.filename) == (errno.EINVAL, str(image))


def test_a_detached_tmpfs_is_filled_attached_and_cloned(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    tree = mount.tmpfs(size_bytes=65536, mode=0o750)
    os.mkdir("inside", dir_fd=tree)
    assert str(first) not in {entry.target for entry in mount.mountinfo()}
    mount.attach(tree, first)
    os.close(tree)
    copy = mount.clone(first)
    mount.set_attributes(copy, attr_set=libc.MOUNT_ATTR_RDONLY)
    mount.attach(copy, second)
    os.close(copy)
    assert second.stat().st_mode & 0o7777 == 0o750
    (first / "inside" / "file").write_text("seen in both")
    assert (second / "inside" / "file").read_text() == "seen in both"
    with pytest.raises(OSError, match="Read-only") as caught:
        (second / "file").write_text("")
    assert caught.value.errno == errno.EROFS
    assert mount.unmount(second)
    assert mount.unmount(first)


def test_a_tree_that_is_never_attached_is_gone_with_its_descriptor() -> None:
    before = len(mount.mountinfo())
    os.close(mount.tmpfs(size_bytes=4096))
    assert len(mount.mountinfo()) == before
