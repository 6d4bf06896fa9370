"""A command's streams on this process's own: output as it comes, byte for byte, and standard input when asked for."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio

from opendsec import Process
from opendsec.cli.output import write_bytes
from opendsec.model.command import CommandResult

CHUNK_BYTES = 65536


async def read_input(descriptor: int) -> bytes:
    """The next bytes of a terminal, pipe or file; b"" at its end. Waits without a thread, so leaving never hangs."""
    try:
        await anyio.wait_readable(descriptor)
    except PermissionError:
        pass  # a regular file cannot be polled: it is always ready
    return os.read(descriptor, CHUNK_BYTES)


async def relay(process: Process, *, stdin: bool, owned: bool = True) -> CommandResult:
    """Copy until the command has ended; returns how. Cancelled: the command is ended too, if it is `owned`."""
    async with followed(process, owned=owned):
        async with anyio.create_task_group() as group:
            if stdin:
                group.start_soon(_feed, process)
            await _drain(process)
            group.cancel_scope.cancel()
        return await process.wait()


@asynccontextmanager
async def followed(process: Process, *, owned: bool = True) -> AsyncIterator[None]:
    """The stream is closed at the end; after a failure or an interrupt the command is ended too, if it is `owned`."""
    try:
        yield
    except BaseException:
        if owned:
            with anyio.move_on_after(5, shield=True):
                await process.kill(grace=1.0)
        raise
    finally:
        with anyio.move_on_after(2, shield=True):
            await process.aclose()


async def _drain(process: Process) -> None:
    async with anyio.create_task_group() as group:
        group.start_soon(_copy, process, 0)
        group.start_soon(_copy, process, 1)


async def _copy(process: Process, stream: int) -> None:
    source = process.stderr if stream else process.stdout
    async for data in source:
        write_bytes(2 if stream else 1, data)


async def _feed(process: Process) -> None:
    while data := await read_input(0):
        await process.stdin.write(data)
    await process.stdin.close()
