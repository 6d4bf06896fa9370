"""`opendsec image build-disk`: any Linux image of the store as the disk of a full VM."""

from __future__ import annotations

from typing import Annotated

import typer

from opendsec.cli.output import Json
from opendsec.host.image_group import app, errors_shown, open_store, progress_shown, state_directory
from opendsec.host.images import Replace, print_image
from opendsec.host.kernel_commands import download_environment
from opendsec.linux.launch import GUEST_PATH
from opendsec.model.ids import check_image_name
from opendsec.store.progress import Progress
from opendsec.vm.disk_building import DiskRecipe, build_disk
from opendsec.vm.disk_kernels import PACKAGE, disk_kernel


@app.command("build-disk")
def build(
    name: Annotated[str, typer.Argument(help="Name of the new image.")],
    source: Annotated[str, typer.Option("--from", help="Image of the store whose files it gets.")],
    kernel: Annotated[
        str, typer.Option("--kernel", help="Debian package of the kernel; kept for later disks.")
    ] = PACKAGE,
    modules: Annotated[
        bool, typer.Option("--modules/--no-modules", help="With all modules of the kernel, for modprobe.")
    ] = True,
    size_mb: Annotated[
        int, typer.Option("--size-mb", min=0, help="MiB of the disk; 0: what the image takes, and 4 GiB.")
    ] = 0,
    memory_mb: Annotated[int, typer.Option(min=128, help="MiB of a sandbox that names no limit.")] = 512,
    cpus: Annotated[int, typer.Option(min=1, max=255, help="Of a sandbox that names no limit.")] = 1,
    replace: Replace = False,
    as_json: Json = False,
) -> None:
    """Make a disk for full VMs of any Linux image: its files, a Debian kernel, and the guest agent as init."""
    recipe = DiskRecipe(image=source, memory_mb=memory_mb, cpus=cpus, size_mib=size_mb, modules=modules)
    with errors_shown(as_json), progress_shown(f"image {name}") as on_progress:
        check_image_name(name, field="name")
        store = open_store()
        store.compose(source)  # before anything is fetched
        with disk_kernel(
            state_directory(),
            kernel,
            environment=download_environment(),
            say=lambda text: on_progress(Progress(phase=text)),
        ) as unpacked:
            image = build_disk(
                store,
                name,
                recipe,
                kernel=unpacked,
                agent=GUEST_PATH,
                replace_old=replace,
                on_progress=on_progress,
            )
    print_image(image, as_json=as_json)
