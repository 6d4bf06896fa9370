"""`opendsec image import` and `pull` as a user types them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.oci_layout import directory, file, make_layout
from tests.registry import PASSWORD, USER, Registry, running_registry

pytestmark = [pytest.mark.root, pytest.mark.erofs, pytest.mark.overlay, pytest.mark.registry]


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    with running_registry(tmp_path_factory.mktemp("registry") / "data") as running:
        yield running


def opendsec(state: Path, *words: object, stdin: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "opendsec", "image", *map(str, words)]
    environment = {**os.environ, "OPENDSEC_STATE_DIR": str(state), "OPENDSEC_STORE": ""}
    return subprocess.run(
        command, env=environment, input=stdin, capture_output=True, text=True, timeout=120, check=False
    )


def test_pull_import_and_what_goes_wrong(tmp_path: Path, registry: Registry) -> None:
    layout = make_layout(tmp_path / "layout", [[directory("d"), file("d/f", b"f")]], config={"User": "7"})
    reference = f"docker://{registry.push(layout, 'lib/x:1')}"
    creds = tmp_path / "creds"
    creds.write_text(f"{USER}:{PASSWORD}\n")
    state = tmp_path / "state"

    pulled = opendsec(state, "pull", reference, "--creds-file", creds, "--no-tls-verify", "--json")
    assert pulled.returncode == 0, pulled.stderr
    fields = json.loads(pulled.stdout)
    assert (fields["name"], fields["source"], fields["config"]["user"]) == ("lib/x:1", reference, "7")
    assert "image lib/x:1: unpacking layer 1 of 1" in pulled.stderr

    by_stdin = opendsec(
        state, "pull", "mine", reference, "--creds-file", "-", "--no-tls-verify", "--json", stdin=creds.read_text()
    )
    assert json.loads(by_stdin.stdout)["digest"] == fields["digest"]

    tool = opendsec(state, "import", "tool", layout, "--role", "toolkit", "--on", "mine", "--collapse-mb", 0, "--json")
    assert tool.returncode == 1
    assert json.loads(tool.stdout)["error"]["detail"]["field"] == "on"  # It is the very same image.
    assert PASSWORD not in pulled.stderr + pulled.stdout + tool.stderr


@pytest.mark.parametrize(
    ("words", "code", "field"),
    [
        (("pull", "x", "./layout"), "invalid_spec", "source"),
        (("pull", "docker://localhost/x", "--platform", "windows/amd64"), "invalid_spec", "platform"),
        (("pull", "docker://localhost/x", "--authfile", "/gone"), "invalid_spec", "authfile"),
        (("import", "x", "/etc/ssl", "--env", "A"), "invalid_spec", "env"),
        (("import", "x", "/etc/ssl", "--role", "toolkit", "--toolkit", "y"), "invalid_spec", "toolkits"),
    ],
)
def test_what_is_refused_before_any_work(tmp_path: Path, words: tuple[str, ...], code: str, field: str) -> None:
    ended = opendsec(tmp_path / "state", *words, "--json")
    assert ended.returncode == 1, ended.stderr
    error = json.loads(ended.stdout)["error"]
    assert (error["code"], error["detail"]["field"]) == (code, field)
