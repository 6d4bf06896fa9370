"""Settings name the variable that is wrong; cursors only open what they closed."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opendsec.apiserver.listing import check_filters, decode_cursor, encode_cursor
from opendsec.apiserver.settings import from_environment, parse_edges
from opendsec.errors import InvalidSpecError
from opendsec.server.runner import Address


def test_the_defaults_are_one_machine() -> None:
    settings = from_environment({})
    assert str(settings.listen) == "127.0.0.1:8700"
    assert settings.edges == {"local": Address(path=Path("/run/opendsec/edge-local.sock"))}
    assert settings.database_url == "sqlite:////var/lib/opendsec/apiserver/iam.sqlite3"


def test_edges_by_name_and_address() -> None:
    found = parse_edges("a, b=unix:/x.sock,c=10.0.0.1:1", run_dir=Path("/r"))
    assert found == {
        "a": Address(path=Path("/r/edge-a.sock")),
        "b": Address(path=Path("/x.sock")),
        "c": Address(host="10.0.0.1", port=1),
    }


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("OPENDSEC_LISTEN", "nowhere"),
        ("OPENDSEC_EDGES", "a,a"),
        ("OPENDSEC_EDGES", "a=x"),
        ("OPENDSEC_EDGE_TOKEN", ""),
    ],
)
def test_what_is_wrong_is_named(variable: str, value: str) -> None:
    environment = {"OPENDSEC_EDGES": "a=10.0.0.1:1", "OPENDSEC_EDGE_TOKEN": "x" * 20, variable: value}
    with pytest.raises(InvalidSpecError) as caught:
        from_environment(environment)
    assert caught.value.detail["field"] == variable


@given(edge=st.text(max_size=40), cursor=st.text(max_size=200))
def test_a_cursor_comes_back(edge: str, cursor: str) -> None:
    assert decode_cursor(encode_cursor(edge, cursor)) == (edge, cursor)


@pytest.mark.parametrize("text", ["!", "abc", "é", "eyJhIjoxfQ", "WyJhIiwxXQ", "WyJhIl0", "\udc80", "a" * 5000])
def test_any_other_cursor_is_refused_by_name(text: str) -> None:
    with pytest.raises(InvalidSpecError) as caught:
        decode_cursor(text)
    assert caught.value.detail["field"] == "cursor"


def test_filters() -> None:
    check_filters(labels=["a=b", "a=b=c", "a="], limit=1000)
    for labels, limit in ((["a"], 1), (["=b"], 1), ([], 0), ([], 1001)):
        with pytest.raises(InvalidSpecError):
            check_filters(labels=labels, limit=limit)
