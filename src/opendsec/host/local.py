"""The platform of one machine as files: where it keeps what, which processes belong to it, what its SDK and CLI read.

<run>/up.lock            held by whoever runs or changes the platform
<run>/up.json            with which settings it was started, mode 0600
<run>/<process>.pid      pid and start time of each process: a pid in another life is never signalled
<run>/local.json         address and key for SDK and CLI on this machine, mode 0600
<state>/log/opendsec.log what the processes of `up -d` say; `opendsec.log.1` what they said before
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from opendsec import errors
from opendsec.apiserver.settings import DEFAULT_LISTEN, DEFAULT_RUN_DIR, DEFAULT_STATE_DIR, database_file, edge_socket
from opendsec.model.ids import check_edge_name
from opendsec.server.runner import Address, parse_address

_OF_CALLER = frozenset({"OPENDSEC_API_URL", "OPENDSEC_API_KEY", "OPENDSEC_LOG_LEVEL"})
"""Settings that belong to whoever calls, not to the platform that runs."""

SUPERVISOR = "supervisor"
APISERVER = "apiserver"
EDGE = "edge"
LOADER = "loader"
"""Only where layers are read through a process of ours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Local:
    """One machine's platform: settings and the places that follow from them."""

    state_dir: Path
    run_dir: Path
    listen: str = DEFAULT_LISTEN
    edge: str = "local"
    settings: Mapping[str, str] = field(default_factory=dict)
    """Further settings its processes were started with."""

    @property
    def address(self) -> Address:
        return parse_address(self.listen)

    @property
    def api_url(self) -> str:
        address = self.address
        return str(address) if address.path is not None else f"http://{address}"

    @property
    def edge_socket(self) -> Path:
        return edge_socket(self.run_dir, self.edge)

    @property
    def edge_state(self) -> Path:
        return self.state_dir / "edge" / self.edge

    @property
    def database_url(self) -> str:
        return f"sqlite:///{database_file(self.state_dir)}"

    @property
    def log_file(self) -> Path:
        return self.state_dir / "log" / "opendsec.log"

    @property
    def local_json(self) -> Path:
        return self.run_dir / "local.json"

    def pid_file(self, name: str) -> Path:
        return self.run_dir / f"{name}.pid"

    def environment(self, given: Mapping[str, str]) -> dict[str, str]:
        """What its processes are started with; the caller's own settings stay unless they are decided here."""
        return {
            **given,
            **self.settings,
            "OPENDSEC_STATE_DIR": str(self.state_dir),
            "OPENDSEC_RUN_DIR": str(self.run_dir),
            "OPENDSEC_LISTEN": self.listen,
            "OPENDSEC_EDGE": self.edge,
            "OPENDSEC_EDGES": f"{self.edge}=unix:{self.edge_socket}",
            "OPENDSEC_EDGE_LISTEN": f"unix:{self.edge_socket}",
            "OPENDSEC_DATABASE_URL": self.database_url,
        }


def chosen(environment: Mapping[str, str], *, listen: str | None = None, edge: str | None = None) -> Local:
    """The platform that options and environment describe. Raises InvalidSpecError naming the setting."""
    listen = listen or environment.get("OPENDSEC_LISTEN") or DEFAULT_LISTEN
    parse_address(listen)
    return Local(
        state_dir=Path(environment.get("OPENDSEC_STATE_DIR") or DEFAULT_STATE_DIR).absolute(),
        run_dir=Path(environment.get("OPENDSEC_RUN_DIR") or DEFAULT_RUN_DIR).absolute(),
        listen=listen,
        edge=check_edge_name(edge or environment.get("OPENDSEC_EDGE") or "local"),
        settings={
            name: value
            for name, value in environment.items()
            if name.startswith("OPENDSEC_") and name not in _OF_CALLER
        },
    )


def started(environment: Mapping[str, str]) -> Local:
    """The platform as it was started here last, with all its settings; as `chosen` when there is none."""
    default = chosen(environment)
    try:
        record = msgspec.json.decode((default.run_dir / "up.json").read_bytes(), type=_Record)
    except FileNotFoundError:
        return default
    except msgspec.DecodeError as exc:
        raise errors.RequestError(
            f"{default.run_dir}/up.json is not readable: {exc}", remedy="remove it; the defaults are used then"
        ) from exc
    return Local(
        state_dir=Path(record.state_dir),
        run_dir=default.run_dir,
        listen=record.listen,
        edge=record.edge,
        settings=record.settings,
    )


class _Record(msgspec.Struct):
    """up.json"""

    state_dir: str
    listen: str
    edge: str
    settings: dict[str, str] = {}


def remember(local: Local) -> None:
    """Write up.json for `down` and `status`, which may be called without the settings `up` had."""
    record = _Record(
        state_dir=str(local.state_dir), listen=local.listen, edge=local.edge, settings=dict(local.settings)
    )
    write_private(local.run_dir / "up.json", msgspec.json.encode(record))


def write_private(path: Path, content: bytes) -> None:
    """Replace a file in one step, mode 0600."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
    fresh.rename(path)


class RunningAlreadyError(errors.ConflictError):
    """Another process holds the lock of this platform."""


@contextlib.contextmanager
def lock(local: Local) -> Iterator[None]:
    """Be the only one who runs or changes the platform.

    Raises RunningAlreadyError, or HostCapabilityError without the right to.
    """
    descriptor = _lock_file(local)
    try:
        yield
    finally:
        os.close(descriptor)


def _lock_file(local: Local) -> int:
    path = local.run_dir / "up.lock"
    while True:
        try:
            local.run_dir.mkdir(mode=0o755, parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:
            continue  # the directory was removed in between, by a `down` that just ended
        except PermissionError as exc:
            raise errors.HostCapabilityError(
                f"cannot write to {local.run_dir}",
                detail={"probe": "root"},
                remedy="run it as root, or set OPENDSEC_RUN_DIR and OPENDSEC_STATE_DIR to directories of yours",
            ) from exc
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            os.close(descriptor)
            raise RunningAlreadyError(f"OpenDSec is running already on {local.run_dir}") from exc
        if _is_at(descriptor, path):
            return descriptor
        os.close(descriptor)  # whoever held it has removed it: this is nobody's lock any more


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
