"""Whatever is sent to whichever endpoint of /openapi.json, the answer is one of ours:

never a 500, never an unknown error, never silence.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.cluster.apiserver.conftest import TOKEN, seed, settings_for

from opendsec.errors import CODES

ROOT = Path(__file__).parents[3]
SPEC: dict[str, Any] = {
    "image": "debian",
    "resources": {"memory_limit_mb": 64, "cpu_cores_limit": 1.5},
    "lifetime": {"ttl_running_stop": 5.0},
    "network_rules": {"*": True},
    "env": {"A": "b"},
    "labels": {"k": "v"},
}
VALID: dict[str, Any] = {
    "/v1/sandboxes": {"spec": SPEC},
    "/v1/sandbox-batches": {"spec": SPEC, "count": 3},
    "/v1/keys": {"project": "default", "role": "member", "title": "t"},
    "/v1/projects": {"name": "p"},
}

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@st.composite
def damaged(draw: st.DrawFn, value: Any) -> Any:
    """A valid body in which one place holds something else, or one name is another."""
    copy = json.loads(json.dumps(value))
    place = copy
    while isinstance(place, dict) and place:
        name = draw(st.sampled_from(sorted(place)))
        inner = place[name]
        if isinstance(inner, dict) and draw(st.booleans()):
            place = inner
            continue
        if draw(st.booleans()):
            place[name] = draw(json_values)
        else:
            place[draw(st.text(max_size=12))] = place.pop(name)
        break
    return copy


@st.composite
def requests(draw: st.DrawFn, operations: list[tuple[str, str]]) -> tuple[str, str, bytes, dict[str, str]]:
    """Method, target, body and headers."""
    method, path = draw(st.sampled_from(operations))
    token = st.text("abcdefghijklmnopqrstuvwxyz234567", min_size=16, max_size=16)
    ids = st.one_of(token.map(lambda tail: f"sbx-local-{tail}"), st.text(min_size=1, max_size=30), st.just("sbx-x-"))
    target = path.replace("{sandbox_id}", _quoted(draw(ids))).replace("{command_id}", "cmd-1")
    target = target.replace("{key_id}", _quoted(draw(st.text(min_size=1, max_size=20))))
    names = st.sampled_from(["limit", "cursor", "label", "state", "path", "offset", "detach", "zzz"])
    query = draw(st.lists(st.tuples(names, st.text(max_size=12)), max_size=3))
    if query:
        target += "?" + "&".join(f"{name}={_quoted(value)}" for name, value in query)
    body = b""
    if method != "GET":
        shaped = damaged(VALID.get(path, {"path": "/x"})).map(lambda value: json.dumps(value).encode())
        body = draw(
            st.one_of(shaped, st.binary(max_size=60), json_values.map(lambda value: json.dumps(value).encode()))
        )
    visible = st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E), min_size=1, max_size=20)
    wanted = st.sampled_from(
        ["Idempotency-Key", "X-OpenDSec-Timeout", "X-Request-Id", "Content-Type", "X-OpenDSec-Project"]
    )
    return method, target, body, draw(st.dictionaries(wanted, visible, max_size=3))


def _quoted(text: str) -> str:
    return "".join(f"%{byte:02X}" for byte in text.encode("utf-8", "surrogatepass"))


def _start(words: list[str], environment: dict[str, str], socket: Path) -> subprocess.Popen[bytes]:
    process = subprocess.Popen([sys.executable, "-m", *words], cwd=ROOT, env={**os.environ, **environment})
    give_up = time.monotonic() + 30
    while not socket.exists():
        assert time.monotonic() < give_up
        assert process.poll() is None
        time.sleep(0.02)
    return process


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """An admin's client of a real apiserver process in front of a double."""
    folder = tmp_path_factory.mktemp("any")
    key = seed(settings_for(folder, "local"))["default"]
    environment = {
        "PYTHONPATH": f"{ROOT}/src",
        "OPENDSEC_LISTEN": f"unix:{folder}/api.sock",
        "OPENDSEC_EDGES": f"local=unix:{folder}/local.sock",
        "OPENDSEC_EDGE_TOKEN": TOKEN,
        "OPENDSEC_DATABASE_URL": f"sqlite:///{folder}/iam.sqlite3",
        "OPENDSEC_LOG_LEVEL": "error",
    }
    edge = ["tests.cluster.apiserver.edge_double", "local", f"{folder}/local.sock", TOKEN]
    processes = [_start(edge, environment, folder / "local.sock")]
    processes.append(_start(["opendsec.apiserver"], environment, folder / "api.sock"))
    transport = httpx.HTTPTransport(uds=str(folder / "api.sock"))
    headers = {"Authorization": f"Bearer {key}"}
    with httpx.Client(transport=transport, base_url="http://api", headers=headers, timeout=20) as client:
        yield client
    for process in reversed(processes):
        process.terminate()
        process.wait(60)


@pytest.fixture(scope="module")
def operations(client: httpx.Client) -> list[tuple[str, str]]:
    """Every method and path of the document, and one that is not in it."""
    paths = client.get("/openapi.json").json()["paths"]
    found = [(method.upper(), path) for path, entry in paths.items() for method in entry]
    return [*sorted(found), ("PATCH", "/v1/nothing")]


@settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_every_answer_is_one_of_ours(
    client: httpx.Client, operations: list[tuple[str, str]], data: st.DataObject
) -> None:
    method, target, body, headers = data.draw(requests(operations))
    answer = client.request(method, target, content=body, headers=headers)
    if answer.status_code < 400:
        return
    error = answer.json()["error"]
    assert error["code"] in CODES, answer.text
    assert (answer.status_code, error["code"]) != (500, "internal"), (method, target, body, headers)
    assert error["message"]
    assert error["request_id"] == answer.headers["x-request-id"]
    if error["code"] == "invalid_spec":
        assert error["detail"]["field"]
