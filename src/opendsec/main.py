"""The `opendsec` command: puts the client's commands and this machine's commands together.

Commands of the client do not load this machine's: the servers' libraries would double their start-up time.
Errors of ours end as one sentence and a status of `opendsec.cli.exits`; anything else is a bug and shows its traceback.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import Annotated, NoReturn

import typer

from opendsec.cli import exits
from opendsec.cli.app import app as client_app
from opendsec.cli.image_group import Here
from opendsec.cli.output import print_error, print_line
from opendsec.errors import OpenDSecError

_PANEL = "This machine"
IMAGES = "image"
"""The group that has commands of both."""


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and leave with its exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        app_for(words)(words, prog_name="opendsec", obj=_images_here(words))
    except OpenDSecError as error:
        print_error(error, as_json=asks_for_json(words))
        sys.exit(exits.of_error(error))
    sys.exit(0)


def app_for(words: Sequence[str]) -> typer.Typer:
    """What these words need: the client's commands alone, images alone, or everything."""
    names = {command.name for command in client_app.registered_commands} | {"fncall", "keys", "snapshot"}
    match words[:1]:
        case [first] if first in names:
            return client_app
        case ["--version"]:
            return _outline()
        case ["image"]:
            app = _outline()
            _add_images(app)
            return app
        case _:
            return whole_app()


def whole_app() -> typer.Typer:
    """All commands: the client's and this machine's."""
    from opendsec.host import doctor, firecracker_commands, kernel_commands, up

    whole = _outline()
    for name, command in (("up", up.up), ("down", up.down), ("status", up.status), ("doctor", doctor.doctor)):
        whole.command(name, rich_help_panel=_PANEL)(command)
    _add_images(whole)
    whole.add_typer(kernel_commands.app, name="kernel", rich_help_panel=_PANEL)
    whole.add_typer(firecracker_commands.app, name="firecracker", rich_help_panel=_PANEL)
    return whole


def _outline() -> typer.Typer:
    """The client's commands and the options of all."""
    app = typer.Typer()
    app.info = client_app.info
    app.callback()(_options)
    app.pretty_exceptions_enable = False
    app.rich_markup_mode = client_app.rich_markup_mode
    app.registered_commands = list(client_app.registered_commands)
    return app


def _add_images(app: typer.Typer) -> None:
    """The client's groups; in that about images this machine's commands too."""
    from opendsec.host import image_commands

    for group in client_app.registered_groups:
        assert group.typer_instance is not None
        of_images = group.name == IMAGES
        commands = _merged(group.typer_instance, image_commands.app) if of_images else group.typer_instance
        app.add_typer(commands, name=group.name, rich_help_panel=group.rich_help_panel)


def _merged(client: typer.Typer, host: typer.Typer) -> typer.Typer:
    """One group with the commands of both."""
    merged = typer.Typer()
    merged.info = client.info
    merged.registered_commands = [*client.registered_commands, *host.registered_commands]
    return merged


def _images_here(words: Sequence[str]) -> Here | None:
    """Where commands about images look unless they are to ask a platform; see `opendsec.cli.image_group`."""
    if words[:1] != ["image"]:
        return None
    from opendsec.host.images_here import unless_a_platform_is_named

    return unless_a_platform_is_named()


def _show_version(wanted: bool) -> None:
    if wanted:
        print_line(f"opendsec {version('opendsec')}")
        raise typer.Exit


def _options(
    _version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_show_version, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


def asks_for_json(words: Sequence[str]) -> bool:
    """Is `--json` among our own words, not among those of a command to run?"""
    own = words[: words.index("--")] if "--" in words else words
    return "--json" in own


if __name__ == "__main__":
    main()
