"""The kernel of disks is fetched once, believed by its hash, and never half there."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest

from opendsec.errors import HostCapabilityError, InvalidSpecError, NodeError
from opendsec.vm import disk_kernels, kernels_debian
from opendsec.vm.disk_kernels import DiskKernelFacts, fetch, kept

PACKAGE = "linux-image-cloud-amd64"


@pytest.fixture
def archive(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What the mirror has: its one element may be changed."""
    content = [b"first"]

    def real_package(package: str, _environment: Mapping[str, str]) -> str:
        if package.startswith("no-"):
            raise NodeError(f"no package {package}")
        return package.replace("cloud", "6.1.0-1-cloud")

    def download(work: Path, name: str, *_: object) -> Path:
        if not content[0]:
            raise NodeError("the mirror is gone")
        (work / f"{name}.deb").write_bytes(content[0])
        return work / f"{name}.deb"

    monkeypatch.setattr(kernels_debian, "real_package", real_package)
    monkeypatch.setattr(kernels_debian, "download", download)
    monkeypatch.setattr(disk_kernels, "run", lambda *_, **__: ("6.1.1-1",))
    return content


def fetched(state: Path, package: str = PACKAGE) -> DiskKernelFacts:
    return fetch(state, package, environment={}, say=lambda _: None)


def test_it_is_kept_with_its_version_and_hash(tmp_path: Path, archive: list[bytes]) -> None:
    assert kept(tmp_path) is None
    facts = fetched(tmp_path)
    assert facts == kept(tmp_path)
    assert facts.package == "linux-image-6.1.0-1-cloud-amd64"
    assert (facts.version, facts.sha256) == ("6.1.1-1", hashlib.sha256(archive[0]).hexdigest())
    archive[0] = b"second"
    assert fetched(tmp_path) == kept(tmp_path) != facts


def test_what_cannot_be_fetched_leaves_what_was_kept(tmp_path: Path, archive: list[bytes]) -> None:
    facts = fetched(tmp_path)
    archive[0] = b""
    with pytest.raises(NodeError, match="the mirror is gone"):
        fetched(tmp_path)
    assert kept(tmp_path) == facts
    with pytest.raises(NodeError, match="no package"):
        fetched(tmp_path, "no-such-package")
    with pytest.raises(InvalidSpecError, match="bash is no kernel"):
        fetched(tmp_path, "bash")
    assert [path.name for path in (tmp_path / "disk-kernels").iterdir()] == [PACKAGE]
    assert list((tmp_path / "disk-kernels" / PACKAGE / "work").iterdir()) == []


@pytest.mark.parametrize("package", ["", "../x", "a b", "-x", "Linux"])
def test_what_is_no_package_s_name_is_refused(tmp_path: Path, package: str) -> None:
    with pytest.raises(InvalidSpecError, match="is not a package's name"):
        kept(tmp_path, package)


@pytest.mark.parametrize("file", ["package.deb", "kernel.json"])
def test_a_damaged_one_is_refused_with_the_remedy(tmp_path: Path, archive: list[bytes], file: str) -> None:
    fetched(tmp_path)
    (tmp_path / "disk-kernels" / PACKAGE / file).write_bytes(b"{}")
    with pytest.raises(HostCapabilityError, match="cannot be used") as refused:
        kept(tmp_path)
    assert refused.value.remedy == f"opendsec kernel fetch {PACKAGE}"
    fetched(tmp_path)
    assert kept(tmp_path) is not None


def test_one_without_its_facts_is_none(tmp_path: Path, archive: list[bytes]) -> None:
    """A fetch that was killed between the two."""
    fetched(tmp_path)
    (tmp_path / "disk-kernels" / PACKAGE / "kernel.json").unlink()
    assert kept(tmp_path) is None


def test_facts_are_read_as_they_were_written(tmp_path: Path, archive: list[bytes]) -> None:
    facts = fetched(tmp_path)
    text = (tmp_path / "disk-kernels" / PACKAGE / "kernel.json").read_bytes()
    assert msgspec.json.decode(text, type=DiskKernelFacts) == facts
