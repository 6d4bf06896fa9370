"""The versions of mkfs.erofs that layers are tested with: the installed one, and that of Debian 13 beside it."""

from __future__ import annotations

from pathlib import Path

import pytest

NEWER = Path(__file__).parents[1] / "build/erofs-1.8/bin"
"""Where `scripts/erofs-newer` puts it."""

both_versions = pytest.mark.parametrize(
    "programs",
    [pytest.param("", id="installed"), pytest.param(str(NEWER), id="newer", marks=pytest.mark.erofs18)],
    indirect=True,
)
"""Runs a test of tests/node/store with each; see the fixture `programs`."""


def missing() -> str | None:
    """Why the newer one cannot run here."""
    return None if (NEWER / "mkfs.erofs").is_file() else "no mkfs.erofs 1.8 in build; run `scripts/erofs-newer`"
