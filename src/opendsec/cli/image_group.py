"""`opendsec image …`, the client's half: commands that ask a platform, wherever it runs.

This machine's half is `opendsec.host.image_group`; `opendsec.main` puts both into one group. A module of commands
registers them with `app` here and is named in `opendsec.cli.image_commands`.
"""

from __future__ import annotations

import typer

HELP = "Images: make, import, build, pack, list, compare, remove."

app = typer.Typer(help=HELP, no_args_is_help=True)
