"""File names that are no UTF-8 survive the JSON between the processes."""

from __future__ import annotations

import os

import pytest

from opendsec import errors
from opendsec.model.file import FileKind, FileStat
from opendsec.wire import codec
from opendsec.wire.contracts import FileList, FileRequest


@pytest.mark.parametrize("name", [b"/raw\xff", b"/\xc3", "/\U0001f600\udc80".encode("utf-8", "surrogateescape")])
def test_names_come_back_the_same(name: bytes) -> None:
    path = os.fsdecode(name)
    assert codec.decode(codec.encode(FileRequest(path=path)), FileRequest).path == path
    stat = FileStat(path=path, kind=FileKind.FILE, mode=0o644, size_bytes=1, mtime_s=2.0, uid=3, gid=4)
    assert codec.decode(codec.encode(FileList(items=(stat,))), FileList).items == (stat,)


def test_escaped_text_is_checked_as_strictly_as_other_text() -> None:
    with pytest.raises(errors.InvalidSpecError) as caught:
        codec.decode(b'{"path":"\\udcff","parents":"yes"}', FileRequest)
    assert caught.value.detail["field"] == "parents"
    with pytest.raises(errors.InvalidSpecError):
        codec.decode(b'{"path":"\\udcff"', FileRequest)
    assert codec.decode(b'{"path":"/\\ud83d\\ude00"}', FileRequest).path == "/\U0001f600"
