"""Which compositions hide what the base has behind a link."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from opendsec.errors import ImageInvalidError
from opendsec.model.image import Image, ImageConfig, ImagePart, Layer, LayerRole, PartKind
from opendsec.store.hidden_links import check_links, may_hide

BASE, WORKSPACE, TOOLKIT = LayerRole.BASE, LayerRole.WORKSPACE, LayerRole.TOOLKIT
Made = tuple[Image, list[int]]


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Callable[[Sequence[tuple[LayerRole, str]]], Made]]:
    """An image of layers, lowest first, whose /bin is a link, a directory, or nothing."""
    opened: list[int] = []

    def make(layers: Sequence[tuple[LayerRole, str]]) -> Made:
        fds = []
        for number, (_, kind) in enumerate(layers):
            root = tmp_path / f"{len(opened)}-{number}"
            root.mkdir()
            if kind == "link":
                (root / "bin").symlink_to("usr/bin")
            elif kind == "directory":
                (root / "bin").mkdir()
            elif kind == "file":
                (root / "bin").touch()
            fds.append(os.open(root, os.O_PATH | os.O_DIRECTORY))
        opened.extend(fds)
        of = tuple(Layer(digest=f"sha256:{n:064}", size_bytes=1, role=role) for n, (role, _) in enumerate(layers))
        parts = tuple(
            ImagePart(kind=kind, name=kind.value, digest="", layers=tuple(one.digest for one in of if one.role is role))
            for kind, role in ((PartKind.IMAGE, BASE), (PartKind.WORKSPACE, WORKSPACE), (PartKind.TOOLKIT, TOOLKIT))
            if any(one.role is role for one in of)
        )
        image = Image(name="x", digest="sha256:0", layers=of, config=ImageConfig(), created_at=0.0, parts=parts)
        return image, fds[::-1]

    yield make
    for fd in opened:
        os.close(fd)


@pytest.mark.parametrize(
    "layers",
    [
        [(BASE, "link"), (TOOLKIT, "directory")],
        [(BASE, "link"), (WORKSPACE, ""), (TOOLKIT, "directory"), (TOOLKIT, "")],
        [(BASE, "link"), (BASE, ""), (WORKSPACE, "directory"), (TOOLKIT, "directory")],
    ],
)
def test_a_directory_over_a_link_is_refused(
    made: Callable[[Sequence[tuple[LayerRole, str]]], Made], layers: list[tuple[LayerRole, str]]
) -> None:
    image, fds = made(layers)
    assert may_hide(image)
    with pytest.raises(ImageInvalidError, match="/bin is a link to 'usr/bin' below") as raised:
        check_links(image, fds)
    assert raised.value.detail["entry"] == "bin"


@pytest.mark.parametrize(
    "layers",
    [
        [(BASE, "link")],
        [(BASE, "link"), (BASE, "directory")],
        [(BASE, "link"), (TOOLKIT, "link")],
        [(BASE, "directory"), (TOOLKIT, "directory")],
        [(BASE, "link"), (BASE, "directory"), (TOOLKIT, "directory")],
        [(BASE, ""), (TOOLKIT, "directory")],
        [(BASE, "link"), (TOOLKIT, "file")],
        [(BASE, ""), (WORKSPACE, "link"), (WORKSPACE, "directory")],
    ],
)
def test_what_hides_nothing_of_another_image_is_fine(
    made: Callable[[Sequence[tuple[LayerRole, str]]], Made], layers: list[tuple[LayerRole, str]]
) -> None:
    check_links(*made(layers))


def test_what_a_sandbox_did_to_its_own_system_is_its_business(
    made: Callable[[Sequence[tuple[LayerRole, str]]], Made],
) -> None:
    image, fds = made([(BASE, "link"), (WORKSPACE, "directory")])
    whole = ImagePart(kind=PartKind.IMAGE, name="packed", digest="", layers=tuple(one.digest for one in image.layers))
    packed = replace(image, parts=(whole,))
    assert not may_hide(packed)
    check_links(packed, fds)
