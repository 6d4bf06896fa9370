"""The project's archive is taken only if it is the pinned one, and never unpacked outside its place."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest

from opendsec.demo import project
from opendsec.errors import DigestMismatchError, OpenDSecError


def archive(folder: Path, names: dict[str, bytes]) -> Path:
    path = folder / "a.tar.gz"
    with tarfile.open(path, "w:gz") as tar:
        for name, content in names.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path


def test_the_top_directory_is_dropped(tmp_path: Path) -> None:
    source = archive(tmp_path, {"p-1/src/a.py": b"1", "p-1/README": b"2", "stray": b"3"})
    assert project.unpack(source, tmp_path / "out") == 2
    assert (tmp_path / "out/src/a.py").read_bytes() == b"1"
    assert sorted(p.name for p in (tmp_path / "out").rglob("*")) == ["README", "a.py", "src"]


@pytest.mark.parametrize("name", ["p/../../evil", "/p/evil"])
def test_an_entry_that_leads_outside_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(OpenDSecError, match="leads outside"):
        project.unpack(archive(tmp_path, {name: b""}), tmp_path / "out")


def test_another_archive_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DigestMismatchError, match=r"is not simpleeval"):
        project.check_digest(archive(tmp_path, {"p/a": b""}))


def test_the_reason_pip_gives_is_its_error_and_not_the_hint_below() -> None:
    said = "  error: subprocess-exited-with-error\nERROR: No matching distribution found for x\nnote: not pip's fault\n"
    assert project.reason_of(said) == "ERROR: No matching distribution found for x"
    assert project.reason_of("\n  killed \n") == "killed"
    assert project.reason_of("") == "it said nothing"
