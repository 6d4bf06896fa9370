"""The sandboxes of a build, and programs that run in them.

Sandboxes are the builder's guests: they end with the block they are started in, and one whose builder died ends by
itself within TTL_S, because the builder has to prolong its life while it lives.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

import anyio

from opendsec.build.steps import Run
from opendsec.client._async.client import DSecClient
from opendsec.client._async.process import Process, ProcessOutput
from opendsec.client._async.sandbox import Sandbox
from opendsec.client.run_args import DSecContainerRunArgs
from opendsec.errors import CommandFailedError, ExecError
from opendsec.model.command import CommandResult, EndReason

ROOT = "0:0"
"""By number: an image may have no accounts."""
TTL_S = 600.0
"""A sandbox of a builder that died is gone after that at the latest."""
_PROLONG_EVERY_S = 60.0
_TAIL_BYTES = 4000
ANYWHERE = {"*": True}

OnOutput = Callable[[bytes], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Of the sandboxes of a build; None is the node's default."""

    memory_limit_mb: int | None = None
    cpu_cores_limit: float | None = None


class Guests:
    """Starts the sandboxes of one build."""

    def __init__(self, client: DSecClient, *, label: str, limits: Limits) -> None:
        self._client = client
        self._label = label
        self._limits = limits

    @asynccontextmanager
    async def started(self, image: str, *, network: bool = False) -> AsyncIterator[Sandbox]:
        """A sandbox of this image with the toolkits it asks for, root's, for a block."""
        began = time.monotonic()
        args = DSecContainerRunArgs(
            container_image=image,
            memory_limit_mb=self._limits.memory_limit_mb,
            cpu_cores_limit=self._limits.cpu_cores_limit,
            pids_limit=None,
            ttl_running_stop=None,
            ttl_max_stop=TTL_S,
            network_rules=ANYWHERE if network else {},
            init_user=ROOT,
            workdir="/",
            labels={"opendsec.build": self._label},
        )
        with _one_error():
            async with self._client.container(args) as sandbox, anyio.create_task_group() as group:
                group.start_soon(_prolong, sandbox, began)
                yield sandbox
                group.cancel_scope.cancel()


@contextmanager
def _one_error() -> Iterator[None]:
    """The first of several errors at once: the others came of it."""
    try:
        yield
    except BaseExceptionGroup as failures:
        first: BaseException = failures
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        raise first from None


async def _prolong(sandbox: Sandbox, began: float) -> None:
    """`ttl_max_stop` counts from the sandbox's beginning, which is not before `began`."""
    while True:
        await anyio.sleep(_PROLONG_EVERY_S)
        await sandbox.update(ttl_max_stop=time.monotonic() - began + TTL_S)


async def run(sandbox: Sandbox, step: Run, where: str, on_output: OnOutput) -> None:
    """Run the program to its end. Raises CommandFailedError with the end of its output, ExecError."""
    tail = bytearray()

    def told(data: bytes) -> None:
        tail.extend(data)
        del tail[:-_TAIL_BYTES]
        on_output(data)

    try:
        process = await sandbox.commands.start(
            list(step.argv), cwd=step.workdir, env={**step.unkeyed_env, **step.env}, user=step.user or ROOT
        )
    except ExecError as error:
        raise ExecError(f"{where}: {error.message}", detail={**error.detail, "line": step.line}) from error
    result = await _watched(process, told)
    if result.exit_code == 0:
        return
    how = f"exit status {result.exit_code}"
    if result.end_reason is not EndReason.EXITED:
        how = f"it ended with {result.end_reason.value}" if result.exit_code is None else f"{how}, {result.end_reason}"
    raise CommandFailedError(
        f"{where}: {_shortened(step.text)}: {how}",
        detail={
            "line": step.line,
            "exit_code": result.exit_code,
            "end_reason": result.end_reason.value,
            "output": tail.decode("utf-8", "replace"),
        },
    )


async def _watched(process: Process, told: OnOutput) -> CommandResult:
    async def read(output: ProcessOutput) -> None:
        async for piece in output:
            told(piece)

    try:
        with _one_error():
            async with anyio.create_task_group() as group:
                group.start_soon(read, process.stdout)
                group.start_soon(read, process.stderr)
        return await process.wait()
    finally:
        await process.aclose()


def _shortened(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 100 else f"{line[:97]}…"
