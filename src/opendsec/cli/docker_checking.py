"""`opendsec docker-check SANDBOX`: whether a Docker daemon can run in a sandbox, and if not, what is missing first.

The script `docker_check.sh` tries it inside; nothing of it stays there.
"""

from __future__ import annotations

from importlib.resources import files
from typing import Annotated

import typer

from opendsec import DSecClient
from opendsec.cli import exits
from opendsec.cli.output import Json, note, print_json, print_line
from opendsec.cli.session import with_client

DATA_ROOT = "/var/lib/docker"
TIMEOUT_S = 300.0
"""Emulated, on a busy host, it takes half a minute."""


def docker_check(
    sandbox_id: Annotated[str, typer.Argument(metavar="SANDBOX", help="Id of a running sandbox.")],
    data_root: Annotated[str, typer.Option("--data-root", metavar="PATH", help="The daemon's data root.")] = DATA_ROOT,
    as_json: Json = False,
) -> None:
    """Can a Docker daemon run in this sandbox? One sentence says so, or what is missing first (status 1)."""
    script = (files("opendsec.cli") / "docker_check.sh").read_text()

    async def main(client: DSecClient) -> int:
        sandbox = await client.connect(sandbox_id)
        argv = ("sh", "-c", script, "docker-check", data_root)
        result = await sandbox.commands.run(argv, user="0:0", timeout=TIMEOUT_S)
        status = exits.of_result(result)
        lines = [*result.stdout.splitlines(), "", ""]
        if status not in (0, 1) or not lines[0]:
            note(result.stderr or "the check did not come to an end")
            return status or exits.PLATFORM
        if as_json:
            print_json({"ok": status == 0, "sentence": lines[0], "remedy": lines[1]})
            return status
        print_line(lines[0])
        if status:
            note(lines[1])
        return status

    with_client(main)
