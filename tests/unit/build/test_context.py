"""What a source of COPY means in a directory, and what its digest follows from."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from opendsec.build.context import Context, digest_sources
from opendsec.errors import InvalidSpecError


def tree(root: Path) -> Path:
    (root / "d" / "deep").mkdir(parents=True)
    (root / "d" / "f").write_text("f")
    (root / "d" / "deep" / "g").write_text("g")
    (root / "a.txt").write_text("a")
    (root / "b.txt").write_text("b")
    (root / "d" / "link").symlink_to("/etc/passwd")
    (root / "alias").symlink_to("d")
    return root


def names(context: Context, pattern: str) -> list[tuple[str, list[str]]]:
    return [(source.name, [entry.name for entry in source.entries]) for source in context.sources(pattern)]


def test_sources(tmp_path: Path) -> None:
    context = Context(tree(tmp_path))
    everything = ["", "deep", "deep/g", "f", "link"]
    assert names(context, "d") == [("d", everything)]
    assert names(context, "./d/") == [("d", everything)]
    assert names(context, "/d") == [("d", everything)]
    assert names(context, "*.txt") == [("a.txt", [""]), ("b.txt", [""])]
    assert [name for name, _ in names(context, "d/[df]*")] == ["d/deep", "d/f"]
    with pytest.raises(InvalidSpecError, match="leads nowhere"):
        context.sources("d/*")
    assert names(context, "none*") == []
    assert [name for name, _ in names(context, ".")] == [""]
    assert names(context, "alias") == [("alias", everything)]


@pytest.mark.parametrize("pattern", ["none", "../x", "d/../../x", "d/f/x", ".."])
def test_what_is_not_there(tmp_path: Path, pattern: str) -> None:
    (tmp_path / "x").write_text("outside")
    (tmp_path / "context").mkdir()
    with pytest.raises(InvalidSpecError):
        Context(tree(tmp_path / "context")).sources(pattern)


def test_links_lead_nowhere_outside(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "context").mkdir()
    (tmp_path / "context" / "up").symlink_to("../secret")
    (tmp_path / "context" / "round").symlink_to("round")
    (tmp_path / "context" / "secret").write_text("inside")
    context = Context(tmp_path / "context")
    assert context.sources("up")[0].entries[0].where.read_text() == "inside"
    with pytest.raises(InvalidSpecError):
        context.sources("round")


def test_ignored_names_are_not_there(tmp_path: Path) -> None:
    (tree(tmp_path) / ".dockerignore").write_text("*.txt\nd/deep\n")
    context = Context(tmp_path)
    assert names(context, "*.txt") == []
    assert names(context, "d") == [("d", ["", "f", "link"])]
    with pytest.raises(InvalidSpecError, match="dockerignore"):
        context.sources("a.txt")


def test_names_that_are_taken_back(tmp_path: Path) -> None:
    (tree(tmp_path) / ".dockerignore").write_text("*\n!d/deep/g\n")
    assert names(Context(tmp_path), ".") == [("", ["", "d", "d/deep", "d/deep/g"])]
    assert names(Context(tmp_path), "d") == [("d", ["", "deep", "deep/g"])]


def test_the_ignore_file_of_a_dockerfile_comes_first(tmp_path: Path) -> None:
    (tree(tmp_path) / ".dockerignore").write_text("*")
    (tmp_path / "x.dockerignore").write_text("d")
    assert names(Context(tmp_path, ignore_file=tmp_path / "x.dockerignore"), "a.txt") == [("a.txt", [""])]


def test_a_fifo_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(InvalidSpecError, match="'fifo'"):
        Context(tmp_path).sources(".")


def test_digests_follow_what_is_copied(tmp_path: Path) -> None:
    context = Context(tree(tmp_path))

    def digest() -> str:
        return digest_sources(context.sources("d"))[0]

    (tmp_path / "other-link").symlink_to("f")
    first = digest()
    os.utime(tmp_path / "d" / "f", (5, 5))
    assert digest() == first
    changes: list[Callable[[], object]] = [
        lambda: (tmp_path / "d" / "f").write_text("F"),
        lambda: (tmp_path / "d" / "f").chmod(0o755),
        (tmp_path / "d" / "new").touch,
        lambda: (tmp_path / "d" / "new").rename(tmp_path / "d" / "newer"),
        lambda: os.replace(tmp_path / "other-link", tmp_path / "d" / "link"),
    ]
    seen = {first}
    for change in changes:
        change()
        seen.add(digest())
    assert len(seen) == 1 + len(changes)
