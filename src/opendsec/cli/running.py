"""`opendsec run` and `opendsec exec`: one command, its output as it comes, its exit status."""

from __future__ import annotations

import shlex
from typing import Annotated, Any

import typer

from opendsec import DSecClient, DSecRunArgs, Sandbox, ShellResult
from opendsec.cli import exits, options
from opendsec.cli.output import Json, note, print_json, print_line
from opendsec.cli.passing_on import ALL_INSIDE
from opendsec.cli.session import with_client
from opendsec.cli.streams import relay
from opendsec.errors import ExecError, SnapshotInvalidError
from opendsec.model.spec import BackendKind

Stdin = Annotated[
    bool, typer.Option("--stdin", "-i", help="Give this terminal's, pipe's or file's bytes to the command.")
]
Keep = Annotated[
    bool,
    typer.Option(
        "--keep",
        help="Leave the sandbox running and print its id on standard error; without a command, on standard output.",
    ),
]
Session = Annotated[
    str | None, typer.Option("--session", help="Run it in the shell of this name, which keeps directory and variables.")
]


def run(
    context: typer.Context,
    image: Annotated[str, typer.Argument(metavar="IMAGE -- COMMAND...", help="An image, and what to run.")],
    snapshot: options.Snapshot = None,
    workspace: options.Workspace = None,
    toolkits: options.Toolkits = None,
    no_toolkits: options.NoToolkits = False,
    backend: options.Backend = BackendKind.CONTAINER,
    memory: options.Memory = None,
    cpus: options.Cpus = None,
    disk: options.Disk = None,
    screen: options.Screen = None,
    network: options.Network = False,
    user: options.User = None,
    workdir: options.Workdir = None,
    env: options.Env = None,
    labels: options.Labels = None,
    timeout: options.Timeout = None,
    ttl: options.IdleTtl = 300.0,
    stdin: Stdin = False,
    keep: Keep = False,
    as_json: Json = False,
) -> None:
    """Start a sandbox, run a command in it, stop the sandbox: `opendsec run debian -- python3 -c 'print(1)'`."""
    argv = _argv(context, image, may_be_none=keep) if snapshot is None else _argv_alone(context, image)
    given: dict[str, Any] = {
        "memory": memory,
        "cpus": cpus,
        "disk": disk,
        "screen": screen,
        "labels": labels,
        "ttl": ttl,
        "workspace": workspace,
        "toolkits": options.chosen_toolkits(toolkits, no_toolkits),
    }
    variables = options.pairs(env, "--env")
    source = context.get_parameter_source("backend")
    named = source is not None and source.name != "DEFAULT"

    async def main(client: DSecClient) -> int:
        if snapshot is None:
            args = options.run_args(image, backend=backend, network=network, **given)
        else:
            args = await _of_snapshot(client, snapshot, backend=backend if named else None, network=network, **given)
        if not keep:
            async with client.sandbox(args) as sandbox:
                return await _run(
                    sandbox, argv, variables, user=user, cwd=workdir, timeout=timeout, stdin=stdin, as_json=as_json
                )
        sandbox = await client.run(args)
        if not argv:
            print_line(sandbox.id)
            return 0
        note(f"sandbox {sandbox.id}")
        return await _run(
            sandbox, argv, variables, user=user, cwd=workdir, timeout=timeout, stdin=stdin, as_json=as_json
        )

    with_client(main)


def exec_(
    context: typer.Context,
    sandbox_id: Annotated[
        str, typer.Argument(metavar="SANDBOX -- COMMAND...", help="A running sandbox, and what to run.")
    ],
    user: options.User = None,
    workdir: options.Workdir = None,
    env: options.Env = None,
    timeout: options.Timeout = None,
    stdin: Stdin = False,
    session: Session = None,
    as_json: Json = False,
) -> None:
    """Run a command in a sandbox that is there already: `opendsec exec sbx-… -- make test`."""
    argv = _argv(context, sandbox_id)
    variables = options.pairs(env, "--env")

    async def main(client: DSecClient) -> int:
        sandbox = await client.connect(sandbox_id)
        return await _run(
            sandbox,
            argv,
            variables,
            user=user,
            cwd=workdir,
            timeout=timeout,
            stdin=stdin,
            session=session,
            as_json=as_json,
        )

    with_client(main)


