"""The table of languages is whole, and a broken one says where."""

from __future__ import annotations

from pathlib import Path

import pytest

from opendsec.errors import UnsupportedError
from opendsec.fncall import languages
from opendsec.fncall.languages import find, load


def test_every_language_can_be_run() -> None:
    rows = {row.name: row for row in load().values()}
    assert {"python", "c", "cpp", "go", "java", "node", "bash"} <= set(rows)
    for row in rows.values():
        command = row.run_command(("a b", "{file}"), memory_mb=256)
        assert command[-2:] == ("a b", "{file}"), "a caller's words are left alone"
        assert "{" not in " ".join((*command[:-1], *row.compile_command(memory_mb=256)))
        assert row.needs
        assert bool(row.compile) == bool(row.keep), row.name
        first = (row.compile or row.run)[0]
        assert first in row.needs, row.name


def test_aliases_lead_to_the_same() -> None:
    assert find("c++") is find("cpp")
    assert find("javascript") is find("node")


def test_an_unknown_one_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError) as caught:
        find("cobol")
    assert caught.value.detail == {"field": "language", "language": "cobol"}
    assert "python" in caught.value.remedy


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ('[a]\nfile = "x"\nneeds = []\nrun = ["x"]\nspeed = 1\n', "speed"),
        ('[a]\nfile = "x"\nneeds = []\nrun = ["x"]\naliases = ["a"]\n', "two languages"),
        ('[a]\nfile = "x"\n', "needs"),
    ],
)
def test_a_broken_table_says_where(tmp_path: Path, text: str, word: str) -> None:
    path = tmp_path / "table.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=word):
        load(path)


def test_the_table_is_a_file_of_its_own() -> None:
    assert languages.TABLE.is_file()
