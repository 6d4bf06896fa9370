"""Output on the host: what is kept, what is counted, what the guest may forget."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.unit.edge.edges import until

from opendsec.edge import recorder
from opendsec.edge.recorder import INLINE_BYTES, Budget, OutputStream, RecentOutputs
from opendsec.edge.writer import WriterThread

pytestmark = pytest.mark.anyio


@pytest.fixture
async def writer() -> AsyncIterator[WriterThread]:
    async with WriterThread("test") as one:
        yield one


def stream(root: Path, writer: WriterThread, *, limit: int = 1 << 30, budget: int = 1 << 30) -> OutputStream:
    return OutputStream(str(root / "out" / "1.1"), limit=limit, budget=Budget(budget), writer=writer)


def nothing() -> None:
    """Nobody to tell."""


def content(one: OutputStream) -> bytes:
    found = bytearray()
    while data := one.read_now(len(found)):
        found += data
    if len(found) < one.kept:
        found += one.read_file(len(found))
    return bytes(found)


async def test_small_output_stays_in_memory_and_is_not_safe(tmp_path: Path, writer: WriterThread) -> None:
    one = stream(tmp_path, writer)
    one.record(0, b"hello", on_safe=nothing)
    assert (one.total, one.kept, one.safe(), one.inline()) == (5, 5, 0, b"hello")
    assert not (tmp_path / "out").exists()


async def test_large_output_goes_to_a_file_and_then_is_safe(tmp_path: Path, writer: WriterThread) -> None:
    one = stream(tmp_path, writer)
    chunk = os.urandom(INLINE_BYTES)
    for index in range(3):
        one.record(index * INLINE_BYTES, chunk, on_safe=nothing)
    await one.settle()
    assert one.safe() == one.kept == one.total == 3 * INLINE_BYTES
    assert (tmp_path / "out" / "1.1").read_bytes() == chunk * 3
    assert one.inline() is None
    assert content(one) == chunk * 3


async def test_chunks_sent_again_are_not_recorded_twice(tmp_path: Path, writer: WriterThread) -> None:
    one = stream(tmp_path, writer)
    one.record(0, b"abcdef", on_safe=nothing)
    one.record(3, b"defgh", on_safe=nothing)
    one.record(0, b"abc", on_safe=nothing)
    assert one.inline() == b"abcdefgh"


async def test_beyond_the_limit_bytes_are_counted_not_kept(tmp_path: Path, writer: WriterThread) -> None:
    told: list[int] = []
    one = stream(tmp_path, writer, limit=10)
    one.record(0, b"x" * 8, on_safe=nothing)
    one.record(8, b"y" * 8, on_safe=lambda: told.append(one.safe()))
    await until(lambda: bool(told) and told[-1] == 16)
    assert (one.total, one.kept) == (16, 10)
    assert content(one) == b"x" * 8 + b"yy"


async def test_limit_of_zero_never_stalls_the_guest(tmp_path: Path, writer: WriterThread) -> None:
    told: list[int] = []
    one = stream(tmp_path, writer, limit=0)
    one.record(0, b"x" * 1000, on_safe=lambda: told.append(one.safe()))
    await until(lambda: told == [1000])
    assert one.inline() == b""


async def test_a_prefix_is_kept_even_if_later_bytes_would_fit(tmp_path: Path, writer: WriterThread) -> None:
    one = stream(tmp_path, writer)
    one.record(0, b"abc", on_safe=nothing)
    one.skip_to(100)
    one.record(100, b"later", on_safe=nothing)
    await one.settle()
    assert (one.total, one.kept, content(one)) == (105, 3, b"abc")


async def test_sandbox_budget_counts_files_not_short_answers(tmp_path: Path, writer: WriterThread) -> None:
    budget = Budget(INLINE_BYTES)
    first, second = (
        OutputStream(str(tmp_path / "out" / f"{number}.1"), limit=1 << 30, budget=budget, writer=writer)
        for number in (1, 2)
    )
    first.record(0, b"x" * 3 * INLINE_BYTES, on_safe=nothing)
    second.record(0, b"short", on_safe=nothing)
    await first.settle()
    assert first.kept < first.total
    assert second.inline() == b"short"


async def test_full_disk_drops_the_rest_and_says_so(
    tmp_path: Path, writer: WriterThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = stream(tmp_path, writer)
    one.record(0, b"a" * 2 * INLINE_BYTES, on_safe=nothing)
    await one.settle()

    def full(path: str, position: int, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(recorder, "write_at", full)
    told: list[int] = []
    one.record(2 * INLINE_BYTES, b"b" * 100, on_safe=lambda: told.append(one.safe()))
    await until(lambda: bool(told) and told[-1] == 2 * INLINE_BYTES + 100)
    assert (one.kept, one.total) == (2 * INLINE_BYTES, 2 * INLINE_BYTES + 100)
    assert one._budget.left == (1 << 30) - 2 * INLINE_BYTES


async def test_new_edge_continues_at_the_end_of_the_file(tmp_path: Path, writer: WriterThread) -> None:
    before = stream(tmp_path, writer)
    before.record(0, b"a" * 2 * INLINE_BYTES, on_safe=nothing)
    await before.settle()
    after = stream(tmp_path, writer)
    after.resume_from_file()
    assert after.total == after.kept == after.safe() == 2 * INLINE_BYTES
    after.record(2 * INLINE_BYTES, b"b", on_safe=nothing)
    await after.settle()
    assert content(after)[-2:] == b"ab"


async def test_a_long_stream_holds_little_memory(tmp_path: Path, writer: WriterThread) -> None:
    one = stream(tmp_path, writer)
    chunk = b"z" * 256 * 1024
    for index in range(40):
        one.record(index * len(chunk), chunk, on_safe=nothing)
        await one.settle()
    assert sum(len(data) for _, data in one._recent) <= recorder.RECENT_BYTES + len(chunk)
    assert one.kept == 40 * len(chunk)


async def test_old_inline_outputs_leave_memory(tmp_path: Path, writer: WriterThread) -> None:
    recent = RecentOutputs(cap_bytes=10)
    first, second = stream(tmp_path, writer), stream(tmp_path, writer)
    for one in (first, second):
        one.record(0, b"12345678", on_safe=nothing)
        recent.add(one)
    assert first.forgotten
    assert not second.forgotten
    first.remember(b"12345678")
    assert content(first) == b"12345678"
