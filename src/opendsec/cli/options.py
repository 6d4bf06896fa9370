"""Options that start a sandbox, shared by the commands that do, and how they become run arguments."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

import typer

from opendsec import DSecContainerRunArgs, DSecFullVMRunArgs, DSecMicroVMRunArgs, DSecRunArgs
from opendsec.model.spec import BackendKind

Backend = Annotated[BackendKind, typer.Option(help="Kind of isolation.")]
Snapshot = Annotated[
    str | None,
    typer.Option("--snapshot", metavar="NAME", help="Go on from this snapshot instead of an image; no IMAGE then."),
]
Memory = Annotated[int | None, typer.Option("--memory", metavar="MIB", help="Memory limit in MiB.")]
Cpus = Annotated[float | None, typer.Option("--cpus", metavar="CORES", help="CPU limit in cores, fractions allowed.")]
Disk = Annotated[
    int | None, typer.Option("--disk", metavar="MIB", help="Limit of what it may write, in MiB; of a full VM its disk.")
]
Screen = Annotated[
    str | None, typer.Option("--screen", metavar="WxH", help="Size in pixels of a full VM's screen; 1280x800 without.")
]
Network = Annotated[bool, typer.Option("--network", help="Allow outgoing IPv4; without it there is only loopback.")]
User = Annotated[str | None, typer.Option("--user", "-u", help="User to run as: name, uid or uid:gid.")]
Workdir = Annotated[str | None, typer.Option("--workdir", "-w", help="Directory to run in.")]
Env = Annotated[list[str] | None, typer.Option("--env", "-e", metavar="NAME=VALUE", help="Environment; may repeat.")]
Labels = Annotated[list[str] | None, typer.Option("--label", "-l", metavar="KEY=VALUE", help="Label; may repeat.")]
Timeout = Annotated[
    float | None, typer.Option("--timeout", metavar="SECONDS", help="End the command after this time (status 124).")
]
IdleTtl = Annotated[
    float,
    typer.Option("--ttl", min=0, metavar="SECONDS", help="Stop the sandbox after this time without any use; 0: never."),
]

Workspace = Annotated[
    str | None, typer.Option("--workspace", metavar="IMAGE", help="Image of the role workspace, laid over the image.")
]
Toolkits = Annotated[
    list[str] | None,
    typer.Option("--toolkit", metavar="IMAGE", help="Image of the role toolkit, laid over all that; may repeat."),
]
NoToolkits = Annotated[bool, typer.Option("--no-toolkits", help="No toolkits, not even those the image asks for.")]


def chosen_toolkits(toolkits: list[str] | None, no_toolkits: bool) -> tuple[str, ...] | None:
    """None: those the image asks for. Raises typer.BadParameter for both options together."""
    if toolkits and no_toolkits:
        raise typer.BadParameter("not together with --toolkit", param_hint="--no-toolkits")
    return () if no_toolkits else tuple(toolkits) if toolkits else None


def pairs(words: Iterable[str] | None, option: str) -> dict[str, str]:
    """`A=1 B=2` as a mapping. Raises typer.BadParameter for a word without `=`."""
    found = {}
    for word in words or ():
        key, equals, value = word.partition("=")
        if not equals or not key:
            raise typer.BadParameter(f"{word!r} is not NAME=VALUE", param_hint=option)
        found[key] = value
    return found


def run_args(
    image: str | None,
    *,
    backend: BackendKind,
    memory: int | None,
    cpus: float | None,
    network: bool,
    labels: Iterable[str] | None,
    ttl: float,
    workspace: str | None = None,
    toolkits: tuple[str, ...] | None = None,
    disk: int | None = None,
    snapshot: str | None = None,
    screen: str | None = None,
) -> DSecRunArgs:
    """What the client asks the platform for. Raises typer.BadParameter for what goes with another kind only."""
    common: dict[str, Any] = {
        "backend": backend,
        "memory_limit_mb": memory,
        "cpu_cores_limit": cpus,
        "disk_limit_mb": disk,
        "network_rules": {"*": True} if network else {},
        "labels": pairs(labels, "--label"),
        "ttl_running_stop": ttl if ttl > 0 else None,
    }
    if backend is BackendKind.FULLVM:
        if workspace is not None or toolkits is not None:
            raise typer.BadParameter("a full VM starts from one disk image alone", param_hint="--workspace, --toolkit")
        return DSecFullVMRunArgs(image=image, snapshot=snapshot, screen=screen, **common)
    if screen is not None:
        raise typer.BadParameter("only a full VM has a screen (--backend fullvm)", param_hint="--screen")
    if backend is BackendKind.MICROVM or snapshot is not None:
        return DSecMicroVMRunArgs(image=image, snapshot=snapshot, workspace=workspace, toolkits=toolkits, **common)
    assert image is not None
    return DSecContainerRunArgs(container_image=image, workspace=workspace, toolkits=toolkits, **common)
