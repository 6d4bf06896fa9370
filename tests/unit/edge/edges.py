"""An edge over the dummy backend, for tests."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from opendsec.backends.base import Backend
from opendsec.backends.dummy import DummyBackend
from opendsec.edge.admission import AdmissionLimits
from opendsec.edge.command import Command
from opendsec.edge.images import AnyImage
from opendsec.edge.node import Node, NodeSettings
from opendsec.edge.sandbox import Sandbox
from opendsec.model.command import CommandResult, ExecRequest
from opendsec.model.ids import SandboxId, new_sandbox_id
from opendsec.model.spec import BackendKind, Lifetime, SandboxSpec

PLENTY = AdmissionLimits(memory_floor_mb=0, disk_floor_mb=0)


def dummy_spec(image: str = "debian", **fields: object) -> SandboxSpec:
    return SandboxSpec(image=image, backend=BackendKind.DUMMY, **fields)  # type: ignore[arg-type]


def settings_below(root: Path, **fields: object) -> NodeSettings:
    given = {"limits": PLENTY, **fields}
    return NodeSettings(state_dir=root / "state", run_dir=root / "run", **given)  # type: ignore[arg-type]


@contextlib.asynccontextmanager
async def edge(root: Path, backend: Backend | None = None, **fields: object) -> AsyncIterator[Node]:
    """One edge process's worth of node. Entered twice over the same root and backend, the second adopts."""
    backend = backend or DummyBackend()
    async with Node(settings_below(root, **fields), backends={BackendKind.DUMMY: backend}, images=AnyImage()) as node:
        yield node


async def created(node: Node, spec: SandboxSpec | None = None, *, sandbox_id: SandboxId | None = None) -> Sandbox:
    """A running sandbox."""
    sandbox = await node.create(
        spec or dummy_spec(lifetime=Lifetime(ttl_running_stop=None)),
        project="default",
        sandbox_id=sandbox_id or new_sandbox_id("local"),
    )
    await sandbox.wait_ready()
    return sandbox


async def ended(command: Command) -> Command:
    """The command when it is over."""
    event = command.watch()
    try:
        while not command.done:
            await event.wait()
            event.clear()
    finally:
        command.unwatch(event)
    return command


async def run(sandbox: Sandbox, script: str, **fields: object) -> CommandResult:
    """The result of a script. Raises what forbade it."""
    command = await ended(await sandbox.submit(ExecRequest(script=script, **fields)))  # type: ignore[arg-type]
    if command.error is not None:
        raise command.error
    assert command.result is not None
    return command.result


async def output(sandbox: Sandbox, command: Command, *, stderr: bool = False, offset: int = 0) -> bytes:
    """Everything kept of a stream from an offset."""
    stream = command.stderr if stderr else command.stdout
    found = bytearray()
    while data := await sandbox.commands.read(command, stream, offset + len(found)):
        found += data
    return bytes(found)


async def until(condition: Callable[[], bool], *, seconds: float = 30.0) -> None:
    """Wait for a condition, not for a time."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.002)
