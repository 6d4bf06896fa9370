"""Errors within answers are rebuilt, or told as the server's fault."""

from __future__ import annotations

import pytest

from opendsec import errors
from opendsec.wire import codec


@pytest.mark.parametrize(
    "fields",
    [{}, {"code": "sandbox"}, {"code": "sandbox", "message": "x", "detail": 5}],
    ids=["empty", "mute", "detail"],
)
def test_what_is_no_error_of_ours_is_the_servers_fault(fields: dict[str, object]) -> None:
    assert isinstance(codec.received_error(fields), errors.ProtocolError)


def test_an_error_comes_back_as_it_was() -> None:
    sent = errors.NotFoundError("gone", detail={"field": "name"})
    again = codec.received_error(codec.error_fields(sent))
    assert (type(again), again.message, again.detail) == (type(sent), sent.message, sent.detail)
