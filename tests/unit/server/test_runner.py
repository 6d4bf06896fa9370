"""Addresses, sockets and log lines."""

from __future__ import annotations

import logging
import socket
from pathlib import Path

import pytest

from opendsec.errors import InvalidSpecError
from opendsec.server import logs
from opendsec.server.runner import Address, listen, parse_address


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:8700", Address(host="127.0.0.1", port=8700)),
        ("[::1]:80", Address(host="::1", port=80)),
        ("unix:/run/x.sock", Address(path=Path("/run/x.sock"))),
        ("/run/x.sock", Address(path=Path("/run/x.sock"))),
    ],
)
def test_addresses(text: str, address: Address) -> None:
    assert parse_address(text) == address
    assert parse_address(str(address)) == address


@pytest.mark.parametrize("text", ["", "host", ":80", "host:", "host:x", "host:70000", "unix:rel", "unix:/" + "x" * 100])
def test_wrong_addresses_name_the_field(text: str) -> None:
    with pytest.raises(InvalidSpecError) as caught:
        parse_address(text, field="OPENDSEC_LISTEN")
    assert caught.value.detail["field"] == "OPENDSEC_LISTEN"


def test_a_unix_socket_is_private_and_replaces_a_dead_one(tmp_path: Path) -> None:
    path = tmp_path / "new" / "s.sock"
    listen(Address(path=path)).close()  # left behind, as by kill -9
    with listen(Address(path=path)):
        assert path.stat().st_mode & 0o777 == 0o600
        assert [entry.name for entry in path.parent.iterdir()] == ["s.sock"]
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))


def test_a_taken_port_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1:{port}"):
            listen(Address(host="127.0.0.1", port=port))


def test_a_log_line_is_an_event_and_its_fields(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        logging.getLogger("opendsec.x").info("ready", extra={"fields": {"id": "sbx-1", "why": 'a "b"\n'}})
    line = logs.EventFormatter().format(caplog.records[0])
    assert line.endswith('info opendsec.x ready id=sbx-1 why="a \\"b\\"\\n"')
    with pytest.raises(ValueError, match="loud"):
        logs.configure("loud")
