"""`opendsec shell`: a real terminal inside. Raw mode here, a pty there, resizes passed on, the terminal restored."""

from __future__ import annotations

import os
import signal
import termios
import tty
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Annotated

import anyio
import typer

from opendsec import DSecClient, DSecRunArgs, Process, Sandbox
from opendsec.cli import exits, options
from opendsec.cli.output import note, write_bytes
from opendsec.cli.session import with_client
from opendsec.cli.streams import followed, read_input
from opendsec.errors import OpenDSecError
from opendsec.model.command import CommandResult
from opendsec.model.spec import BackendKind

LOGIN_SHELL = "if command -v bash >/dev/null 2>&1; then exec bash -i; else exec sh -i; fi"


def shell(
    target: Annotated[
        str, typer.Argument(metavar="SANDBOX|IMAGE", help="A running sandbox, or an image to start one from.")
    ],
    command: Annotated[
        str, typer.Option("--command", "-c", show_default=False, help="Command line to run instead.")
    ] = LOGIN_SHELL,
    user: options.User = None,
    workdir: options.Workdir = None,
    env: options.Env = None,
    network: options.Network = False,
    workspace: options.Workspace = None,
    toolkits: options.Toolkits = None,
    backend: options.Backend = BackendKind.CONTAINER,
) -> None:
    """Open a terminal in a sandbox. Started from an image, the sandbox ends with the shell."""
    if not os.isatty(0) or not os.isatty(1):
        raise typer.BadParameter(
            "standard input and output are no terminal; use `opendsec exec -i`", param_hint="shell"
        )
    variables = {"TERM": os.getenv("TERM", "xterm-256color"), **options.pairs(env, "--env")}

    if target.startswith("sbx-") and (workspace or toolkits):
        raise typer.BadParameter("a sandbox that runs has its layers already", param_hint="--workspace, --toolkit")
    args = options.run_args(
        target,
        backend=backend,
        memory=None,
        cpus=None,
        network=network,
        labels=None,
        ttl=300.0,
        workspace=workspace,
        toolkits=options.chosen_toolkits(toolkits, no_toolkits=False),
    )

    async def main(client: DSecClient) -> int:
        async with _sandbox(client, target, args) as sandbox:
            rows, cols = _size()
            process = await sandbox.pty(command, rows=rows, cols=cols, cwd=workdir, env=variables, user=user)
            end = await _attached(process)
        if text := exits.sentence(end):
            note(f"opendsec: {text}")
        return exits.of_result(end)

    with_client(main)


@asynccontextmanager
async def _sandbox(client: DSecClient, target: str, args: DSecRunArgs) -> AsyncIterator[Sandbox]:
    if target.startswith("sbx-"):
        yield await client.connect(target)
        return
    async with client.sandbox(args) as sandbox:
        yield sandbox


def _size() -> tuple[int, int]:
    size = os.get_terminal_size(0)
    return max(size.lines, 1), max(size.columns, 1)


@contextmanager
def raw_terminal(descriptor: int) -> Iterator[None]:
    """Every key goes through as it is; the terminal is as before when the block is left."""
    before = termios.tcgetattr(descriptor)
    try:
        tty.setraw(descriptor)
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


async def _attached(process: Process) -> CommandResult:
    """Copy keys in and the screen out until the command has ended. When this side goes first, the command is ended."""
    async with followed(process):
        with raw_terminal(0):
            async with anyio.create_task_group() as group:
                group.start_soon(_keys, process)
                group.start_soon(_sizes, process)
                async for data in process.stdout:
                    write_bytes(1, data)
                group.cancel_scope.cancel()
        return await process.wait()


async def _keys(process: Process) -> None:
    while data := await read_input(0):
        await process.stdin.write(data)
    await process.kill(grace=1.0)


async def _sizes(process: Process) -> None:
    with anyio.open_signal_receiver(signal.SIGWINCH) as changes:
        async for _ in changes:
            rows, cols = _size()
            try:
                await process.resize(rows=rows, cols=cols)
            except OpenDSecError:
                return  # it has just ended: there is no window to resize
