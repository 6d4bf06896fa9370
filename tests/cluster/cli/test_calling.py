"""`opendsec fncall` as a user sees it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.cluster.cli.conftest import Cli


@pytest.mark.parametrize(
    ("code", "status", "stdout", "said"),
    [
        ("echo hello; exit 7", 7, b"hello\n", b""),
        ("echo before; sleep 60", 124, b"before\n", b"time limit"),
        ("echo 'open", 2, b"", b"does not compile"),
    ],
)
def test_run_has_the_program_s_output_and_status(
    cli: Cli, tmp_path: Path, code: str, status: int, stdout: bytes, said: bytes
) -> None:
    program = tmp_path / "program.sh"
    program.write_text(code)
    done = cli("fncall", "run", "--wall-time", "0.5", str(program))
    assert (done.returncode, done.stdout) == (status, stdout), done.stderr
    assert said in done.stderr
    assert b"Traceback" not in done.stderr


def test_run_with_input_and_files(cli: Cli, tmp_path: Path) -> None:
    for name, content in (("program.sh", "cat; cat beside"), ("beside", "file")):
        (tmp_path / name).write_text(content)
    done = cli("fncall", "run", "-i", "--file", str(tmp_path / "beside"), str(tmp_path / "program.sh"), stdin=b"in ")
    assert (done.returncode, done.stdout) == (0, b"in file")
    done = cli("fncall", "run", "--json", "--language", "sh", "-", stdin=b"echo x; exit 3")
    assert (done.returncode, json.loads(done.stdout)["run"]["exit_code"]) == (3, 3)


def test_judge_gives_a_verdict_for_each_case(cli: Cli, tmp_path: Path) -> None:
    program, cases = tmp_path / "program.sh", tmp_path / "cases"
    program.write_text("cat")
    cases.mkdir()
    for name, content in (("1.in", "a"), ("1.out", "a\n"), ("2.in", "b"), ("2.ans", "b")):
        (cases / name).write_text(content)
    done = cli("fncall", "judge", "--cases", str(cases), str(program))
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, b"2 of 2 accepted"), done.stderr
    (cases / "2.ans").write_text("c")
    done = cli("fncall", "judge", "--json", "--cases", str(cases), str(program))
    assert done.returncode == 1
    assert [case["verdict"] for case in json.loads(done.stdout)["cases"]] == ["AC", "WA"]
    program.write_text("echo 'open")
    done = cli("fncall", "judge", "--cases", str(cases), str(program))
    assert (done.returncode, done.stdout.count(b"CE")) == (1, 2)
    assert b"unclosed" in done.stderr


def test_a_language_the_platform_has_not(cli: Cli) -> None:
    done = cli("fncall", "run", "--language", "cobol", "-", stdin=b"x")
    assert (done.returncode, b"cobol" in done.stderr) == (125, True)
