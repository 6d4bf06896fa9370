"""Each command of the command line as a user sees it: output, exit status, JSON, and no traceback."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.cluster.cli.conftest import Cli

RUN = ("run", "--backend", "dummy", "debian", "--")


@pytest.mark.parametrize(
    ("words", "status", "stdout"),
    [
        (("echo", "hello"), 0, b"hello\n"),
        (("exit", "7"), 7, b""),
        (("false",), 1, b""),
        (("no-such-program",), 127, b""),
    ],
)
def test_run_has_the_commands_output_and_status(cli: Cli, words: tuple[str, ...], status: int, stdout: bytes) -> None:
    done = cli(*RUN, *words)
    assert (done.returncode, done.stdout) == (status, stdout), done.stderr
    assert b"Traceback" not in done.stderr


def test_run_leaves_no_sandbox(cli: Cli) -> None:
    assert cli(*RUN, "true").returncode == 0
    assert json.loads(cli("ls", "--json").stdout) == []


def test_run_passes_input_on(cli: Cli) -> None:
    data = bytes(range(256)) * 1000
    done = cli("run", "-i", "--backend", "dummy", "debian", "--", "cat", stdin=data)
    assert (done.returncode, done.stdout) == (0, data)


def test_run_without_input_gives_an_empty_one(cli: Cli) -> None:
    assert cli(*RUN, "cat", stdin=b"not for you").stdout == b""


def test_timeout_is_124_and_said(cli: Cli) -> None:
    done = cli("run", "--backend", "dummy", "--timeout", "0.2", "debian", "--", "sleep", "60")
    assert (done.returncode, done.stdout) == (124, b"")
    assert b"timeout" in done.stderr


def test_run_as_json(cli: Cli) -> None:
    answer = json.loads(cli("run", "--json", "--backend", "dummy", "debian", "--", "echo", "x").stdout)
    assert (answer["exit_code"], answer["end_reason"], answer["stdout"]) == (0, "exited", "x\n")


def test_a_mistyped_option_after_the_image_is_a_usage_error(cli: Cli) -> None:
    done = cli("run", "debian", "--jsno", "--", "true")
    assert done.returncode == 2
    assert b"--jsno" in done.stderr


def test_no_platform_is_one_sentence(cli: Cli) -> None:
    done = cli("ls", OPENDSEC_API_URL="http://127.0.0.1:1")
    assert done.returncode == 125
    assert done.stderr.startswith(b"opendsec: ")
    assert b"Traceback" not in done.stderr


def test_an_error_as_json(cli: Cli) -> None:
    done = cli("ls", "--json", OPENDSEC_API_URL="http://127.0.0.1:1")
    assert json.loads(done.stdout)["error"]["code"] == "connect"


def test_a_reader_that_leaves_ends_the_command_quietly(environment: dict[str, str], cli: Cli) -> None:
    argv = [sys.executable, "-m", "opendsec.main", *RUN, "yes"]
    program = subprocess.Popen(argv, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert program.stdout is not None
    assert program.stderr is not None
    assert program.stdout.read(4) == b"y\ny\n"
    program.stdout.close()
    assert program.wait(60) == 141
    assert program.stderr.read() == b""
    program.stderr.close()
    assert json.loads(cli("ls", "--json").stdout) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_stops_the_sandbox(environment: dict[str, str], cli: Cli, number: signal.Signals) -> None:
    argv = [sys.executable, "-m", "opendsec.main", *RUN, "sleep", "600"]
    program = subprocess.Popen(argv, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 20
    while not any(item["running_commands"] for item in json.loads(cli("ls", "--json").stdout)):
        assert time.monotonic() < deadline
    os.kill(program.pid, number)
    out, err = program.communicate(timeout=120)
    assert (program.returncode, out, err) == (128 + number, b"", b"")
    assert json.loads(cli("ls", "--json").stdout) == []


def test_exec_and_sessions(cli: Cli, sandbox: str) -> None:
    assert cli("exec", "--session", "s", sandbox, "--", "cd", "/tmp").returncode == 0
    assert cli("exec", "--session", "s", sandbox, "--", "pwd").stdout == b"/tmp\n"


def test_exec_in_a_sandbox_that_is_not_there(cli: Cli) -> None:
    done = cli("exec", "sbx-local-aaaaaaaaaaaaaaaa", "--", "true")
    assert done.returncode == 125
    assert b"sbx-local-aaaaaaaaaaaaaaaa" in done.stderr


def test_cp_both_ways(cli: Cli, sandbox: str, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    (tree / "sub dir").mkdir(parents=True)
    (tree / "sub dir/a\nb").write_bytes(b"\x00\xff")
    assert cli("cp", str(tree), f"{sandbox}:/w").returncode == 0
    assert cli("cp", f"{sandbox}:/w", str(tmp_path / "back")).returncode == 0
    assert (tmp_path / "back/sub dir/a\nb").read_bytes() == b"\x00\xff"


def test_cp_into_a_directory_keeps_the_name(cli: Cli, sandbox: str, tmp_path: Path) -> None:
    (tmp_path / "note").write_text("x")
    assert cli("cp", str(tmp_path / "note"), f"{sandbox}:/tmp").returncode == 0
    assert cli("exec", sandbox, "--", "cat", "/tmp/note").stdout == b"x"
    (tmp_path / "here").mkdir()
    answer = json.loads(cli("cp", "--json", f"{sandbox}:/tmp/note", str(tmp_path / "here")).stdout)
    assert answer["target"] == str(tmp_path / "here/note")


@pytest.mark.parametrize("words", [("a", "b"), ("sbx-local-a:/x", "sbx-local-b:/y"), ("a", "sbx-local-b:rel")])
def test_cp_between_the_wrong_places(cli: Cli, words: tuple[str, str]) -> None:
    assert cli("cp", *words).returncode == 2


def test_cp_of_what_is_not_there(cli: Cli, sandbox: str, tmp_path: Path) -> None:
    assert cli("cp", f"{sandbox}:/none", str(tmp_path / "x")).returncode == 1
    assert cli("cp", str(tmp_path / "none"), f"{sandbox}:/x").returncode == 1
    assert not (tmp_path / "x").exists()


def test_logs_list_and_show(cli: Cli, sandbox: str) -> None:
    assert cli("exec", sandbox, "--", "echo", "kept").returncode == 0
    commands = json.loads(cli("logs", "--json", sandbox).stdout)
    assert [item["summary"] for item in commands] == ["true", "echo kept"]
    shown = cli("logs", sandbox, commands[1]["command_id"])
    assert (shown.returncode, shown.stdout) == (0, b"kept\n")


def test_ls_by_label_and_stop_by_label(cli: Cli) -> None:
    for label in ("job=a", "job=b"):
        assert cli("run", "--backend", "dummy", "--keep", "-l", label, "debian", "--", "true").returncode == 0
    assert len(cli("ls", "-q", "-l", "job=a").stdout.splitlines()) == 1
    assert len(json.loads(cli("stop", "--json", "-l", "job=a").stdout)) == 1
    assert len(cli("ls", "-q").stdout.splitlines()) == 1
    assert cli("stop", "--all").returncode == 0
    assert cli("ls", "-q").stdout == b""


def test_stop_needs_to_know_what(cli: Cli) -> None:
    assert cli("stop").returncode == 2


def test_bench_measures_everything(cli: Cli) -> None:
    words = ("--creates", "2", "--commands", "3", "--batch", "4", "--json")
    answer = json.loads(cli("bench", "--backend", "dummy", *words).stdout)
    assert [row["count"] for row in answer["latencies"]] == [2, 2, 3, 2, 4]
    assert answer["batch_failed"] == 0
    assert cli("ls", "-q").stdout == b""


def test_shell_needs_a_terminal(cli: Cli) -> None:
    assert cli("shell", "debian").returncode == 2


def test_pause_and_resume_several(cli: Cli, sandbox: str) -> None:
    other = cli("run", "--keep", "--backend", "dummy", "debian").stdout.decode().strip()
    held = cli("pause", sandbox, other, "sbx-local-aaaaaaaaaaaaaaaa")
    assert (sorted(held.stdout.decode().split()), held.returncode) == (sorted([sandbox, other]), 125), held.stderr
    assert b"sbx-local-aaaaaaaaaaaaaaaa" in held.stderr
    assert {item["state"] for item in json.loads(cli("ls", "--json").stdout)} == {"paused"}
    assert cli("resume", sandbox, other).returncode == 0
    again = cli("resume", sandbox, "--json")
    assert (again.returncode, [item["state"] for item in json.loads(again.stdout)]) == (0, ["running"])
    assert cli("stop", other).returncode == 0


def test_ls_shows_the_memory_in_use(cli: Cli, sandbox: str) -> None:
    assert cli("exec", "--session", "s", sandbox, "--", "pwd").returncode == 0
    head, row = cli("ls").stdout.decode().splitlines()
    assert row[head.index("MEMORY") :].split()[0] not in ("-", ""), row
    assert json.loads(cli("ls", "--json").stdout)[0]["memory_bytes"] >= 0
