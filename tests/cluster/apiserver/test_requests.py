"""What the management endpoints answer, and what they say to requests that are wrong."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from tests.cluster.apiserver.conftest import Start

from opendsec.wire import codec
from opendsec.wire.contracts import MAX_JSON_BODY

pytestmark = pytest.mark.anyio

SPEC: dict[str, Any] = {"spec": {"image": "debian"}}


def error_of(response: httpx.Response) -> tuple[int, str, str]:
    """Status, code and the field named."""
    fields = response.json()["error"]
    assert fields["request_id"] == response.headers["x-request-id"]
    return response.status_code, fields["code"], str(fields["detail"].get("field", ""))


async def test_create_get_list_and_delete(start: Start) -> None:
    async with start("local") as platform:
        made = await platform.client.post("/v1/sandboxes", json=SPEC)
        assert made.status_code == 201
        sandbox_id = made.json()["sandbox_id"]
        assert sandbox_id.startswith("sbx-local-")
        assert (await platform.client.get(f"/v1/sandboxes/{sandbox_id}")).json() == made.json()
        listed = (await platform.client.get("/v1/sandboxes")).json()
        assert [item["sandbox_id"] for item in listed["items"]] == [sandbox_id]
        assert listed["cursor"] == ""
        stopped = await platform.client.delete(f"/v1/sandboxes/{sandbox_id}")
        assert stopped.json()["state"] == "stopped"
        assert (await platform.client.get("/v1/sandboxes?state=running")).json()["items"] == []


@pytest.mark.parametrize("path", ["/v1/sandboxes", "/v1/sandbox-batches"])
async def test_a_sandbox_of_the_backend_of_calls_is_refused_with_what_to_use(start: Start, path: str) -> None:
    async with start("local") as platform:
        wanted = {"spec": {"image": "debian", "backend": "fncall"}, **({"count": 2} if "batches" in path else {})}
        refused = await platform.client.post(path, json=wanted)
        assert error_of(refused) == (501, "unsupported", "backend")
        assert "has no sandboxes" in refused.json()["error"]["message"]
        assert "POST /v1/fncalls" in refused.json()["error"]["remedy"]
        assert not platform.edges["local"].requests


async def test_request_id_is_taken_echoed_and_passed_on(start: Start) -> None:
    async with start("local") as platform:
        made = await platform.client.post("/v1/sandboxes", json=SPEC, headers={"X-Request-Id": "abc-1"})
        assert made.headers.get_list("x-request-id") == ["abc-1"]
        assert platform.edges["local"].requests[-1][2]["x-request-id"] == "abc-1"
        bad = await platform.client.get("/healthz", headers={"X-Request-Id": "has space"})
        assert bad.headers["x-request-id"] not in ("", "has space")


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "spec"),
        ({"spec": {}}, "image"),
        ({"spec": {"image": "debian", "colour": 1}}, "spec.colour"),
        ({**SPEC, "extra": 1}, "extra"),
        ({"spec": {"image": 5}}, "spec.image"),
        ({"spec": {"image": "../etc"}}, "image"),
        ({"spec": {"image": "debian", "resources": {"memory_limit_mb": 1}}}, "memory_limit_mb"),
        ({"spec": {"image": "debian", "resources": {"memory_limit_mb": "64"}}}, "spec.resources.memory_limit_mb"),
        ({"spec": {"image": "debian", "lifetime": {"ttl_running_stop": 0}}}, "ttl_running_stop"),
        ({"spec": {"image": "debian"}, "sandbox_id": "sbx-local-aaaaaaaaaaaaaaaa"}, "sandbox_id"),
    ],
)
async def test_a_wrong_field_is_named_and_nothing_is_started(start: Start, body: Any, field: str) -> None:
    async with start("local") as platform:
        status, code, named = error_of(await platform.client.post("/v1/sandboxes", json=body))
        assert (status, code) == (422, "invalid_spec")
        assert named in (field, f"spec.{field}")
        assert platform.edges["local"].requests == []


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b'{"spec"', b"\xff\xfe", b"[" * 200_000])
async def test_a_body_that_is_no_request_is_refused(start: Start, body: bytes) -> None:
    async with start("local") as platform:
        assert error_of(await platform.client.post("/v1/sandboxes", content=body)) == (422, "invalid_spec", "body")


async def test_an_oversized_body_is_refused_without_reading_it_all(start: Start) -> None:
    async with start("local") as platform:
        big = b" " * (MAX_JSON_BODY + 1)
        assert error_of(await platform.client.post("/v1/sandboxes", content=big)) == (413, "invalid_spec", "body")

        async def endless() -> Any:
            while True:
                yield b" " * 65536

        answer = await platform.client.post("/v1/sandboxes", content=endless())
        assert error_of(answer) == (413, "invalid_spec", "body")


@pytest.mark.parametrize("value", ["", "Bearer", "Basic abc", "Bearer odk_wrong", "Bearer " + "x" * 5000])
async def test_no_key_or_a_wrong_one(start: Start, value: str) -> None:
    async with start("local") as platform:
        headers = {"Authorization": value}
        for path in ("/v1/sandboxes", "/v1/sandboxes/sbx-local-aaaaaaaaaaaaaaaa", "/v1/keys", "/nothing"):
            answer = await platform.client.get(path, headers=headers)
            assert error_of(answer)[:2] == (401, "unauthorized")
        assert (await platform.client.get("/healthz", headers=headers)).text == "ok"
        assert platform.edges["local"].requests == []


async def test_foreign_unknown_and_malformed_ids(start: Start) -> None:
    async with start("local") as platform:
        made = (await platform.client.post("/v1/sandboxes", json=SPEC)).json()["sandbox_id"]
        foreign = await platform.client.get(f"/v1/sandboxes/{made}", headers=platform.as_project("other"))
        assert error_of(foreign)[:2] == (404, "not_found")
        foreign = await platform.client.delete(f"/v1/sandboxes/{made}", headers=platform.as_project("other"))
        assert error_of(foreign)[:2] == (404, "not_found")
        unknown = await platform.client.get("/v1/sandboxes/sbx-elsewhere-aaaaaaaaaaaaaaaa")
        assert error_of(unknown) == (404, "not_found", "sandbox_id")
        for bad in ("nonsense", "sbx-local-", "sbx-LOCAL-aaaaaaaaaaaaaaaa", "sbx-local-aaaaaaaaaaaaaaaa.", "%00"):
            answer = await platform.client.get(f"/v1/sandboxes/{bad}")
            assert error_of(answer) == (422, "invalid_spec", "sandbox_id")


async def test_a_client_cannot_choose_its_project(start: Start) -> None:
    async with start("local") as platform:
        headers = {**platform.as_project("other"), "X-OpenDSec-Project": "default"}
        made = await platform.client.post("/v1/sandboxes", json=SPEC, headers=headers)
        assert made.json()["project"] == "other"
        seen = await platform.client.get(f"/v1/sandboxes/{made.json()['sandbox_id']}", headers=headers)
        assert seen.json()["project"] == "other"


async def test_unknown_paths_and_methods(start: Start) -> None:
    async with start("local") as platform:
        assert error_of(await platform.client.get("/v2/sandboxes"))[:2] == (404, "not_found")
        assert error_of(await platform.client.put("/v1/sandboxes"))[:2] == (405, "bad_request")
        assert error_of(await platform.client.get("/v1/sandboxes?limit=0")) == (422, "invalid_spec", "limit")
        assert error_of(await platform.client.get("/v1/sandboxes?limit=ten")) == (422, "invalid_spec", "limit")
        assert error_of(await platform.client.get("/v1/sandboxes?label=nope")) == (422, "invalid_spec", "label")
        assert error_of(await platform.client.get("/v1/sandboxes?lable=a=b")) == (422, "invalid_spec", "lable")
        assert error_of(await platform.client.get("/v1/sandboxes?cursor=!!")) == (422, "invalid_spec", "cursor")


@pytest.mark.parametrize("header", ["X-OpenDSec-Timeout", "Idempotency-Key"])
@pytest.mark.parametrize("value", ["", "a b", "-1\xe9"])
async def test_bad_headers_are_named(start: Start, header: str, value: str) -> None:
    async with start("local") as platform:
        headers = [(header.encode(), value.encode("latin-1"))]
        answer = await platform.client.post("/v1/sandboxes", json=SPEC, headers=headers)
        status, code, field = error_of(answer)
        assert (status, code) == (422, "invalid_spec")
        assert field.lower() == header.lower()


async def test_keys_and_projects_are_for_admins(start: Start) -> None:
    async with start("local") as platform:
        assert (await platform.client.post("/v1/projects", json={"name": "third"})).status_code == 201
        again = await platform.client.post("/v1/projects", json={"name": "third"})
        assert error_of(again)[:2] == (409, "conflict")
        assert error_of(await platform.client.post("/v1/projects", json={"name": "No"}))[2] == "project"
        made = (await platform.client.post("/v1/keys", json={"project": "third", "title": "ci"})).json()
        assert made["key"].startswith("odk_")
        as_third = {"Authorization": f"Bearer {made['key']}"}
        assert (await platform.client.get("/v1/sandboxes", headers=as_third)).status_code == 200
        for method, path in (("GET", "/v1/keys"), ("GET", "/v1/projects"), ("DELETE", "/v1/keys/key-x")):
            answer = await platform.client.request(method, path, headers=as_third)
            assert error_of(answer)[:2] == (403, "forbidden")
        listed = (await platform.client.get("/v1/keys")).text
        assert made["key"] not in listed
        assert made["record"]["key_id"] in listed
        gone = await platform.client.delete(f"/v1/keys/{made['record']['key_id']}")
        assert gone.status_code == 204
        assert error_of(await platform.client.get("/v1/sandboxes", headers=as_third))[:2] == (401, "unauthorized")
        assert error_of(await platform.client.delete("/v1/keys/key-x")) == (404, "not_found", "key_id")


async def test_listing_crosses_edges_with_a_cursor(start: Start) -> None:
    async with start("a", "b", "c") as platform:
        body = {"spec": {"image": "debian", "labels": {"run": "1"}}, "count": 30}
        await platform.client.post("/v1/sandbox-batches", json=body)
        await platform.client.post("/v1/sandboxes", json=SPEC)
        assert all(double.live >= 10 for double in platform.edges.values())
        seen: list[str] = []
        cursor = ""
        while True:
            params = {"label": "run=1", "limit": "7", "cursor": cursor}
            page = (await platform.client.get("/v1/sandboxes", params=params)).json()
            assert len(page["items"]) <= 7
            seen += [item["sandbox_id"] for item in page["items"]]
            cursor = page["cursor"]
            if not cursor:
                break
        assert len(seen) == len(set(seen)) == 30
        assert not any("usage" in target for _, target, _ in platform.edges["a"].requests)
        assert (await platform.client.get("/v1/sandboxes?usage=true")).status_code == 200
        assert "usage=true" in platform.edges["a"].requests[-1][1]
        assert error_of(await platform.client.get("/v1/sandboxes?usage=odd"))[2] == "usage"


async def test_images_of_all_edges_each_once(start: Start) -> None:
    async with start("a", "b") as platform:
        platform.edges["b"].images = ("debian", "alpine")
        items = (await platform.client.get("/v1/images")).json()["items"]
        assert [item["name"] for item in items] == ["alpine", "debian"]


async def test_a_full_edge_passes_the_sandbox_on_and_no_room_is_said_edge_by_edge(start: Start) -> None:
    async with start("a", "b") as platform:
        platform.edges["a"].capacity = 0
        made = await platform.client.post("/v1/sandboxes", json=SPEC)
        assert made.json()["edge"] == "b"
        platform.edges["b"].capacity = 1
        answer = await platform.client.post("/v1/sandboxes", json=SPEC)
        assert error_of(answer)[:2] == (503, "unschedulable")
        assert set(answer.json()["error"]["detail"]["reasons"]) == {"a", "b"}
        missing = await platform.client.post("/v1/sandboxes", json={"spec": {"image": "nope"}})
        assert error_of(missing)[:2] == (404, "image_not_found")


async def test_openapi_describes_every_endpoint_of_the_contract(start: Start) -> None:
    async with start("local") as platform:
        schema = (await platform.client.get("/openapi.json", headers={"Authorization": ""})).json()
        paths = schema["paths"]
        operations = sum(len(entry) for entry in paths.values())
        assert operations >= 30
        assert "requestBody" in paths["/v1/sandboxes/{sandbox_id}/commands"]["post"]
        assert "ExecRequest" in schema["components"]["schemas"]
        for entry in paths.values():
            for operation in entry.values():
                assert "default" in operation["responses"]
                assert "400" not in operation["responses"]
        assert codec.encode(schema)
