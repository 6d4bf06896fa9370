"""What an engine remembers of images: no more than is fresh, however many names are asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from opendsec.backends.container import ContainerBackend
from opendsec.errors import ImageNotFoundError
from opendsec.fncall import engine as engine_module
from opendsec.fncall.engine import IMAGES_KNOWN, Engine
from opendsec.fncall.settings import FnCallSettings
from opendsec.model.fncall import FnCallSpec
from opendsec.model.image import Image, ImageConfig

pytestmark = pytest.mark.anyio


class AnyName:
    """Knows every name but one."""

    def compose(self, image: str) -> Image:
        if image == "none":
            raise ImageNotFoundError("no such image")
        return Image(name=image, digest=f"sha256:{image}", layers=(), config=ImageConfig(), created_at=0.0)


async def test_names_that_are_not_fresh_any_more_are_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "IMAGE_FRESH_S", 0.0)
    settings = FnCallSettings(edge="a", state_dir=tmp_path / "state", run_dir=tmp_path / "run")
    made = Engine(settings=settings, containers=cast("ContainerBackend", cast("Any", None)), images=AnyName())
    for number in range(2 * IMAGES_KNOWN + 1):
        group = await made._group(FnCallSpec(code="x", image=f"i{number}"), "p")
        assert group.source is not None
        assert group.source.name == f"i{number}"
    with pytest.raises(ImageNotFoundError):
        await made._group(FnCallSpec(code="x", image="none"), "p")
    assert len(made._known) <= IMAGES_KNOWN
