"""Long reads are answered piece by piece, however many pieces there are."""

from __future__ import annotations

import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from opendsec.linux import fanotify
from opendsec.store.chunks import CHUNK_BYTES
from opendsec.store.loading import fanotify_filling
from opendsec.store.loading.fanotify_filling import Front, _Filled, _Reading
from opendsec.store.loading.fanotify_group import Place
from opendsec.store.loading.fanotify_journal import Journal


class HereAlready:
    """A reader that has every chunk in its cache, so it answers at once, in the thread that asked."""

    def read(self, _offset: int, _size: int, reply: Any) -> None:
        reply.give()


def test_a_read_of_thousands_of_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fanotify_filling, "PIECE_BYTES", CHUNK_BYTES)
    place = Place(run=tmp_path / "run", files=tmp_path / "files")
    place.make()
    group, kernel = socket.socketpair()
    with group, kernel:
        kernel.settimeout(20)
        front = Front(group.fileno(), place, Journal(place.run / "journal"))
        served: Any = SimpleNamespace(reader=HereAlready())
        filled = _Filled(served=served, path=tmp_path / "x", asks_itself=False, is_whole=False)
        reading = _Reading(front=front, filled=filled, number=7, is_open=False, offset=0, end=3000 * CHUNK_BYTES)
        reading.step()
        assert kernel.recv(100) == fanotify.allow(7)
        assert len(filled.right) == 3000
