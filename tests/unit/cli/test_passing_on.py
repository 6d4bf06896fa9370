"""Whose words are whose in `run IMAGE … -- COMMAND …`."""

from __future__ import annotations

from typing import Any

import pytest
import typer
import typer.main

from opendsec.cli.app import app


def parsed(*words: str) -> tuple[dict[str, Any], list[str]]:
    """Our options, and what is left for the command inside."""
    command: Any = typer.main.get_command(app)
    run = command.get_command(command.make_context("opendsec", ["run"]), "run")
    context = run.make_context("run", list(words))
    given = {name: value for name, value in context.params.items() if value not in (None, False, [], ())}
    return given, context.args


PLAIN = {"image": "debian", "backend": "container", "ttl": 300.0}


@pytest.mark.parametrize(
    ("words", "options", "inside"),
    [
        (["debian", "ls", "-l"], {}, ["ls", "-l"]),
        (["debian", "--", "ls", "-l"], {}, ["--", "ls", "-l"]),
        (["--keep", "debian", "sh", "-c", "true", "--", "x"], {"keep": True}, ["sh", "-c", "true", "--", "x"]),
        (
            ["debian", "--workspace", "w", "--toolkit", "a", "--toolkit", "b", "--", "rg", "--json", "x"],
            {"workspace": "w", "toolkits": ["a", "b"]},
            ["--", "rg", "--json", "x"],
        ),
        (["--memory", "64", "debian", "-u", "me", "--", "id", "--", "x"], {"memory": 64, "user": "me"}, None),
        (["debian", "--no-toolkits", "--json", "--", "ls"], {"no_toolkits": True, "as_json": True}, ["--", "ls"]),
    ],
)
def test_options_may_stand_on_either_side_of_the_image(
    words: list[str], options: dict[str, Any], inside: list[str] | None
) -> None:
    given, left = parsed(*words)
    assert given == {**PLAIN, **options}
    assert left == (["--", "id", "--", "x"] if inside is None else inside)


def test_an_option_there_is_not_is_not_taken_for_a_command() -> None:
    given, left = parsed("debian", "--oops", "--", "ls")
    assert (given["image"], left) == ("--oops", ["debian", "--", "ls"])  # refused by `run` by that name
    assert parsed("debian", "-x", "ls")[1] == ["-x", "ls"]  # refused by `run`: it stands behind the image
