"""What is read from the command line: places, pairs, and which --json is ours."""

from __future__ import annotations

from importlib.metadata import version

import pytest
import typer

from opendsec.cli.copying import Inside, parse_place
from opendsec.cli.listing import state_of
from opendsec.cli.options import pairs, run_args
from opendsec.cli.session import first_cause
from opendsec.errors import InvalidSpecError
from opendsec.main import app_for, asks_for_json, main
from opendsec.model.command import CommandResult, CommandStatus
from opendsec.model.ids import CommandId
from opendsec.model.spec import BackendKind


@pytest.mark.parametrize("text", ["a", "./sbx-x/y:z", "dir/file:1", "/abs:/path", "C:/x"])
def test_a_path_here(text: str) -> None:
    assert parse_place(text) == text


def test_a_path_inside_may_hold_colons() -> None:
    assert parse_place("sbx-local-abc:/a:b c") == Inside(sandbox_id="sbx-local-abc", path="/a:b c")


def test_a_relative_path_inside_is_refused() -> None:
    with pytest.raises(typer.BadParameter):
        parse_place("sbx-local-abc:a")


def test_pairs_keep_what_follows_the_first_equals_sign() -> None:
    assert pairs(["A=1=2", "B="], "--env") == {"A": "1=2", "B": ""}


@pytest.mark.parametrize("word", ["A", "=1", ""])
def test_a_word_without_a_name_is_refused(word: str) -> None:
    with pytest.raises(typer.BadParameter):
        pairs([word], "--env")


def test_zero_ttl_means_never_and_network_means_everything() -> None:
    args = run_args("debian", backend=BackendKind.DUMMY, memory=None, cpus=None, network=True, labels=["a=b"], ttl=0)
    assert (args.ttl_running_stop, args.network_rules, args.labels) == (None, {"*": True}, {"a": "b"})


def test_json_of_the_command_inside_is_not_ours() -> None:
    assert asks_for_json(["ls", "--json"])
    assert not asks_for_json(["run", "debian", "--", "tool", "--json"])


def test_the_cause_of_nested_groups() -> None:
    error = InvalidSpecError("x")
    assert first_cause(BaseExceptionGroup("a", [BaseExceptionGroup("b", [error]), KeyError()])) is error


def test_client_commands_come_without_the_machines() -> None:
    assert "up" not in {command.name for command in app_for(["ls", "-a"]).registered_commands}
    for words in ([], ["--help"], ["up"], ["no-such-command"]):
        assert {"ls", "up"} <= {command.name for command in app_for(words).registered_commands}
    images = app_for(["image", "ls"])
    assert "up" not in {command.name for command in images.registered_commands}
    assert [group.name for group in images.registered_groups] == ["snapshot", "fncall", "keys", "image"]
    of = {group.name: group.typer_instance for group in app_for([]).registered_groups}
    found = {name: {one.name for one in app.registered_commands} for name, app in of.items() if app is not None}
    assert found["snapshot"] == {"create", "ls", "rm"}, "this machine's commands about images are in no other group"
    assert {"build", "gc"} <= found["image"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["run", "--memroy", "5", "debian", "--", "true"], "no option --memroy"),
        (["run", "debian", "--memory", "5", "true"], "--memory stands after debian"),
        (["run", "debian", "--memroy", "5", "--", "true"], "no option --memroy"),
        (["run", "debian"], "say what to run"),
        (["run", "--ttl", "-3", "debian", "--", "true"], "--ttl"),
    ],
)
def test_a_slip_is_named(capsys: pytest.CaptureFixture[str], words: list[str], said: str) -> None:
    with pytest.raises(SystemExit) as left:
        main(words)
    assert (left.value.code, said in capsys.readouterr().err) == (2, True)


def test_the_version(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["--version"])
    assert (left.value.code, capfdbinary.readouterr().out) == (0, f"opendsec {version('opendsec')}\n".encode())


def status(*, running: bool, result: CommandResult | None = None) -> CommandStatus:
    return CommandStatus(command_id=CommandId("cmd-1"), summary="true", started_at=0.0, running=running, result=result)


def test_a_command_that_never_started_is_not_shown_as_running() -> None:
    assert state_of(status(running=True)) == "running"
    assert state_of(status(running=False)) == "not started"
