"""Toolkits and workspaces are no systems: a build that would start one is refused before it does anything."""

from __future__ import annotations

import pytest

from opendsec.build.building import refuse_parts
from opendsec.build.dockerfile import parse_dockerfile
from opendsec.build.plan import BuildOptions, make_plan
from opendsec.errors import InvalidSpecError
from opendsec.model.image import ImageConfig, Layer, LayerRole
from opendsec.model.image_view import ImageDetails


def image(name: str, *roles: LayerRole, base: str = "") -> ImageDetails:
    layers = tuple(Layer(digest=f"sha256:{n:064d}", size_bytes=1, role=role) for n, role in enumerate(roles))
    return ImageDetails(
        name=name,
        digest=f"sha256:{0:064d}",
        created_at=0.0,
        source="",
        config=ImageConfig(),
        layers=layers,
        base=base,
        toolkits=(),
        size_bytes=1,
    )


IMAGES = {
    one.name: one
    for one in (
        image("debian", LayerRole.BASE),
        image("built", LayerRole.BASE, LayerRole.TOOLKIT),
        image("tool", LayerRole.TOOLKIT),
        image("task", LayerRole.WORKSPACE),
        image("task-on", LayerRole.WORKSPACE, base="debian"),
        image("composed", base="debian"),
    )
}


def check(text: str) -> None:
    refuse_parts(make_plan(parse_dockerfile(text), BuildOptions(), lambda name: IMAGES[name].config), IMAGES)


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("FROM debian\nRUN true\nCOPY --from=tool /opt /opt\n", 3, "line 3: image 'tool' is a toolkit"),
        ("FROM debian\nCOPY --from=task /work /work\n", 2, "line 2: image 'task' is a workspace"),
        ("FROM tool\nRUN true\n", 0, "FROM: image 'tool' is a toolkit"),
    ],
)
def test_what_cannot_be_started_is_refused(text: str, line: int, words: str) -> None:
    with pytest.raises(InvalidSpecError, match=words) as caught:
        check(text)
    assert caught.value.detail["line"] == line
    assert "image compose" in caught.value.remedy


@pytest.mark.parametrize(
    "text",
    [
        "FROM task-on\nRUN true\n",
        "FROM scratch\nCOPY --from=debian /etc /etc\nCOPY --from=built /etc /etc\nCOPY --from=composed /x /x\n",
        "FROM tool AS unused\nRUN true\nFROM debian\nRUN true\n",
        "FROM debian AS tool\nRUN true\nFROM debian\nCOPY --from=tool /etc /etc\n",
    ],
)
def test_all_else_may_go_on(text: str) -> None:
    check(text)
