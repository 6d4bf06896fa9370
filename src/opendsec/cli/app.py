"""The client's commands, put together. The package's entry point adds those of the machine (`opendsec.main`)."""

from __future__ import annotations

import typer

from opendsec.cli import (
    benching,
    calling,
    copying,
    demonstrating,
    docker_checking,
    forwarding,
    image_commands,
    keys,
    listing,
    running,
    saving,
    screening,
    shells,
)
from opendsec.cli.passing_on import SETTINGS, PassingOn

app = typer.Typer(
    help="OpenDSec: isolated sandboxes for LLM agents.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.command("run", cls=PassingOn, context_settings=SETTINGS, rich_help_panel="Sandboxes")(running.run)
app.command("exec", cls=PassingOn, context_settings=SETTINGS, rich_help_panel="Sandboxes")(running.exec_)
app.command("shell", rich_help_panel="Sandboxes")(shells.shell)
app.command("cp", rich_help_panel="Sandboxes")(copying.cp)
app.command("ls", rich_help_panel="Sandboxes")(listing.ls)
app.command("logs", rich_help_panel="Sandboxes")(listing.logs)
app.command("screen", rich_help_panel="Sandboxes")(screening.screen)
app.command("forward", rich_help_panel="Sandboxes")(forwarding.forward)
app.command("docker-check", rich_help_panel="Sandboxes")(docker_checking.docker_check)
app.command("fork", rich_help_panel="Sandboxes")(saving.fork)
app.add_typer(saving.app, name="snapshot", rich_help_panel="Sandboxes")
app.command("pause", rich_help_panel="Sandboxes")(listing.pause)
app.command("resume", rich_help_panel="Sandboxes")(listing.resume)
app.command("stop", rich_help_panel="Sandboxes")(listing.stop)
app.add_typer(calling.app, name="fncall", rich_help_panel="Calls")
app.add_typer(keys.app, name="keys", rich_help_panel="Platform")
app.command("demo", rich_help_panel="Try it")(demonstrating.demo)
app.command("bench", rich_help_panel="Try it")(benching.bench)
app.add_typer(image_commands.app, name="image", rich_help_panel="Images")
