"""Request ids, keys, errors: what the outermost layer promises for every server."""

from __future__ import annotations

from typing import Any

import pytest
from litestar import get, post
from litestar.params import FromQuery, JSONBody
from tests.unit.server.calling import Answer, call

from opendsec import errors
from opendsec.model.spec import SandboxSpec
from opendsec.server.app import make_app
from opendsec.server.asgi import ASGIApp, ClientGoneError, Scope, body_chunks, query, read_body
from opendsec.server.auth import constant_token
from opendsec.server.front import _request_fields
from opendsec.wire import codec
from opendsec.wire.contracts import CreateRequest

pytestmark = pytest.mark.anyio

TOKEN = "a-token-of-some-length"
GOOD = {"authorization": f"Bearer {TOKEN}"}


@post("/v1/echo")
async def echo(data: JSONBody[CreateRequest]) -> CreateRequest:
    return data


@get("/v1/number")
async def number(limit: FromQuery[int] = 5) -> dict[str, int]:
    return {"limit": limit}


@get("/v1/broken")
async def broken() -> None:
    raise KeyError("a secret the client must not see")


@get("/v1/refused")
async def refused() -> None:
    raise errors.QuotaExceededError("too much", detail={"quota": "cpu"}, remedy="less", sandbox_id="sbx-1")


def app(**given: Any) -> ASGIApp:
    return make_app(
        [echo, number, broken, refused], title="t", version="1", verify=constant_token(TOKEN), max_body=2000, **given
    )


async def test_a_dataclass_goes_in_and_out() -> None:
    request = CreateRequest(spec=SandboxSpec(image="debian", labels={"ü": "é"}))
    answer = await call(app(), "POST", "/v1/echo", body=codec.encode(request), headers=GOOD)
    assert answer.status == 201
    assert codec.decode(answer.body, CreateRequest) == request


async def test_an_error_of_ours_crosses_with_everything_it_knows() -> None:
    answer = await call(app(), "GET", "/v1/refused", headers={**GOOD, "x-request-id": "r1"})
    error = codec.decode_error(answer.body)
    assert isinstance(error, errors.QuotaExceededError)
    assert answer.status == 429
    assert (error.detail, error.remedy, error.retryable) == ({"quota": "cpu"}, "less", True)
    assert (error.request_id, error.sandbox_id) == ("r1", "sbx-1")


async def test_an_unforeseen_exception_is_internal_and_tells_nothing() -> None:
    answer = await call(app(), "GET", "/v1/broken", headers=GOOD)
    assert answer.status == 500
    assert codec.decode_error(answer.body).code == "internal"
    assert b"secret" not in answer.body


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [("GET", "/v1/none", 404, "not_found"), ("GET", "/v1/echo", 405, "bad_request"), ("PUT", "/", 404, "not_found")],
)
async def test_no_such_endpoint(method: str, path: str, status: int, code: str) -> None:
    answer = await call(app(), method, path, headers=GOOD)
    assert (answer.status, codec.decode_error(answer.body).code) == (status, code)


async def test_a_wrong_parameter_is_named() -> None:
    answer = await call(app(), "GET", "/v1/number", query=b"limit=many", headers=GOOD)
    assert (answer.status, codec.decode_error(answer.body).detail) == (422, {"field": "limit"})


@pytest.mark.parametrize("announced", [True, False])
async def test_a_body_above_the_limit_is_413_and_closes(*, announced: bool) -> None:
    body = b" " * 3000
    headers = {**GOOD, **({"content-length": "3000"} if announced else {})}
    answer = await call(app(), "POST", "/v1/echo", body=body, headers=headers)
    error = codec.decode_error(answer.body)
    assert (answer.status, error.code, error.detail["field"]) == (413, "invalid_spec", "body")
    assert answer.header("connection") == "close"


@pytest.mark.parametrize("header", [None, "", "Bearer", f"Basic {TOKEN}", f"Bearer {TOKEN}x", "Bearer \u00fc"])
async def test_without_the_token_nothing_is_reached(header: str | None) -> None:
    headers = {} if header is None else {"authorization": header}
    for path in ("/v1/number", "/v1/none"):
        answer = await call(app(), "GET", path, headers=headers)
        assert (answer.status, codec.decode_error(answer.body).code) == (401, "unauthorized")
    for path in ("/healthz", "/openapi.json"):
        assert (await call(app(), "GET", path, headers=headers)).status == 200


@pytest.mark.parametrize(("given", "taken"), [("abc", True), ("a b", False), ("", False), ("x" * 129, False)])
async def test_a_request_id_is_taken_when_it_is_one(given: str, *, taken: bool) -> None:
    answer = await call(app(), "GET", "/healthz", headers={"x-request-id": given})
    assert (answer.header("x-request-id") == given) is taken
    assert answer.header("x-request-id")


async def test_raw_routes_come_first_and_need_the_token_too() -> None:
    async def raw(_scope: Scope, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 299, "headers": []})
        await send({"type": "http.response.body", "body": b"raw"})

    found = app(raw=lambda scope: raw if scope["path"] == "/v1/number" else None)
    assert (await call(found, "GET", "/v1/number", headers=GOOD)).status == 299
    assert (await call(found, "GET", "/v1/number")).status == 401
    assert (await call(found, "GET", "/v1/refused", headers=GOOD)).status == 429


async def test_an_exception_after_the_start_leaves_the_answer_unfinished() -> None:
    async def raw(_scope: Scope, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"half", "more_body": True})
        raise errors.NodeError("gone")

    answer = await call(app(raw=lambda _scope: raw), "GET", "/v1/x", headers=GOOD)
    assert (answer.body, answer.finished) == (b"half", False)


async def test_a_cut_request_body_is_never_taken_for_a_whole_one() -> None:
    messages = [{"type": "http.request", "body": b"ab", "more_body": True}, {"type": "http.disconnect"}]

    async def receive() -> Any:
        return messages.pop(0)

    with pytest.raises(ClientGoneError):
        await read_body({"headers": []}, receive, limit=10)
    messages[:] = [{"type": "http.request", "body": b"ab", "more_body": True}, {"type": "http.disconnect"}]
    chunks = body_chunks(receive)
    assert await anext(chunks) == b"ab"
    with pytest.raises(ClientGoneError):
        await anext(chunks)


def test_query_keeps_bytes_that_are_no_utf_8_and_refuses_doubles() -> None:
    assert query({"query_string": b"path=%2Fa%20b%FF&x="}) == {"path": "/a b\udcff", "x": ""}
    with pytest.raises(errors.InvalidSpecError, match="twice"):
        query({"query_string": b"a=1&a=2"})


def test_answer_is_unfinished_until_its_last_message() -> None:
    assert not Answer([{"type": "http.response.start", "status": 200, "headers": []}]).finished


@pytest.mark.parametrize(
    ("path", "shown"),
    [
        ("/v1/sandboxes/sbx-a-1", "/v1/sandboxes/sbx-a-1"),
        ("/view/sbx-a-1/secret/vnc", "/view/sbx-a-1/…"),
        ("/view/sbx-a-1", "/view/sbx-a-1/…"),
    ],
)
def test_no_log_tells_what_opens_a_view(path: str, shown: str) -> None:
    fields = _request_fields({"state": {"request_id": "r1"}, "method": "GET", "path": path, "headers": []})
    assert fields["path"] == shown
