"""`opendsec keys create|ls|revoke|projects|new-project`: who may use the platform, and for what. Needs an admin key; on
the platform's own machine that is the one `opendsec up` has made."""

from __future__ import annotations

from typing import Annotated

import typer

from opendsec import DSecClient
from opendsec.cli.output import Json, note, print_json, print_line, print_table, when
from opendsec.cli.session import with_client
from opendsec.model.access import Role

app = typer.Typer(help="API keys and projects. Needs an admin key.", no_args_is_help=True)


@app.command("create")
def create(
    role: Annotated[
        Role,
        typer.Option(
            metavar="ROLE",
            help="runner (sandboxes), builder (also images and snapshots), admin (also keys), or member.",
        ),
    ] = Role.RUNNER,
    project: Annotated[str | None, typer.Option(help="Whose sandboxes it sees. Default: your own project.")] = None,
    title: Annotated[str, typer.Option(help="For people: whose it is, or what for.")] = "",
    as_json: Json = False,
) -> None:
    """Make a key and print its secret, which is told this once."""

    async def main(client: DSecClient) -> int:
        made = await client.keys.create(role, project=project, title=title)
        if as_json:
            print_json(made)
            return 0
        record = made.record
        note(f"{record.key_id}: {record.role} of project {record.project}; the secret is not shown again")
        print_line(made.key)
        return 0

    with_client(main)


@app.command("ls")
def list_(as_json: Json = False) -> None:
    """List keys, oldest first. Nobody can be told their secrets."""

    async def main(client: DSecClient) -> int:
        found = await client.keys.list()
        if as_json:
            print_json(found)
        else:
            rows = [(one.key_id, str(one.role), one.project, when(one.created_at), one.title) for one in found]
            print_table(("KEY", "ROLE", "PROJECT", "MADE", "TITLE"), rows)
        return 0

    with_client(main)


@app.command("revoke")
def revoke(
    key_ids: Annotated[list[str], typer.Argument(metavar="KEY", help="Ids of keys, as `opendsec keys ls` says them.")],
    as_json: Json = False,
) -> None:
    """End keys: nothing may be asked with them from now on. Sandboxes go on."""

    async def main(client: DSecClient) -> int:
        for key_id in key_ids:
            await client.keys.revoke(key_id)
            if not as_json:
                print_line(key_id)
        if as_json:
            print_json({"revoked": key_ids})
        return 0

    with_client(main)


@app.command("projects")
def projects(as_json: Json = False) -> None:
    """List projects: sandboxes and snapshots of one are not seen by the keys of another."""

    async def main(client: DSecClient) -> int:
        found = await client.keys.projects()
        if as_json:
            print_json(found)
        else:
            print_table(("PROJECT", "MADE"), [(one.name, when(one.created_at)) for one in found])
        return 0

    with_client(main)


@app.command("new-project")
def new_project(
    name: Annotated[str, typer.Argument(metavar="NAME", help="1 to 63 lower-case letters, digits and inner dashes.")],
    as_json: Json = False,
) -> None:
    """Make a project."""

    async def main(client: DSecClient) -> int:
        made = await client.keys.create_project(name)
        if as_json:
            print_json(made)
        else:
            print_line(made.name)
        return 0

    with_client(main)
