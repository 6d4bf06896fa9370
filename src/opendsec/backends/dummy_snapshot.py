"""What a dummy snapshot is on the disk: one JSON file with the file tree and the sessions of a machine.

Running commands are no part of it: they exist in this process alone. It is bound to nothing but its own version.
"""

from __future__ import annotations

import base64
import json
import os
from pathlib import Path
from typing import Any

from opendsec.backends.dummy_files import Node
from opendsec.backends.dummy_machine import Machine, Session
from opendsec.backends.dummy_shell import ShellState
from opendsec.errors import SnapshotInvalidError

FILE = "machine.json"
BINDING = "dummy 1"


def save(machine: Machine, target: Path) -> None:
    """Into an empty directory. Raises OSError."""
    content = {
        "binding": BINDING,
        "used_bytes": machine.files.used_bytes,
        "root": _node_fields(machine.files.root),
        "sessions": {name: [one.state.cwd, dict(one.state.env)] for name, one in machine.sessions.items()},
    }
    (target / FILE).write_text(json.dumps(content), encoding="ascii")


def load(machine: Machine, saved: Path) -> None:
    """Into a fresh machine. Raises SnapshotInvalidError."""
    try:
        content = json.loads((saved / FILE).read_text(encoding="utf-8"))
        if content["binding"] != BINDING:
            raise SnapshotInvalidError(f"the snapshot is of {content['binding']}, this is {BINDING}")
        machine.files.root = _node(content["root"])
        machine.files.used_bytes = int(content["used_bytes"])
        for name, (cwd, env) in content["sessions"].items():
            machine.sessions[name] = Session(ShellState(cwd=cwd, env=env), used=True)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SnapshotInvalidError(
            f"the snapshot cannot be read: {error}", remedy="remove it, and make it anew"
        ) from error


def _node_fields(node: Node) -> dict[str, Any]:
    return {
        "kind": node.kind,
        "mode": node.mode,
        "mtime_ns": node.mtime_ns,
        "data": base64.b64encode(node.data).decode("ascii"),
        "link": base64.b64encode(os.fsencode(node.link)).decode("ascii"),
        "children": [[base64.b64encode(os.fsencode(k)).decode("ascii"), _node_fields(v)] for k, v in _children(node)],
    }


def _children(node: Node) -> list[tuple[str, Node]]:
    return list(node.children.items())


def _node(fields: dict[str, Any]) -> Node:
    return Node(
        kind=fields["kind"],
        mode=fields["mode"],
        mtime_ns=fields["mtime_ns"],
        data=base64.b64decode(fields["data"]),
        link=os.fsdecode(base64.b64decode(fields["link"])),
        children={os.fsdecode(base64.b64decode(name)): _node(below) for name, below in fields["children"]},
    )
