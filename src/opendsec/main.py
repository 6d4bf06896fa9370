"""The `opendsec` command: puts the client's commands and this machine's commands together.

Errors of ours end as one sentence and a status of `opendsec.cli.exits`; anything else is a bug and shows its traceback.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NoReturn

from opendsec.cli import exits
from opendsec.cli.app import app
from opendsec.cli.output import print_error
from opendsec.errors import OpenDSecError
from opendsec.host import doctor, images, up

app.command("up", rich_help_panel="This machine")(up.up)
app.command("down", rich_help_panel="This machine")(up.down)
app.command("status", rich_help_panel="This machine")(up.status)
app.command("doctor", rich_help_panel="This machine")(doctor.doctor)
app.add_typer(images.app, name="image", rich_help_panel="This machine")


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and leave with its exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        app(words, prog_name="opendsec")
    except OpenDSecError as error:
        print_error(error, as_json=asks_for_json(words))
        sys.exit(exits.of_error(error))
    sys.exit(0)


def asks_for_json(words: Sequence[str]) -> bool:
    """Is `--json` among our own words, not among those of a command to run?"""
    own = words[: words.index("--")] if "--" in words else words
    return "--json" in own


if __name__ == "__main__":
    main()
