"""What `up` was started with is known to `down` and `status`, which are called without it."""

from __future__ import annotations

from pathlib import Path

import pytest

from opendsec.errors import RequestError
from opendsec.host.local import chosen, remember, started


def test_down_has_the_settings_of_up(tmp_path: Path) -> None:
    up = {
        "OPENDSEC_RUN_DIR": str(tmp_path),
        "OPENDSEC_STATE_DIR": "/srv/state",
        "OPENDSEC_EDGE_CGROUP": "mine",
        "OPENDSEC_EDGE_MAX_LIVE": "7",
        "PATH": "/bin",
    }
    remember(chosen(up, listen="127.0.0.1:9", edge="e1"))
    down = {
        "OPENDSEC_RUN_DIR": str(tmp_path),
        "OPENDSEC_EDGE_MAX_LIVE": "8",
        "OPENDSEC_LOG_LEVEL": "error",
        "PATH": "/x",
    }
    found = started(down)
    assert (found.listen, found.edge, found.state_dir) == ("127.0.0.1:9", "e1", Path("/srv/state"))
    processes = found.environment(down)
    assert (processes["OPENDSEC_EDGE_CGROUP"], processes["OPENDSEC_EDGE_MAX_LIVE"]) == ("mine", "7")
    assert (processes["OPENDSEC_LOG_LEVEL"], processes["PATH"]) == ("error", "/x")


def test_keys_of_the_caller_are_not_kept(tmp_path: Path) -> None:
    remember(chosen({"OPENDSEC_RUN_DIR": str(tmp_path), "OPENDSEC_API_KEY": "secret"}))
    assert b"secret" not in (tmp_path / "up.json").read_bytes()
    assert (tmp_path / "up.json").stat().st_mode & 0o777 == 0o600


def test_a_broken_record_is_named_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "up.json").write_text("{")
    with pytest.raises(RequestError, match=r"up\.json is not readable"):
        started({"OPENDSEC_RUN_DIR": str(tmp_path)})
