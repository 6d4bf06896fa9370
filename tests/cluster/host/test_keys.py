"""`opendsec keys` against a platform that runs: made, listed, used for what their role allows, revoked at once."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.cluster.host.test_up import Machine
from tests.ports import free_port

SPEC = {"spec": {"image": "any", "backend": "dummy"}}


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    machine = Machine(tmp_path, free_port())
    started = machine.opendsec("up", "-d")
    try:
        assert started.returncode == 0, started.stderr
        yield machine
    finally:
        stopped = machine.opendsec("down")
        assert stopped.returncode == 0, stopped.stderr


def asks(machine: Machine, key: str) -> httpx.Client:
    return httpx.Client(
        base_url=f"http://127.0.0.1:{machine.port}", headers={"Authorization": f"Bearer {key}"}, timeout=50
    )


def code_of(answer: httpx.Response) -> tuple[int, str]:
    fields: dict[str, Any] = answer.json()["error"]
    return answer.status_code, fields["code"]


def test_a_key_does_what_its_role_allows_until_it_is_revoked(machine: Machine) -> None:
    assert machine.opendsec("keys", "new-project", "team-1").stdout == "team-1\n"
    made = machine.opendsec("keys", "create", "--role", "runner", "--project", "team-1", "--title", "rollouts")
    key = made.stdout.strip()
    assert key.startswith("odk_")
    assert "runner of project team-1" in made.stderr
    with asks(machine, key) as client:
        assert client.post("/v1/sandboxes", json=SPEC).json()["project"] == "team-1"
        assert code_of(client.get("/v1/keys")) == (403, "forbidden")
        assert code_of(client.delete("/v1/images", params={"image": "any"})) == (403, "forbidden")
        refused = machine.opendsec("keys", "ls", OPENDSEC_API_URL=str(client.base_url), OPENDSEC_API_KEY=key)
        assert "may not administer" in refused.stderr
        listed = machine.opendsec("keys", "ls", "--json")
        assert key not in listed.stdout
        (record,) = [one for one in json.loads(listed.stdout) if one["project"] == "team-1"]
        assert (record["role"], record["title"]) == ("runner", "rollouts")
        assert client.get("/v1/sandboxes").status_code == 200
        revoked = machine.opendsec("keys", "revoke", record["key_id"])
        assert (revoked.returncode, revoked.stdout) == (0, record["key_id"] + "\n"), revoked.stderr
        assert code_of(client.get("/v1/sandboxes")) == (401, "unauthorized")
    assert "no key" in machine.opendsec("keys", "revoke", record["key_id"]).stderr
