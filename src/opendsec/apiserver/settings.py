"""What an apiserver is told when it starts:

defaults, overridden by OPENDSEC_* variables. Read once, in a composition root.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from opendsec.errors import InvalidSpecError
from opendsec.model.ids import PROJECT_NAME, check_edge_name
from opendsec.server.runner import Address, parse_address

DEFAULT_LISTEN = "127.0.0.1:8700"
DEFAULT_STATE_DIR = "/var/lib/opendsec"
DEFAULT_RUN_DIR = "/run/opendsec"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """One apiserver."""

    listen: Address
    edges: Mapping[str, Address]
    database_url: str
    edge_token: str = ""
    """What edges on host:port ask for; edges behind a Unix socket need none."""
    log_level: str = "info"
    run_code_project: str = ""
    """Project for which `/run_code` is carried out without a key; "": a key is needed."""


def edge_socket(run_dir: Path, edge: str) -> Path:
    """Where an edge of that name listens by default."""
    return run_dir / f"edge-{check_edge_name(edge)}.sock"


def parse_edges(text: str, *, run_dir: Path) -> dict[str, Address]:
    """`local` or `a=unix:/path,b=10.0.0.2:8701`; a bare name listens on its default socket. Raises InvalidSpecError."""
    found: dict[str, Address] = {}
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        name, given, where = part.partition("=")
        check_edge_name(name)
        if name in found:
            raise InvalidSpecError(f"OPENDSEC_EDGES: edge {name} is named twice", detail={"field": "OPENDSEC_EDGES"})
        found[name] = (
            parse_address(where, field="OPENDSEC_EDGES") if given else Address(path=edge_socket(run_dir, name))
        )
    return found


def from_environment(environment: Mapping[str, str]) -> Settings:
    """Settings of this process. Raises InvalidSpecError naming the variable."""
    run_dir = Path(environment.get("OPENDSEC_RUN_DIR") or DEFAULT_RUN_DIR)
    edges = parse_edges(environment.get("OPENDSEC_EDGES") or "local", run_dir=run_dir)
    token = environment.get("OPENDSEC_EDGE_TOKEN", "")
    if not token and any(address.path is None for address in edges.values()):
        raise InvalidSpecError(
            "OPENDSEC_EDGE_TOKEN: needed for an edge on host:port", detail={"field": "OPENDSEC_EDGE_TOKEN"}
        )
    state_dir = Path(environment.get("OPENDSEC_STATE_DIR") or DEFAULT_STATE_DIR)
    return Settings(
        listen=parse_address(environment.get("OPENDSEC_LISTEN") or DEFAULT_LISTEN, field="OPENDSEC_LISTEN"),
        edges=edges,
        database_url=environment.get("OPENDSEC_DATABASE_URL") or f"sqlite:///{database_file(state_dir)}",
        edge_token=token,
        log_level=environment.get("OPENDSEC_LOG_LEVEL") or "info",
        run_code_project=_project(environment.get("OPENDSEC_RUN_CODE_PROJECT", "")),
    )


def _project(name: str) -> str:
    if name and not PROJECT_NAME.match(name):
        raise InvalidSpecError(
            f"OPENDSEC_RUN_CODE_PROJECT: {name[:80]!r} is not a project's name",
            detail={"field": "OPENDSEC_RUN_CODE_PROJECT"},
        )
    return name


def database_file(state_dir: Path) -> Path:
    """The SQLite file used when no database is named."""
    return state_dir.absolute() / "apiserver" / "iam.sqlite3"
