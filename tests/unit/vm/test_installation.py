"""Kernels and VMMs appear in one step: killed anywhere, looked at anywhen, there is the old one or the new one."""

from __future__ import annotations

import struct
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from opendsec.errors import HostCapabilityError, NodeError
from opendsec.linux import libc
from opendsec.vm import firecracker_install, installation, kernels, kernels_install
from opendsec.vm.kernel_image import FlatKernel, wrapped

NOTE = struct.pack("<III", 4, 8, 18) + b"Xen\0" + struct.pack("<Q", 0x1000000)
HERE = Path(__file__).parent


def vmlinux(directory: Path, name: str, *, release: str = "6.1.2-test") -> str:
    content = b"code Linux version " + release.encode() + b" (" + name.encode() + b") " + NOTE
    path = directory / name
    path.write_bytes(wrapped(FlatKernel(content=content, address=0x1000000, entry=0x1000123)))
    return str(path)


def release(directory: Path, name: str) -> str:
    """Two programs of Firecracker 1.12.1 whose bytes are of this name."""
    made = directory / name
    made.mkdir()
    for program in ("firecracker", "jailer"):
        (made / program).write_text(f"#!/bin/sh\n# {name}\necho {program} v1.12.1\n")
    return str(made)


def install_kernel(state: Path, origin: str) -> kernels.KernelFacts:
    return kernels_install.install(state, origin, say=lambda _: None)


def install_programs(state: Path, origin: str) -> firecracker_install.ProgramFacts:
    return firecracker_install.install(state, origin, say=lambda _: None)


def killed_at_each_step(what: str, state: Path, origin: str) -> int:
    argv = [sys.executable, str(HERE / "dying_installation.py"), what, str(state), origin]
    return int(subprocess.run(argv, check=True, capture_output=True, text=True, timeout=120).stdout)


def hidden(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir() if path.name.startswith(".")]


def test_a_kernel_s_installation_killed_at_any_step_leaves_the_old_one_or_the_new(tmp_path: Path) -> None:
    state = tmp_path / "state"
    install_kernel(state, vmlinux(tmp_path, "old"))
    assert killed_at_each_step("kernel", state, vmlinux(tmp_path, "new", release="6.1.3-test")) > 10
    assert kernels.find_kernel(state).facts.release == "6.1.3-test"
    assert len(kernels.installed(state)) == 2
    assert hidden(state / "kernels") == []


def test_programs_are_exchanged_for_others_of_the_same_version_killed_at_any_step(tmp_path: Path) -> None:
    state = tmp_path / "state"
    install_programs(state, release(tmp_path, "old"))
    assert killed_at_each_step("firecracker", state, release(tmp_path, "new")) > 10
    assert "# new" in firecracker_install.find_programs(state).jailer.read_text()
    assert sorted(path.name for path in (state / "vmm").iterdir()) == ["firecracker", "firecracker-1.12.1"]


def test_who_looks_while_others_are_installed_finds_some(tmp_path: Path) -> None:
    state = tmp_path / "state"
    origins = [release(tmp_path, name) for name in ("one", "other")]
    sources = [vmlinux(tmp_path, name, release=name) for name in ("6.1.2", "6.1.3")]
    install_programs(state, origins[0])
    install_kernel(state, sources[0])
    done, failed, looked = threading.Event(), [], 0

    def look() -> None:
        nonlocal looked
        while not done.is_set():
            try:
                firecracker_install.find_programs(state)
                kernels.find_kernel(state)
            except HostCapabilityError as error:
                failed.append(error.message)
            looked += 1

    reader = threading.Thread(target=look)
    reader.start()
    try:
        for turn in range(1, 21):
            install_programs(state, origins[turn % 2])
            install_kernel(state, sources[turn % 2])
    finally:
        done.set()
        reader.join()
    assert failed == []
    assert looked > 0


def test_a_kernel_never_changes_another_of_its_release_gets_a_name_of_its_own(tmp_path: Path) -> None:
    state, first, second = tmp_path / "state", vmlinux(tmp_path, "first"), vmlinux(tmp_path, "second")
    one = install_kernel(state, first)
    file = state / "kernels" / one.name / "vmlinux"
    inode = file.stat().st_ino
    other = install_kernel(state, second)
    assert other.name.startswith(f"{one.name}-")
    assert kernels.find_kernel(state).name == other.name
    assert install_kernel(state, second).name == other.name
    assert install_kernel(state, first).name == one.name == kernels.default_name(state)
    assert file.stat().st_ino == inode
    file.chmod(0o644)
    file.write_bytes(b"damaged")
    assert install_kernel(state, first).name == one.name
    assert kernels.find_kernel(state).vmlinux.read_bytes() == Path(first).read_bytes()
    (state / "kernels" / one.name / "kernel.json").unlink()
    assert install_kernel(state, first).name == one.name
    assert [facts.name for facts in kernels.installed(state)] == sorted([one.name, other.name])
    kernels_install.remove(state, other.name)
    assert sorted(path.name for path in (state / "kernels").iterdir()) == ["default", one.name]


def test_a_file_system_that_cannot_exchange_names_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As NFS answers."""

    def refuse(*_: object) -> None:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(libc, "renameat2", refuse)
    with pytest.raises(NodeError, match="cannot exchange two names") as caught:
        installation.put(tmp_path / "new", tmp_path / "target")
    assert "ext4" in caught.value.remedy
