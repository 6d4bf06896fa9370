"""What `up` and `status` say where no image is named: only a store that can be listed is called empty."""

from __future__ import annotations

from pathlib import Path

import pytest

from opendsec.host.local import chosen
from opendsec.host.up import _no_images


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
