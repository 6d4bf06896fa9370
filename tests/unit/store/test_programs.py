"""Programs: lines as they come, the end kept for errors, nothing left running."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from opendsec.errors import HostCapabilityError, NodeError
from opendsec.store.programs import filtered, find_program, run_program


def test_lines_status_and_tail() -> None:
    lines: list[str] = []
    ended = run_program(
        ["/bin/sh", "-c", "printf 'a\\rb\\n\\nc' ; echo e >&2; exit 3"], timeout_s=10, on_line=lines.append
    )
    assert lines == ["a", "b", "ce"]
    assert (ended.status, ended.tail) == (3, ("a", "b", "ce"))


def test_death_by_signal_is_negative() -> None:
    assert run_program(["/bin/sh", "-c", "kill -9 $$"], timeout_s=10).status == -9


def test_it_sees_only_the_environment_it_is_given() -> None:
    ended = run_program(["/usr/bin/env"], timeout_s=10, environment={"ONLY": "this"})
    assert ended.tail == ("ONLY=this",)


def test_descriptors_arrive_under_their_numbers_whichever_of_ours_are_the_same(tmp_path: Path) -> None:
    ours = []
    for name in ("a", "b"):
        (tmp_path / name).write_text(name)
        ours.append(os.open(tmp_path / name, os.O_RDONLY | os.O_CLOEXEC))
    a, b = ours
    try:
        for given in ({a: b, b: a}, {a: a, b: b}):
            ended = run_program(["/bin/cat", *(f"/dev/fd/{one}" for one in given)], timeout_s=60, fds=given)
            assert (ended.status, ended.tail) == (0, ("".join("ab"[ours.index(one)] for one in given.values()),))
        assert os.read(a, 1) + os.read(b, 1) == b"ab", "ours are what they were"
    finally:
        os.close(a)
        os.close(b)


def test_long_output_keeps_only_its_end() -> None:
    ended = run_program(["/usr/bin/seq", "100000"], timeout_s=10)
    assert ended.tail[-1] == "100000"
    assert len(ended.tail) == 40


def test_a_time_out_ends_the_descendants_too(tmp_path: Path) -> None:
    script = f"sleep 60 & echo $! > {tmp_path}/pid; sleep 60"
    for timeout_s in (0.15, 2.0, 30.0):  # a busy machine may need long for a shell
        with pytest.raises(NodeError, match="sh did not end in time"):
            run_program(["/bin/sh", "-c", script], timeout_s=timeout_s)
        if (tmp_path / "pid").exists() and (tmp_path / "pid").read_text():
            break
    pid = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 30
    while _lives(pid):
        assert time.monotonic() < deadline


def _lives(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def test_a_missing_program_names_its_package() -> None:
    with pytest.raises(HostCapabilityError, match=r"mkfs\.nothing") as caught:
        find_program("mkfs.nothing")
    assert caught.value.remedy == "apt-get install mkfs.nothing"


def test_a_filter_passes_bytes_and_reports_failure(tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(b"abc" * 100_000)
    with (tmp_path / "in").open("rb") as source, filtered(["/bin/cat"], source.fileno()) as output:
        assert output.read() == b"abc" * 100_000
    with pytest.raises(ChildProcessError, match="sh ended with status 4"):
        _read_all(["/bin/sh", "-c", "cat; exit 4"], tmp_path / "in")


def test_a_filter_left_early_is_ended(tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(b"")
    with (tmp_path / "in").open("rb") as source, filtered(["/usr/bin/yes"], source.fileno()) as output:
        assert output.read(2) == b"y\n"
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


def _read_all(argv: list[str], path: Path) -> bytes:
    with path.open("rb") as source, filtered(argv, source.fileno()) as output:
        return output.read()
