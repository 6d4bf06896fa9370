"""Tests ask the kernel: a test marked with a capability runs only where that is, and says why where it is not.

The markers are declared in pyproject.toml; the answers are `opendsec.linux.probe`'s own sentences, plus a few about
this checkout (are the native programs built, is the base image there). `--require root,netns` turns a missing
capability of these names into a failure, and with it every skip for any other reason: a machine that must run
everything cannot skip silently.
"""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests import erofs_versions, registry
from tests.shared_store import moosefs

from opendsec.errors import HostCapabilityError, ImageError
from opendsec.linux import probe
from opendsec.store.images import ImageStore
from opendsec.vm.disk_kernels import kept
from opendsec.vm.firecracker_install import find_programs
from opendsec.vm.kernels import find_kernel

STATE_DIR = Path(os.environ.get("OPENDSEC_STATE_DIR", "/var/lib/opendsec"))
COST_MARKERS = frozenset({"slow", "soak"})
_SKIP_KEY = "capability: "


def _native() -> str | None:
    folder = Path(__file__).parents[1] / "src/opendsec/_native"
    missing = [name for name in ("opendsec-guest", "opendsec-launch") if not (folder / name).is_file()]
    return f"{', '.join(missing)} is not built; run `make -C native install`" if missing else None


def _image() -> str | None:
    root = STATE_DIR / "store"
    if not root.is_dir():
        return f"no image store at {root}; run `make image`"
    try:
        ImageStore(root).get("debian")
    except ImageError as exc:
        return f"no image `debian` in {root} ({exc}); run `make image`"
    return None


def _kvm() -> str | None:
    return None if Path("/dev/kvm").exists() else "this host has no /dev/kvm"


def _qemu() -> str | None:
    if shutil.which("qemu-system-x86_64") is None:
        return "the program qemu-system-x86_64 is not installed; apt-get install qemu-system-x86"
    return None


def _firecracker() -> str | None:
    try:
        find_programs(STATE_DIR)
    except HostCapabilityError as exc:
        return f"{exc.message}; run `make firecracker`"
    return _kvm()


def _vmkernel() -> str | None:
    try:
        find_kernel(STATE_DIR)
    except HostCapabilityError as exc:
        return f"{exc.message}; run `make kernel`"
    return None


def _diskkernel() -> str | None:
    try:
        found = kept(STATE_DIR)
    except HostCapabilityError as exc:
        return f"{exc.message}; run `make diskkernel`"
    return None if found else f"no kernel for disks is kept in {STATE_DIR}; run `make diskkernel`"


_OWN: dict[str, Callable[[], str | None]] = {
    "diskkernel": _diskkernel,
    "native": _native,
    "erofs18": erofs_versions.missing,
    "firecracker": _firecracker,
    "image": _image,
    "kvm": _kvm,
    "moosefs": moosefs.missing,
    "vmkernel": _vmkernel,
    "qemu": _qemu,
    "registry": registry.missing,
}


@functools.cache
def why_not(capability: str) -> str | None:
    """None when this machine has it, else one sentence. Raises KeyError for a name nobody knows."""
    if capability in _OWN:
        return _OWN[capability]()
    answer = probe.probe(capability, state_dir=STATE_DIR)
    return None if answer.ok else answer.sentence


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--require", default="", metavar="A,B", help="capabilities this machine must have")


def _declared(config: pytest.Config) -> set[str]:
    lines: list[str] = config.getini("markers")
    return {line.partition(":")[0].strip() for line in lines} - COST_MARKERS


def _required(config: pytest.Config) -> set[str]:
    return {name for name in config.getoption("--require").split(",") if name}


def _known(name: str) -> bool:
    return name in _OWN or name in probe.names()


def pytest_configure(config: pytest.Config) -> None:
    unknown = sorted(name for name in _required(config) if not _known(name))
    if unknown:
        raise pytest.UsageError(f"--require: unknown capability {', '.join(unknown)}")


def pytest_report_header(config: pytest.Config) -> list[str]:
    names = sorted(name for name in _declared(config) if _known(name))
    missing = {name: reason for name in names if (reason := why_not(name))}
    lines = [f"capabilities: {', '.join(name for name in names if name not in missing)}"]
    return lines + [f"without {name}: {reason}" for name, reason in missing.items()]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker in item.iter_markers():
        if not _known(marker.name):
            continue
        reason = why_not(marker.name)
        if reason is None:
            continue
        if marker.name in _required(item.config):
            pytest.fail(f"required capability `{marker.name}` is missing: {reason}", pytrace=False)
        pytest.skip(f"{_SKIP_KEY}{marker.name}: {reason}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report: pytest.TestReport = yield  # type: ignore[assignment]
    if report.skipped and not hasattr(report, "wasxfail") and _required(item.config):
        reason = str(report.longrepr[2]) if isinstance(report.longrepr, tuple) else str(report.longrepr)
        if _SKIP_KEY not in reason:
            report.outcome = "failed"
            report.longrepr = f"skipped although capabilities are required: {reason}"
    return report  # type: ignore[return-value]