async def _of_snapshot(
    client: DSecClient, snapshot: str, *, backend: BackendKind | None, network: bool, **given: Any
) -> DSecRunArgs:
    """A snapshot says itself which backend reads it and whether it has a network."""
    found = await client.snapshots.get(snapshot)
    if found.backend is None or found.spec is None:
        raise SnapshotInvalidError(found.problem or f"snapshot {snapshot!r} cannot be read")
    if backend not in (None, found.backend):
        raise typer.BadParameter(
            f"the snapshot {snapshot} was made by the {found.backend} backend", param_hint="--backend"
        )
    has_network = any(found.spec.network_rules.values())
    if network and not has_network:
        raise typer.BadParameter(f"the snapshot {snapshot} was made without a network", param_hint="--network")
    return options.run_args(None, backend=found.backend, network=has_network, snapshot=snapshot, **given)


def _argv_alone(context: typer.Context, first: str) -> list[str]:
    """All the words: there is no image among them. Raises typer.BadParameter."""
    if first.startswith("-"):
        raise typer.BadParameter(f"there is no option {first}; -h shows all", param_hint="options")
    if context.args[:1] == ["--"] and not context.meta[ALL_INSIDE]:
        raise typer.BadParameter(
            f"{first!r} stands before --, and a snapshot brings its image: run --snapshot NAME -- COMMAND",
            param_hint="IMAGE",
        )
    return [first, *context.args]


def _argv(context: typer.Context, target: str, *, may_be_none: bool = False) -> list[str]:
    """What follows `target`, which was taken for image or sandbox. Raises typer.BadParameter."""
    words = list(context.args)
    if target.startswith("-"):
        raise typer.BadParameter(f"there is no option {target}; -h shows all", param_hint="options")
    if words[:1] == ["--"]:
        words = words[1:]
    elif words and words[0].startswith("-"):
        raise typer.BadParameter(
            f"{words[0]} stands after {target}: options go before it or before --, and what begins with - after that",
            param_hint="COMMAND",
        )
    if not words and not may_be_none:
        raise typer.BadParameter("say what to run, after --", param_hint="COMMAND")
    return words


async def _run(
    sandbox: Sandbox,
    argv: list[str],
    env: dict[str, str],
    *,
    user: str | None,
    cwd: str | None,
    timeout: float | None,
    stdin: bool,
    as_json: bool,
    session: str | None = None,
) -> int:
    command = argv if session is None else shlex.join(argv)
    if as_json:
        result = await sandbox.commands.run(
            command, cwd=cwd, env=env, user=user, timeout=timeout, session=session, stdin=None
        )
        print_json(_fields(sandbox, result))
        return exits.of_result(result)
    try:
        process = await sandbox.commands.start(
            command, cwd=cwd, env=env, user=user, timeout=timeout, stdin=stdin, session=session
        )
    except ExecError as error:
        if len(argv) == 1 and " " in argv[0]:
            error.remedy = f"no program has that name; for a shell's command line: sh -c {shlex.quote(argv[0])}"
        raise
    end = await relay(process, stdin=stdin)
    if text := exits.sentence(end):
        note(f"opendsec: {text}")
    return exits.of_result(end)


def _fields(sandbox: Sandbox, result: ShellResult) -> dict[str, object]:
    return {
        "sandbox_id": sandbox.id,
        "command_id": result.command_id,
        "exit_code": result.exit_code,
        "end_reason": str(result.end_reason),
        "truncated": result.truncated,
        "duration_s": result.duration_s,
        "stdout": result.stdout,
        "stderr": result.stderr,
    }
