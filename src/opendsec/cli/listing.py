"""`opendsec ls`, `logs`, `pause`, `resume` and `stop`: which sandboxes there are, what their commands wrote, holding
them and ending them."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Annotated

import anyio
import typer

from opendsec import DSecClient
from opendsec.cli import exits, options
from opendsec.cli.output import Json, note, print_error, print_json, print_line, print_table, progress, size, when
from opendsec.cli.session import with_client
from opendsec.cli.streams import relay
from opendsec.errors import OpenDSecError
from opendsec.model.command import CommandStatus
from opendsec.model.node import LIVE_STATES, SandboxState, SandboxStatus

PARALLEL = 32
SandboxIds = Annotated[list[str], typer.Argument(metavar="SANDBOX", help="Ids of sandboxes.")]


def ls(
    labels: options.Labels = None,
    state: Annotated[SandboxState | None, typer.Option(metavar="STATE", help="Only those in this state.")] = None,
    everything: Annotated[bool, typer.Option("--all", "-a", help="Also those that have ended lately.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Ids only.")] = False,
    as_json: Json = False,
) -> None:
    """List your sandboxes."""
    wanted = options.pairs(labels, "--label")

    async def main(client: DSecClient) -> int:
        found = [item async for item in client.list(labels=wanted, state=state, usage=not quiet)]
        shown = [item for item in found if everything or state is not None or item.state in LIVE_STATES]
        if as_json:
            print_json(shown)
        elif quiet:
            for item in shown:
                print_line(item.sandbox_id)
        else:
            columns = ("SANDBOX", "STATE", "IMAGE", "AGE", "COMMANDS", "MEMORY", "LABELS")
            print_table(columns, [_row(item) for item in shown])
        return 0

    with_client(main)


def _row(item: SandboxStatus) -> tuple[str, ...]:
    state = f"{item.state} ({item.end_reason})" if item.end_reason else str(item.state)
    labels = " ".join(f"{key}={value}" for key, value in item.spec.labels.items())
    age = _age(time.time() - item.created_at)
    spec = item.spec
    images = " + ".join([spec.image, *([spec.workspace] if spec.workspace else []), *(spec.toolkits or ())])
    return item.sandbox_id, state, images, age, str(item.running_commands), size(item.memory_bytes), labels


def _age(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f}{unit}"
    return f"{max(seconds, 0):.0f}s"


def logs(
    sandbox_id: Annotated[str, typer.Argument(metavar="SANDBOX", help="Id of a sandbox.")],
    command_id: Annotated[
        str | None, typer.Argument(metavar="COMMAND", help="Id of a command; without it they are listed.")
    ] = None,
    as_json: Json = False,
) -> None:
    """List the commands of a sandbox, or show the output of one and follow it to its end."""

    async def main(client: DSecClient) -> int:
        sandbox = await client.connect(sandbox_id)
        if command_id is not None and not as_json:
            process = await sandbox.commands.attach(command_id)
            end = await relay(process, stdin=False, owned=False)
            if text := exits.sentence(end):
                note(f"opendsec: {text}")
            return exits.of_result(end)
        commands = await sandbox.commands.list()
        if command_id is not None:
            commands = tuple(item for item in commands if item.command_id == command_id)
        if as_json:
            print_json(commands)
            return 0
        columns = ("COMMAND", "STARTED", "STATUS", "OUTPUT", "WHAT")
        rows = [
            (
                item.command_id,
                when(item.started_at),
                state_of(item),
                size(item.stdout_bytes + item.stderr_bytes),
                item.summary.replace("\n", " ")[:60],
            )
            for item in commands
        ]
        print_table(columns, rows)
        return 0

    with_client(main)


def stop(
    sandbox_ids: Annotated[list[str] | None, typer.Argument(metavar="SANDBOX", help="Ids of sandboxes.")] = None,
    everything: Annotated[bool, typer.Option("--all", "-a", help="All of your project.")] = False,
    labels: options.Labels = None,
    as_json: Json = False,
) -> None:
    """Stop sandboxes. What was stopped already is no error."""
    wanted = options.pairs(labels, "--label")
    if not sandbox_ids and not everything and not wanted:
        raise typer.BadParameter("name sandboxes, or use --label or --all", param_hint="SANDBOX")

    async def main(client: DSecClient) -> int:
        names = list(sandbox_ids or ())
        if everything or wanted:
            found = [item async for item in client.list(labels=wanted)]
            names += [item.sandbox_id for item in found if item.state in LIVE_STATES]
        return await _each(names, client.stop, "stopping", as_json=as_json)

    with_client(main)


def pause(sandbox_ids: SandboxIds, as_json: Json = False) -> None:
    """Hold sandboxes: their programs stand still until they are resumed. What is paused already is no error."""

    async def main(client: DSecClient) -> int:
        async def one(name: str) -> SandboxStatus:
            return await (await client.connect(name)).pause()

        return await _each(sandbox_ids, one, "pausing", as_json=as_json)

    with_client(main)


def resume(sandbox_ids: SandboxIds, as_json: Json = False) -> None:
    """Let paused sandboxes go on. What runs already is no error."""

    async def main(client: DSecClient) -> int:
        async def one(name: str) -> SandboxStatus:
            return await (await client.connect(name)).resume()

        return await _each(sandbox_ids, one, "resuming", as_json=as_json)

    with_client(main)


def state_of(command: CommandStatus) -> str:
    """What became of it, in a word or two: its end reason and exit status once it has ended."""
    if command.running:
        return "running"
    if command.result is None:
        return "not started"
    code = command.result.exit_code
    return str(command.result.end_reason) if code is None else f"{command.result.end_reason} {code}"


async def _each(names: list[str], act: Callable[[str], Awaitable[SandboxStatus]], doing: str, *, as_json: bool) -> int:
    """Do it to all, also when one fails; what was done is printed, then what failed."""
    done: list[SandboxStatus] = []
    failed: list[OpenDSecError] = []
    limit = anyio.CapacityLimiter(PARALLEL)

    async def one(name: str) -> None:
        async with limit:
            try:
                done.append(await act(name))
            except OpenDSecError as error:
                failed.append(error)
        advance(1)

    with progress(doing, len(names)) as advance:
        async with anyio.create_task_group() as group:
            for name in names:
                group.start_soon(one, name)
    if as_json:
        print_json(done)
    else:
        for item in done:
            print_line(item.sandbox_id)
    for error in failed:
        print_error(error, as_json=False)
    return max((exits.of_error(error) for error in failed), default=0)
