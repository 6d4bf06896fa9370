"""Wrappers raise OSError with the kernel's number and the path; the calls themselves need root and are tested in
tests/node.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from opendsec.linux import libc


def test_errors_carry_number_and_path(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    with pytest.raises(OSError, match="open_tree") as caught:
        libc.open_tree(libc.AT_FDCWD, missing, libc.OPEN_TREE_CLOEXEC)
    assert (caught.value.errno, caught.value.filename) == (errno.ENOENT, str(missing))


def test_an_open_tree_descriptor_names_the_path(tmp_path: Path) -> None:
    fd = libc.open_tree(libc.AT_FDCWD, tmp_path, libc.OPEN_TREE_CLOEXEC)
    assert os.readlink(f"/proc/self/fd/{fd}") == str(tmp_path)
    os.close(fd)


def test_bad_descriptors_are_named_by_the_call() -> None:
    with pytest.raises(OSError, match="setns") as caught:
        libc.setns(-1)
    assert caught.value.errno == errno.EBADF
    with pytest.raises(OSError, match="fsconfig create") as caught:
        libc.fsconfig_create(-1)
    assert caught.value.errno == errno.EINVAL
