"""`opendsec image import NAME FILE --disk`: what is said of the machine a whole disk was made for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import typer

from opendsec.errors import InvalidSpecError
from opendsec.model.image import Devices, DiskFormat, Firmware, Graphics, Machine
from opendsec.store.disks import SECTOR

_PANEL = "A whole disk"
Disk = Annotated[
    bool,
    typer.Option("--disk", help="SOURCE is the disk of a machine, for full VMs; nothing of it is unpacked.",
                 rich_help_panel=_PANEL),
]  # fmt: skip
WithFirmware = Annotated[
    Firmware, typer.Option("--firmware", help="What the machine starts with.", rich_help_panel=_PANEL)
]
WithTpm = Annotated[bool, typer.Option("--tpm", help="The machine has a TPM 2.0.", rich_help_panel=_PANEL)]
WithAgent = Annotated[
    bool, typer.Option("--agent", help="OpenDSec's guest agent is installed on it.", rich_help_panel=_PANEL)
]
WithGraphics = Annotated[
    Graphics, typer.Option("--graphics", help="Display adapter of the machine.", rich_help_panel=_PANEL)
]
WithDevices = Annotated[
    Devices, typer.Option("--devices", help="Disk, network card and pointer of the machine.", rich_help_panel=_PANEL)
]
WithMemory = Annotated[
    int, typer.Option("--memory-mb", min=4, help="MiB of a sandbox that names no limit.", rich_help_panel=_PANEL)
]
WithCpus = Annotated[
    int, typer.Option("--cpus", min=1, max=255, help="Of a sandbox that names no limit.", rich_help_panel=_PANEL)
]
OfFormat = Annotated[
    DiskFormat | None,
    typer.Option("--format", help="Of the file; default: qcow2 if it begins so, else raw.", rich_help_panel=_PANEL),
]


def machine_of(
    firmware: Firmware, graphics: Graphics, devices: Devices, *, tpm: bool, agent: bool, memory_mb: int, cpus: int
) -> Machine:
    """What the options say; format and size are found out from the disk."""
    return Machine(
        format=DiskFormat.RAW,
        virtual_bytes=SECTOR,
        firmware=firmware,
        graphics=graphics,
        devices=devices,
        tpm=tpm,
        agent=agent,
        memory_mb=memory_mb,
        cpus=cpus,
    )


def refuse_of_trees(given: Mapping[str, object]) -> None:
    """Options of the same command that are for trees of files: InvalidSpecError naming one that was given."""
    for field, value in given.items():
        if value:
            raise InvalidSpecError(
                f"{field}: does not go with --disk, of which nothing is unpacked", detail={"field": field}
            )
