"""kill -9 before every call on files: what was published stays, nothing half-written is seen, nothing is left."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from opendsec.model.image import ImageConfig
from opendsec.store.compose import pinned
from opendsec.store.fsck import check
from opendsec.store.gc import collect
from opendsec.store.images import ImageStore

CALLS = frozenset({f"os.{name}" for name in ("chmod", "link", "mkdir", "remove", "rename", "rmdir", "utime", "fsync")})
"""Audit events of calls that change a disk, beside opening files to write; fsync(2) has none of its own."""
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT


def publish(store: ImageStore, name: str, *contents: bytes, base: str = "") -> None:
    with store.staging() as work:
        layers = []
        for number, content in enumerate(contents):
            meta, data = work / f"{number}.meta", work / f"{number}.data"
            meta.write_bytes(b"meta of " + content)
            data.write_bytes(content)
            layers.append(store.stage_layer(meta, data))
        store.publish(name, layers=layers, config=ImageConfig(), base=base, replace=True)


def _die_before(number: int, root: Path, act: Callable[[ImageStore], object]) -> None:
    """Run an action in this process, which is killed before its call of that number."""
    count = 0

    def look(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal count
        is_open = event == "open" and isinstance(arguments[2], int) and arguments[2] & WRITES
        if not (is_open or event in CALLS):
            return
        if count == number:
            os.kill(os.getpid(), signal.SIGKILL)
        count += 1

    fsync = os.fsync

    def counted(fd: int) -> None:
        look("os.fsync", ())
        fsync(fd)

    store = ImageStore(root)
    os.fsync = counted  # type: ignore[assignment]
    sys.addaudithook(look)
    act(store)
    os._exit(0)


def killed(number: int, root: Path, act: Callable[[ImageStore], object]) -> bool:
    """Whether it was killed before it had ended."""
    process = multiprocessing.get_context("fork").Process(target=_die_before, args=(number, root, act))
    process.start()
    process.join(60)
    code = process.exitcode
    process.close()
    assert code in (0, -signal.SIGKILL)
    return code != 0


def _replace(store: ImageStore) -> None:
    publish(store, "x", b"new", b"shared")


def _all(store: ImageStore) -> None:
    """`y` is made of what nobody else has any more, and lies on an image by its digest."""
    other = pinned(store.get("other"))
    store.remove("x")
    publish(store, "y", b"old", base=other)
    collect(store, grace_s=0)


@pytest.mark.parametrize("act", [_replace, _all])
def test_killed_before_every_call(tmp_path: Path, act: Callable[[ImageStore], object]) -> None:
    number, going = 0, True
    store = ImageStore(tmp_path / "template")
    publish(store, "x", b"old")
    publish(store, "other", b"shared", b"more")
    publish(store, "gone", b"gone")
    store.remove("gone")
    while going:
        root = tmp_path / str(number)
        shutil.copytree(tmp_path / "template", root)
        store = ImageStore(root)
        before = {image.name: image.digest for image in store.list()}
        going = killed(number, root, act)
        store = ImageStore(root)
        checked = check(store)
        assert checked.findings == (), f"before call {number}"
        after = {image.name: image.digest for image in store.list()}
        assert after["other"] == before["other"]
        assert "x" in after or act is _all
        assert going or after != before
        assert list((root / "staging").iterdir()) == []
        collect(store, grace_s=0)
        assert check(store).findings == ()
        assert list((root / "condemned").iterdir()) == []
        needed = {file for image in store.list() for layer in image.layers for file in (layer.digest,)}
        assert len(list((root / "blobs/sha256").iterdir())) == len(needed)
        number += 1
    assert number > 30
