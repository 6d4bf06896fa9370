"""What is said to the memory server: only an edge that asks says that it closes."""

from __future__ import annotations

import json
import socket

import pytest

from opendsec.vm.userfault import _answer


@pytest.fixture(params=[b"", b"nonsense"], ids=["nothing", "nonsense"])
def said(request: pytest.FixtureRequest) -> bytes:
    return bytes(request.param)


def test_a_peer_that_asks_nothing_closes_nothing(said: bytes) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        with theirs:
            if said:
                theirs.send(said)
        assert _answer(ours, set()) is None


def test_an_edge_that_closes_is_told_how_many_machines_there_are() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        theirs.send(b"{}")
        assert _answer(ours, set()) is True
        assert json.loads(theirs.recv(4096)) == {"machines": 0}
