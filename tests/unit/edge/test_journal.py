"""The durable record of a sandbox."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from opendsec.edge import journal
from opendsec.edge.journal import Created, Ended, Intent, Journal, Result
from opendsec.edge.writer import WriterThread
from opendsec.errors import DiskFullError, NodeError
from opendsec.model.command import CommandResult, EndReason, ExecRequest
from opendsec.model.ids import CommandId, SandboxId
from opendsec.model.image import ImageConfig
from opendsec.model.spec import SandboxSpec

pytestmark = pytest.mark.anyio


def first(sandbox_id: str = "sbx-local-aaaaaaaaaaaaaaaa") -> Created:
    return Created(
        sandbox_id=SandboxId(sandbox_id),
        project="p",
        spec=SandboxSpec(image="debian", env={"A": "ü\n"}),
        image_digest="sha256:0",
        image_config=ImageConfig(env={"PATH": "/bin"}),
        slot=3,
        created_at=1.0,
        created_mono_s=2.0,
    )


def intent(number: int) -> Intent:
    return Intent(number=number, request=ExecRequest(script="true"), digest="", started_at=1.0)


async def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    own = tmp_path / "own"
    async with WriterThread("test") as writer:
        file = Journal(own, writer)
        await file.create(first(), directories=(own, own / "box"))
        positions = [await file.append(intent(number)) for number in range(2)]
        file.close_soon()
        positions.append(await file.append(intent(2)))
        file.close_soon()
    lines = journal.read(own)
    assert [record for _, record in lines] == [first(), intent(0), intent(1), intent(2)]
    assert [position for position, _ in lines][1:] == positions
    assert file.read_at(positions[1]) == intent(1)


async def test_output_bytes_survive_exactly(tmp_path: Path) -> None:
    own = tmp_path / "own"
    raw = bytes(range(256)) * 3
    result = CommandResult(
        command_id=CommandId("cmd-1"),
        exit_code=None,
        end_reason=EndReason.SANDBOX_ENDED,
        duration_s=1.0,
        stdout_bytes_total=len(raw),
        stderr_bytes_total=0,
        truncated=False,
    )
    line = Result(number=1, result=result, stdout=raw, stderr=None, stdout_kept=len(raw), stderr_kept=0)
    async with WriterThread("test") as writer:
        file = Journal(own, writer)
        await file.create(first(), directories=(own,))
        await file.append(line)
        file.close_soon()
    assert journal.read(own)[-1][1] == line


@given(cut=st.integers(1, 400))
def test_torn_last_line_never_counted(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    own = tmp_path_factory.mktemp("own")
    whole = journal.encode(first())
    torn = journal.encode(intent(1))[:-1][:cut]
    (own / "journal").write_bytes(whole + torn)
    assert [record for _, record in journal.read(own)] == [first()]
    with (own / "journal").open("ab") as file:
        file.write(journal.encode(Ended(ended_at=5.0)))
    assert [record for _, record in journal.read(own)] == [first(), Ended(ended_at=5.0)]


def test_a_bad_line_in_the_middle_is_told_with_its_place_and_set_aside(tmp_path: Path) -> None:
    content = journal.encode(first()) + b"{}\n" + journal.encode(intent(1))
    (tmp_path / "journal").write_bytes(content)
    with pytest.raises(journal.JournalError, match="line 2") as raised:
        journal.read(tmp_path)
    assert raised.value.before == [(0, first())]
    assert journal.read(tmp_path) == [(0, first())]
    assert (tmp_path / "journal.damaged").read_bytes() == content


def test_lines_and_fields_of_a_later_edge_are_passed_over(tmp_path: Path) -> None:
    later = journal.encode(first()).replace(b'{"type":"created",', b'{"type":"created","mood":"good",')
    unknown = b'{"type":"parked","where":"far","deep":{"x":[1,"\\udcff"]}}\n'
    (tmp_path / "journal").write_bytes(later + unknown + journal.encode(intent(1)))
    lines = journal.read(tmp_path)
    assert [record for _, record in lines] == [first(), intent(1)]
    assert lines[1][0] == len(later) + len(unknown)


def test_a_journal_of_a_higher_version_is_refused_with_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "journal").write_bytes(journal.encode(first()).replace(b'"version":1', b'"version":2'))
    with pytest.raises(journal.JournalError, match="version 2") as raised:
        journal.read(tmp_path)
    assert "newer edge" in raised.value.remedy


async def test_bytes_that_are_no_utf8_survive(tmp_path: Path) -> None:
    own = tmp_path / "own"
    asked = ExecRequest(argv=("cat", "/raw\udcff", 'a "\\ud800" in a script'), env={"A": "\udc80"}, cwd="/\udcfe")
    created = msgspec.structs.replace(first(), image_config=ImageConfig(env={"B": "1 \udce9"}))
    line = Intent(number=1, request=asked, digest="", started_at=1.0)
    async with WriterThread("test") as writer:
        file = Journal(own, writer)
        await file.create(created, directories=(own,))
        position = await file.append(line)
        file.close_soon()
    assert [record for _, record in journal.read(own)] == [created, line]
    assert file.read_at(position) == line


async def test_full_disk_is_told_and_takes_the_line_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tmp_path / "own"
    real = os.write

    def half(fd: int, data: bytes | memoryview) -> int:
        if len(data) > 200:
            return real(fd, bytes(data[:100]))
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    async with WriterThread("test") as writer:
        file = Journal(own, writer)
        await file.create(first(), directories=(own,))
        monkeypatch.setattr(os, "write", half)
        with pytest.raises(DiskFullError) as raised:
            await file.append(intent(1))
        monkeypatch.undo()
        await file.append(intent(2))
        file.close_soon()
    assert raised.value.retryable
    assert [record for _, record in journal.read(own)] == [first(), intent(2)]


async def test_full_disk_at_the_first_line_leaves_no_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tmp_path / "own"

    def full(fd: int, data: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    async with WriterThread("test") as writer:
        monkeypatch.setattr(os, "write", full)
        with pytest.raises(DiskFullError):
            await Journal(own, writer).create(first(), directories=(own, own / "box"))
        monkeypatch.undo()
    assert list(tmp_path.iterdir()) == []


async def test_other_failures_are_node_errors(tmp_path: Path) -> None:
    async with WriterThread("test") as writer:
        with pytest.raises(NodeError) as raised:
            await Journal(tmp_path / "missing", writer).append(intent(1))
    assert raised.value.detail["errno"] == "ENOENT"


async def test_jobs_keep_their_order_and_leaving_waits_for_them() -> None:
    seen: list[int] = []
    async with WriterThread("test") as writer:
        for number in range(1000):
            writer.run(lambda number=number: seen.append(number))  # type: ignore[misc]
    assert seen == list(range(1000))
