"""Reads of a file that is to be served: handed over when it is, EIO when that takes too long, nobody waits twice."""

from __future__ import annotations

import errno
import time

from tests.unit.store.loading.faulty import Answer

from opendsec.linux.fuse import File
from opendsec.store.loading.early import EarlyReads
from opendsec.store.loading.engine import Answer as AnyAnswer

FILE = File(number=7, name="f", size_bytes=100)


def test_reads_are_handed_over_when_the_file_is_served() -> None:
    early = EarlyReads(60.0)
    assert not early.keep(FILE, 0, 10, Answer())
    early.expect(FILE)
    assert early.file(7) is FILE
    answers = [Answer(), Answer()]
    assert all(early.keep(FILE, place, 10, answer) for place, answer in enumerate(answers))

    def read(offset: int, _size: int, reply: AnyAnswer) -> None:
        reply.give(b"at %d" % offset)

    early.served(7, read)
    assert [answer.wait().content for answer in answers] == [b"at 0", b"at 1"]
    assert early.file(7) is None
    assert not early.keep(FILE, 0, 10, Answer())


def test_who_comes_after_one_that_waited_in_vain_does_not_wait() -> None:
    early = EarlyReads(60.0)
    early.expect(FILE)
    first, second = Answer(), Answer()
    assert early.keep(FILE, 0, 10, first)
    early.end_overdue(time.monotonic())
    assert not first.complete.is_set()
    early.end_overdue(time.monotonic() + 61)
    assert first.wait().error == errno.EIO
    assert early.keep(FILE, 0, 10, second)
    assert second.complete.is_set()
    assert second.error == errno.EIO
