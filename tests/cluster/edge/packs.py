"""What tests of packing share: asking an edge for a pack, and looking at a sandbox's whole tree from outside."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from tests.cluster.edge.processes import EdgeProcess
from tests.tree_facts import tree_of

SLOW_BYTES = 320 << 20
"""Of a file with nothing in it: mkfs.erofs needs a second or more for it, since it computes a digest of every chunk."""
_OWN_OF_EVERY_SANDBOX = ("proc", "sys", "dev")


class PackFailedError(Exception):
    """A pack ended with an error of ours; `code` is its wire code."""

    def __init__(self, fields: dict[str, Any]) -> None:
        super().__init__(fields["message"])
        self.code = str(fields["code"])
        self.fields = fields


async def pack(
    edge: EdgeProcess, sandbox_id: str, name: str, *, headers: dict[str, str] | None = None, **fields: Any
) -> dict[str, Any]:
    """The result of a pack. Raises PackFailedError."""
    answer = await edge.client.post(
        f"/v1/sandboxes/{sandbox_id}/pack", json={"name": name, **fields}, headers=headers or {}
    )
    if answer.status_code != 200:
        raise PackFailedError(answer.json()["error"])
    *_, last = [json.loads(line) for line in answer.text.splitlines()]
    if last["error"] is not None:
        raise PackFailedError(last["error"])
    assert last["result"] is not None, answer.text
    return dict(last["result"])


async def ok(edge: EdgeProcess, sandbox_id: str, script: str, **fields: Any) -> str:
    """Standard output of a script that must end well."""
    done = await edge.run(sandbox_id, script, **{"user": "root", **fields})
    assert done.result is not None, done.error
    assert done.result["exit_code"] == 0, (bytes(done.stdout), bytes(done.stderr))
    return done.stdout.decode("utf-8", "surrogateescape")


def groups_of(edge: EdgeProcess, sandbox_id: str) -> Path:
    """The sandbox's directory in the cgroup v2 tree."""
    places = [*Path("/sys/fs/cgroup").glob(f"*/{edge.cgroup}/latency/{sandbox_id}")]
    places += [*Path("/sys/fs/cgroup").glob(f"{edge.cgroup}/latency/{sandbox_id}")]
    return next(place for place in places if (place / "cgroup.freeze").exists())


def is_frozen(edge: EdgeProcess, sandbox_id: str) -> bool:
    """Whether its processes stand still now."""
    return "frozen 1" in (groups_of(edge, sandbox_id) / "cgroup.events").read_text(encoding="ascii")


def view_of(edge: EdgeProcess, sandbox_id: str) -> dict[str, tuple[object, ...]]:
    """The tree as its processes see it, with owners as inside. Times are left out of directories that every sandbox has
    from its own node.
    """
    pids = [
        line for file in groups_of(edge, sandbox_id).rglob("cgroup.procs") for line in file.read_text().splitlines()
    ]
    root = Path(f"/proc/{min(pids, key=int)}/root")
    shift = os.stat(root).st_uid
    found = tree_of(root, skip=_OWN_OF_EVERY_SANDBOX)
    view: dict[str, tuple[object, ...]] = {}
    for path, (mode, owner, mtime, link, device, content, attributes, *links) in found.items():
        assert isinstance(owner, tuple)
        assert isinstance(attributes, tuple)
        view[path] = (
            mode,
            tuple(number - shift for number in owner),
            None if path in (".", "etc") else mtime,
            (link, device, content),
            tuple((name, _as_inside(value, shift)) for name, value in attributes),
            *links,
        )
    return view


def _as_inside(value: bytes, shift: int) -> bytes:
    """Capabilities of a file name the root they are good for, as the host knows it (linux/capability.h)."""
    is_capability = len(value) == 24 and value[3] == 3
    return value[:20] if is_capability and int.from_bytes(value[20:], "little") == shift else value


def store_of(edge: EdgeProcess) -> Path:
    """Its image store."""
    return edge.log.parent / "store"


def staged(edge: EdgeProcess) -> list[str]:
    """What lies in the store's staging area."""
    return sorted(path.name for path in (store_of(edge) / "staging").iterdir())
