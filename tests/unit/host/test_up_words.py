"""What `up` and `status` say: only a store that can be listed is called empty, and what is yet to come is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from opendsec.host.local import chosen
from opendsec.host.up import _no_images, _show_ready


@pytest.mark.parametrize(
    ("store", "says", "never"),
    [
        ("http://host/store", "cannot be listed", "none"),
        ("https://host/store", "cannot be listed", "none"),
        ("s3://bucket/prefix", "image sync", "build-debian"),
        ("/srv/store", "build-debian", "sync"),
        ("", "build-debian", "sync"),
    ],
)
def test_a_store_that_cannot_be_listed_is_not_called_empty(
    store: str, says: str, never: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENDSEC_STORE", store)
    local = chosen({"OPENDSEC_RUN_DIR": str(tmp_path), "OPENDSEC_STATE_DIR": str(tmp_path), "OPENDSEC_STORE": store})
    words = _no_images(local)
    assert says in words
    assert never not in words


def test_what_is_still_being_prepared_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    local = chosen({"OPENDSEC_RUN_DIR": str(tmp_path), "OPENDSEC_STATE_DIR": str(tmp_path)})
    backends = {"container": {"available": True}, "microvm": {"available": False, "preparing": True}}
    _show_ready(local, {"backends": backends, "images": ["debian"]}, as_json=False)
    assert "backends container (being prepared: microvm), images debian" in capsys.readouterr().out
