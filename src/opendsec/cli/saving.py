"""`opendsec snapshot create|ls|rm` and `opendsec fork`: sandboxes saved whole, and going on as several."""

from __future__ import annotations

from typing import Annotated

import typer

from opendsec import DSecClient
from opendsec.cli import exits, options
from opendsec.cli.output import Json, note, print_error, print_json, print_line, print_table, progress, size, when
from opendsec.cli.percent import Percent
from opendsec.cli.session import with_client
from opendsec.errors import OpenDSecError

app = typer.Typer(help="Snapshots: sandboxes saved whole, which others start from.", no_args_is_help=True)
SandboxId = Annotated[str, typer.Argument(metavar="SANDBOX", help="Id of a sandbox, running or paused.")]
Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of the snapshot.")]


@app.command("create")
def create(sandbox_id: SandboxId, name: Name, as_json: Json = False) -> None:
    """Save a sandbox, memory and disk, under a name of your project. It goes on. Needs a key that may build."""

    async def main(client: DSecClient) -> int:
        sandbox = await client.connect(sandbox_id)
        with progress(f"saving {sandbox_id}", 100) as advance:
            made = await sandbox.snapshot(name, on_progress=Percent(advance).show)
        if as_json:
            print_json(made)
            return 0
        note(f"{size(made.disk_bytes)}; start from it with `opendsec run --snapshot {made.name} -- COMMAND`")
        print_line(made.name)
        return 0

    with_client(main)


@app.command("ls")
def list_(
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Names only.")] = False, as_json: Json = False
) -> None:
    """List the snapshots of your project."""

    async def main(client: DSecClient) -> int:
        found = await client.snapshots.list()
        if as_json:
            print_json(found)
        elif quiet:
            for one in found:
                print_line(one.name)
        else:
            columns = ("SNAPSHOT", "BACKEND", "IMAGE", "ON DISK", "MADE", "IN USE", "READ BY")
            rows = [
                (
                    one.name,
                    str(one.backend or ""),
                    one.spec.image if one.spec else one.problem,
                    size(one.disk_bytes),
                    when(one.created_at) if one.created_at else "",
                    str(one.users),
                    one.binding,
                )
                for one in found
            ]
            print_table(columns, rows)
        return 0

    with_client(main)


@app.command("rm")
def remove(
    names: Annotated[list[str], typer.Argument(metavar="NAME", help="Names of snapshots.")],
    force: Annotated[bool, typer.Option("--force", help="Also while sandboxes need them.")] = False,
    as_json: Json = False,
) -> None:
    """Remove snapshots. Needs a key that may build."""

    async def main(client: DSecClient) -> int:
        removed, failed = [], []
        for name in names:
            try:
                removed.append(await client.snapshots.remove(name, force=force))
            except OpenDSecError as error:
                failed.append(error)
        if as_json:
            print_json(removed)
        else:
            for one in removed:
                print_line(one.name)
        for problem in failed:
            print_error(problem, as_json=False)
        return max((exits.of_error(one) for one in failed), default=0)

    with_client(main)


def fork(
    sandbox_id: SandboxId,
    count: Annotated[int, typer.Option("--count", "-n", min=1, help="How many.")] = 1,
    labels: options.Labels = None,
    as_json: Json = False,
) -> None:
    """Start sandboxes that go on from the present state of another, programs included. It goes on, too.

    Printed are the ids of the new ones.
    """
    wanted = options.pairs(labels, "--label") if labels is not None else None

    async def main(client: DSecClient) -> int:
        made = await (await client.connect(sandbox_id)).fork(count, labels=wanted)
        if as_json:
            print_json([{"sandbox_id": one.id} for one in made])
        else:
            for one in made:
                print_line(one.id)
        return 0

    with_client(main)
