"""Words of `opendsec forward`."""

from __future__ import annotations

import pytest
import typer

from opendsec.cli.forwarding import parse_ports


@pytest.mark.parametrize(("word", "pair"), [("8080:80", (8080, 80)), ("0:7", (0, 7)), ("80", (80, 80))])
def test_ports(word: str, pair: tuple[int, int]) -> None:
    assert parse_ports(word) == pair


@pytest.mark.parametrize("word", ["x", "1:2:3", "80:", "80:0", "65536", "-1:80", ":80", "1:²"])
def test_bad_ports_are_wrong_usage(word: str) -> None:
    with pytest.raises(typer.BadParameter, match="LOCAL:REMOTE"):
        parse_ports(word)
