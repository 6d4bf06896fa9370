"""Where the platform is found, and that a key goes to no other address than its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from opendsec.client.settings import find_endpoint, parse_endpoint
from opendsec.errors import ConnectError, InvalidSpecError


@pytest.fixture
def local(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "local.json").write_text(json.dumps({"api_url": "http://127.0.0.1:8700", "api_key": "local-key"}))
    return {"OPENDSEC_RUN_DIR": str(tmp_path)}


def test_order_is_arguments_environment_local_file(local: dict[str, str]) -> None:
    environment = local | {"OPENDSEC_API_URL": "http://env:1", "OPENDSEC_API_KEY": "env-key"}
    found = find_endpoint("http://arg:2", "arg-key", environment=environment)
    assert (found.host, found.port, found.api_key) == ("arg", 2, "arg-key")
    found = find_endpoint(environment=environment)
    assert (found.host, found.api_key) == ("env", "env-key")
    found = find_endpoint(environment=local)
    assert (found.url, found.api_key) == ("http://127.0.0.1:8700", "local-key")


def test_the_local_key_stays_with_the_local_address(local: dict[str, str]) -> None:
    assert find_endpoint("http://elsewhere:1", environment=local).api_key == ""
    assert find_endpoint(environment=local | {"OPENDSEC_API_URL": "http://elsewhere:1"}).api_key == ""
    assert find_endpoint("http://127.0.0.1:8700/", environment=local).api_key == "local-key"
    assert find_endpoint(None, "mine", environment=local).api_key == "mine"


def test_nothing_known_says_how_to_start_one(tmp_path: Path) -> None:
    with pytest.raises(ConnectError, match="opendsec up") as caught:
        find_endpoint(environment={"OPENDSEC_RUN_DIR": str(tmp_path)})
    assert not caught.value.retryable
    (tmp_path / "local.json").write_text("{")
    with pytest.raises(ConnectError, match="damaged"):
        find_endpoint(environment={"OPENDSEC_RUN_DIR": str(tmp_path)})
    assert find_endpoint("http://x:1", "k", environment={"OPENDSEC_RUN_DIR": str(tmp_path)}).host == "x"


def test_forms_of_addresses() -> None:
    assert parse_endpoint("unix:/run/x.sock", "").unix_path == "/run/x.sock"
    assert parse_endpoint("unix:///run/x.sock", "").unix_path == "/run/x.sock"
    found = parse_endpoint("https://host/base/", "k")
    assert (found.tls, found.port, found.prefix, found.authority) == (True, 443, "/base", b"host")
    assert parse_endpoint("http://[::1]:8", "").authority == b"[::1]:8"
    for bad in ("host:80", "ftp://x", "http://", "http://x:99999", "http://u:p@x", "http://x/?q", ""):
        with pytest.raises(InvalidSpecError) as caught:
            parse_endpoint(bad, "")
        assert caught.value.detail["field"] == "api_url"
    with pytest.raises(InvalidSpecError):
        parse_endpoint("http://x", "key\r\nX-Evil: 1")
