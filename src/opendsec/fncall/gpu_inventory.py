"""Where the inventory of GPUs comes from: the driver's own tools, or a file that makes one up for tests.

The driver's way: `nvidia-smi -L` names devices and MIG slices, and a CDI file (Container Device Interface, as JSON, by
`nvidia-ctk cdi generate`) says which device nodes and libraries a container needs for each of them. A node without
`nvidia-smi` has no GPU; one with it and without the file is refused with the command that makes it.

A made-up inventory gives containers names in their environment and nothing else: no device node, nothing to compute on.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from opendsec.errors import HostCapabilityError, InvalidSpecError
from opendsec.fncall.gpu import GpuInstance, GpuInventory
from opendsec.linux.process import ProgramError, run

SETTING = "OPENDSEC_GPU_INVENTORY"
CDI_DIRECTORIES = (Path("/etc/cdi"), Path("/var/run/cdi"))
CDI_COMMAND = "nvidia-ctk cdi generate --format=json --device-name-strategy=uuid --output=/etc/cdi/nvidia.json"
_CDI_KIND = "nvidia.com/gpu"
_TIMEOUT_S = 30.0

_DEVICE = re.compile(r"GPU \d+: (?P<name>.+) \(UUID: (?P<uuid>GPU-[0-9A-Fa-f-]+)\)\s*\Z")
_SLICE = re.compile(r"\s+MIG (?P<profile>\S+)\s+Device\s+\d+: \(UUID: (?P<uuid>MIG-[0-9A-Za-z/-]+)\)\s*\Z")
_GIB = re.compile(r"\.(\d+)gb")


class _Simulated(msgspec.Struct, forbid_unknown_fields=True):
    """One instance of a made-up inventory."""

    uuid: str
    profile: str = ""
    memory_mb: int = 0


class _File(msgspec.Struct, forbid_unknown_fields=True):
    """A made-up inventory."""

    instances: list[_Simulated]


def read_simulated(path: Path) -> GpuInventory:
    """An inventory from a JSON file: `{"instances": [{"uuid": …, "profile": …, "memory_mb": …}]}`.

    Raises InvalidSpecError naming the setting.
    """
    try:
        found = msgspec.json.decode(path.read_bytes(), type=_File)
    except (OSError, msgspec.DecodeError) as exc:
        raise InvalidSpecError(f"{SETTING}: {path}: {exc}", detail={"field": SETTING}) from exc
    instances = tuple(
        GpuInstance(uuid=one.uuid, profile=one.profile, memory_mb=one.memory_mb, env={"GPU_SIMULATED": "1"})
        for one in found.instances
    )
    return GpuInventory(instances=instances, simulated=True)


async def probe() -> GpuInventory:
    """What the driver says; an inventory without instances where there is no driver.

    Raises HostCapabilityError with the remedy when there is a GPU that cannot be given to a container.
    """
    program = shutil.which("nvidia-smi")
    if program is None:
        return GpuInventory(instances=())
    try:
        listed = (await run([program, "-L"], timeout_s=_TIMEOUT_S)).stdout.decode("utf-8", "replace")
    except (ProgramError, TimeoutError) as exc:
        raise HostCapabilityError(
            f"nvidia-smi cannot list the GPUs: {exc}", detail={"probe": "gpu"}, remedy="is the driver loaded?"
        ) from exc
    instances = parse_list(listed)
    return GpuInventory(instances=with_nodes(instances, read_cdi(CDI_DIRECTORIES)) if instances else ())


def parse_list(text: str) -> tuple[GpuInstance, ...]:
    """What `nvidia-smi -L` printed: slices, and whole devices that have none."""
    found: list[GpuInstance] = []
    whole: GpuInstance | None = None
    for line in text.splitlines():
        if match := _DEVICE.match(line):
            found += [whole] if whole is not None else []
            whole = GpuInstance(uuid=match["uuid"], name=match["name"])
        elif match := _SLICE.match(line):
            name, whole = whole.name if whole is not None else (found[-1].name if found else ""), None
            gib = _GIB.search(match["profile"])
            memory_mb = int(gib[1]) * 1024 if gib else 0
            found.append(GpuInstance(uuid=match["uuid"], profile=match["profile"], name=name, memory_mb=memory_mb))
    return (*found, *([whole] if whole is not None else []))


def read_cdi(directories: Iterable[Path]) -> list[Mapping[str, Any]]:
    """Every JSON file of CDI there about NVIDIA's GPUs."""
    files = [path for directory in directories if directory.is_dir() for path in sorted(directory.glob("*.json"))]
    documents: list[Mapping[str, Any]] = []
    for path in files:
        try:
            document = json.loads(path.read_bytes())
        except (OSError, ValueError) as exc:
            raise HostCapabilityError(
                f"{path} is not readable: {exc}", detail={"probe": "gpu"}, remedy=CDI_COMMAND
            ) from exc
        if isinstance(document, dict) and document.get("kind") == _CDI_KIND:
            documents.append(document)
    return documents


def with_nodes(instances: Sequence[GpuInstance], documents: Sequence[Mapping[str, Any]]) -> tuple[GpuInstance, ...]:
    """The instances with what CDI says a container needs for each. Raises HostCapabilityError when one is not there."""
    edits = {
        str(device.get("name")): (document.get("containerEdits") or {}, device.get("containerEdits") or {})
        for document in documents
        for device in document.get("devices") or ()
    }
    missing = [one.uuid for one in instances if one.uuid not in edits]
    if missing:
        raise HostCapabilityError(
            f"no CDI file says which device nodes {missing[0]} needs",
            detail={"probe": "gpu", "missing": missing},
            remedy=CDI_COMMAND,
        )
    return tuple(_edited(one, *edits[one.uuid]) for one in instances)


def _edited(instance: GpuInstance, *edits: Mapping[str, Any]) -> GpuInstance:
    nodes = [str(node["path"]) for edit in edits for node in edit.get("deviceNodes") or ()]
    mounts = [
        (str(mount["hostPath"]), str(mount["containerPath"])) for edit in edits for mount in edit.get("mounts") or ()
    ]
    libraries = dict.fromkeys(str(Path(inside).parent) for _, inside in mounts if ".so" in Path(inside).name)
    env = {"LD_LIBRARY_PATH": ":".join(libraries)} if libraries else {}
    return replace(instance, devices=tuple(dict.fromkeys(nodes)), mounts=tuple(dict.fromkeys(mounts)), env=env)
