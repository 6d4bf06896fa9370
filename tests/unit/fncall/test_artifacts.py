"""Compile results: found by content, kept within a limit, never half, never another project's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from opendsec.errors import NotFoundError
from opendsec.fncall.artifacts import Artifact, Artifacts, key_of
from opendsec.model.fncall import FnCallSpec
from opendsec.model.fncall_check import edge_of_artifact

SPEC = FnCallSpec(language="c", code="int x;", files={"a.h": b"1"}, env={"A": "1"})
COMMAND = ("gcc", "main.c")


def artifact(key: str, content: bytes = b"\x7fELF\n\n", project: str = "p") -> Artifact:
    return Artifact(
        name=f"art-e-{key}", project=project, image="sha256:1", language="c", files={"main": content, "b/c.class": b""}
    )


def opened(directory: Path, most_bytes: int = 10_000) -> Artifacts:
    store = Artifacts(directory, edge="e", most_bytes=most_bytes)
    store.open()
    return store


def key(spec: FnCallSpec = SPEC, project: str = "p", image: str = "i", command: tuple[str, ...] = COMMAND) -> str:
    return key_of(spec, project=project, image=image, command=command)


def test_everything_that_matters_is_in_the_key() -> None:
    others = [
        key(replace(SPEC, code="int y;")),
        key(replace(SPEC, language="cpp")),
        key(replace(SPEC, files={"a.h": b"2"})),
        key(replace(SPEC, files={"b.h": b"1"})),
        key(replace(SPEC, env={"A": "2"})),
        key(replace(SPEC, code="int x;gcc", env={})),
        key(project="q"),
        key(image="j"),
        key(command=("gcc", "-O2", "main.c")),
        key(command=("gccmain.c",)),
    ]
    assert len({key(), *others}) == len(others) + 1
    assert key() == key(replace(SPEC, stdin=b"x", memory_mb=1, cpu_time_s=1.0))


def test_names_lead_to_the_edge() -> None:
    assert edge_of_artifact(Artifacts(Path("/none"), edge="e", most_bytes=1).name_of(key())) == "e"


def test_what_is_kept_is_found_again(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.keep("k", artifact("k"))
    for again in (store, opened(tmp_path)):
        assert again.find("k") == artifact("k")
        assert again.get("art-e-k", project="p") == artifact("k")
        for name, project in (("art-e-k", "q"), ("art-f-k", "p"), ("art-e-none", "p"), ("art-e-../k", "p")):
            with pytest.raises(NotFoundError):
                again.get(name, project=project)


def test_the_least_used_goes_first(tmp_path: Path) -> None:
    store = opened(tmp_path, most_bytes=3_000)
    for name in ("a", "b"):
        store.keep(name, artifact(name, bytes(1_000)))
    assert store.find("a") is not None
    store.keep("c", artifact("c", bytes(1_000)))
    assert (store.find("a") is not None, store.find("b"), store.find("c") is not None) == (True, None, True)
    store.keep("large", artifact("large", bytes(5_000)))
    assert store.find("large") is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "c"]


def test_what_is_not_whole_is_none(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.keep("k", artifact("k"))
    whole = (tmp_path / "k").read_bytes()
    for damaged in (whole[:-2], whole[:10], b"", b"{}\n", b"[1]\n", b"\xff\xff\n"):
        (tmp_path / "k").write_bytes(damaged)
        again = opened(tmp_path)
        assert again.find("k") is None, damaged
        store.keep("k", artifact("k"))
    (tmp_path / ".half").write_bytes(b"x")
    opened(tmp_path)
    assert not (tmp_path / ".half").exists()
