"""Events are read exactly, and what is none is refused."""

from __future__ import annotations

import errno
import struct

import pytest

from opendsec.linux.fanotify import Request, allow, deny, parse

PRE_ACCESS = 0x100000


def event(*, fd: int = 7, mask: int = PRE_ACCESS, version: int = 3, records: bytes = b"") -> bytes:
    return struct.pack("=IBBHQii", 24 + len(records), version, 0, 24, mask, fd, 42) + records


def range_record(offset: int, count: int, kind: int = 6) -> bytes:
    return struct.pack("=BBHIQQ", kind, 0, 24, 0, offset, count)


def test_several_events_of_one_read() -> None:
    content = event(records=range_record(4096, 102_400)) + event(fd=8, records=range_record(1 << 40, 1))
    assert parse(content) == (
        Request(fd=7, pid=42, offset=4096, count=102_400),
        Request(fd=8, pid=42, offset=1 << 40, count=1),
    )


def test_records_of_another_kind_are_passed_over() -> None:
    content = event(records=struct.pack("=BBHI", 9, 0, 8, 0) + range_record(1, 2))
    assert parse(content)[0].offset == 1


def test_an_event_without_a_range_means_everything() -> None:
    assert parse(event()) == (Request(fd=7, pid=42, offset=0, count=0),)


def test_events_of_another_kind_are_passed_over() -> None:
    assert parse(event(mask=0x1)) == ()
    assert parse(b"") == ()


@pytest.mark.parametrize(
    "content",
    [
        b"\0" * 23,
        event(version=4),
        event()[:-1] + b"",
        struct.pack("=IBBHQii", 10, 3, 0, 24, PRE_ACCESS, 7, 1),
        struct.pack("=IBBHQii", 200, 3, 0, 24, PRE_ACCESS, 7, 1),
        event(records=struct.pack("=BBH", 6, 0, 4)),
        event(records=struct.pack("=BBH", 6, 0, 0)),
        event(records=struct.pack("=BBH", 6, 0, 99)),
    ],
)
def test_what_is_no_event_is_refused(content: bytes) -> None:
    with pytest.raises(ValueError, match=r"fanotify|bytes"):
        parse(content)


def test_answers_name_the_descriptor_and_a_reason_the_kernel_takes() -> None:
    assert allow(5) == struct.pack("=iI", 5, 1)
    assert deny(5) == struct.pack("=iI", 5, 2 | errno.EIO << 24)
    assert deny(5, errno.ENOSPC) == struct.pack("=iI", 5, 2 | errno.ENOSPC << 24)
    assert deny(5, errno.ETIMEDOUT) == deny(5, errno.EIO)
