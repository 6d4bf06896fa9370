"""The systemd units are understood by systemd and keep the promises sandboxes depend on."""

from __future__ import annotations

import configparser
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

UNITS = Path(__file__).parents[3] / "deploy" / "systemd"


def read(name: str) -> configparser.RawConfigParser:
    parser = configparser.RawConfigParser(strict=False)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read(UNITS / name)
    return parser


def test_systemd_understands_the_units(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    for unit in UNITS.glob("*.service"):
        text = unit.read_text(encoding="utf-8").replace("/opt/opendsec/.venv/bin/python", sys.executable)
        (tmp_path / unit.name).write_text(text, encoding="utf-8")
    units = sorted(str(path) for path in tmp_path.glob("*.service"))
    assert len(units) == 3
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *units], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_restart_of_the_edge_leaves_its_sandboxes_alone() -> None:
    service = read("opendsec-edge.service")["Service"]
    assert service["KillMode"] == "process"
    assert service["Delegate"] == "yes"
    assert service["RuntimeDirectoryPreserve"] == "yes"
    assert service["Restart"] == "always"


def test_the_apiserver_listens_on_loopback() -> None:
    assert "OPENDSEC_LISTEN=127.0.0.1:" in read("opendsec-apiserver.service")["Service"]["Environment"]
