"""What `image pull` takes for a reference: docker://, and nothing that only looks like one."""

from __future__ import annotations

from pathlib import Path

import pytest

from opendsec.errors import InvalidSpecError
from opendsec.host.image_importing import in_registry


def test_a_registry_is_named() -> None:
    assert str(in_registry("docker://host:5000/name:1")) == "docker://host:5000/name:1"


@pytest.mark.parametrize("text", ["python:3.12-slim", "host/name", "oci:layout", "docker-archive:file", "there", ""])
def test_anything_else_is_told_how_to_name_one(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidSpecError, match="does not say a registry") as caught:
        in_registry(text)
    assert "docker://HOST/NAME:TAG" in caught.value.remedy
