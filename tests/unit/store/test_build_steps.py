"""Steps of builds are forgotten by age; nothing else is."""

from __future__ import annotations

from pathlib import Path

from opendsec.model.image import BUILD_CACHE, ImageConfig
from opendsec.store.build_steps import forget_build_steps
from opendsec.store.images import ImageStore


def test_old_steps_and_nothing_else(tmp_path: Path) -> None:
    for name, made_at in ((f"{BUILD_CACHE}old", 5.0), (f"{BUILD_CACHE}new", 4e9), ("image", 5.0)):
        ImageStore(tmp_path, clock=lambda made_at=made_at: made_at).publish(name, layers=[], config=ImageConfig())  # type: ignore[misc]
    store = ImageStore(tmp_path)
    assert forget_build_steps(store, older_s=60, dry_run=True) == (f"{BUILD_CACHE}old",)
    assert forget_build_steps(store, older_s=60) == (f"{BUILD_CACHE}old",)
    assert store.names() == [f"{BUILD_CACHE}new", "image"]
    assert forget_build_steps(store, older_s=60) == ()
