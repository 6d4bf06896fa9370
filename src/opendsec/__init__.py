"""OpenDSec: isolated sandboxes for LLM agents. These are the public names of the async SDK.

`opendsec.sync` has the same names without `await`. Names are loaded when they are first used, so that importing a
part of
OpenDSec does not load the SDK.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from opendsec.client._async.client import DSecClient as DSecClient
    from opendsec.client._async.client import Failed as Failed
    from opendsec.client._async.client import Started as Started
    from opendsec.client._async.commands import Commands as Commands
    from opendsec.client._async.files import Files as Files
    from opendsec.client._async.images import Images as Images
    from opendsec.client._async.keyboard import Keyboard as Keyboard
    from opendsec.client._async.keys import Keys as Keys
    from opendsec.client._async.mouse import Mouse as Mouse
    from opendsec.client._async.ports import Ports as Ports
    from opendsec.client._async.ports import PortStream as PortStream
    from opendsec.client._async.process import Process as Process
    from opendsec.client._async.process import ProcessInput as ProcessInput
    from opendsec.client._async.process import ProcessOutput as ProcessOutput
    from opendsec.client._async.sandbox import Sandbox as Sandbox
    from opendsec.client._async.screen import Clipboard as Clipboard
    from opendsec.client._async.screen import Screen as Screen
    from opendsec.client._async.screen import Serial as Serial
    from opendsec.client._async.snapshots import Snapshots as Snapshots
    from opendsec.client.fncall_args import DSecFnCallArgs as DSecFnCallArgs
    from opendsec.client.packed import PackedImage as PackedImage
    from opendsec.client.progress import TransferProgress as TransferProgress
    from opendsec.client.results import ShellResult as ShellResult
    from opendsec.client.run_args import DSecContainerRunArgs as DSecContainerRunArgs
    from opendsec.client.run_args import DSecFullVMRunArgs as DSecFullVMRunArgs
    from opendsec.client.run_args import DSecMicroVMRunArgs as DSecMicroVMRunArgs
    from opendsec.client.run_args import DSecRunArgs as DSecRunArgs
    from opendsec.client.tree_unpack import DownloadedTree as DownloadedTree
    from opendsec.client.tree_unpack import TreeLimits as TreeLimits
    from opendsec.errors import BackendUnavailableError as BackendUnavailableError
    from opendsec.errors import CapacityError as CapacityError
    from opendsec.errors import CommandError as CommandError
    from opendsec.errors import CommandFailedError as CommandFailedError
    from opendsec.errors import CommandLostError as CommandLostError
    from opendsec.errors import CommandTimeoutError as CommandTimeoutError
    from opendsec.errors import ConflictError as ConflictError
    from opendsec.errors import ConnectError as ConnectError
    from opendsec.errors import DeadlineError as DeadlineError
    from opendsec.errors import DigestMismatchError as DigestMismatchError
    from opendsec.errors import DiskFullError as DiskFullError
    from opendsec.errors import ExecError as ExecError
    from opendsec.errors import FileError as FileError
    from opendsec.errors import ForbiddenError as ForbiddenError
    from opendsec.errors import HostCapabilityError as HostCapabilityError
    from opendsec.errors import ImageError as ImageError
    from opendsec.errors import ImageInvalidError as ImageInvalidError
    from opendsec.errors import ImageNotFoundError as ImageNotFoundError
    from opendsec.errors import InvalidSpecError as InvalidSpecError
    from opendsec.errors import NodeError as NodeError
    from opendsec.errors import NoShellError as NoShellError
    from opendsec.errors import NotFoundError as NotFoundError
    from opendsec.errors import OpenDSecError as OpenDSecError
    from opendsec.errors import ProtocolError as ProtocolError
    from opendsec.errors import QuotaExceededError as QuotaExceededError
    from opendsec.errors import RequestError as RequestError
    from opendsec.errors import SandboxError as SandboxError
    from opendsec.errors import SandboxExitedError as SandboxExitedError
    from opendsec.errors import SandboxLostError as SandboxLostError
    from opendsec.errors import SnapshotInvalidError as SnapshotInvalidError
    from opendsec.errors import StartError as StartError
    from opendsec.errors import TransportError as TransportError
    from opendsec.errors import UnauthorizedError as UnauthorizedError
    from opendsec.errors import UnschedulableError as UnschedulableError
    from opendsec.errors import UnsupportedError as UnsupportedError
    from opendsec.model.access import KeyRecord as KeyRecord
    from opendsec.model.access import NewKey as NewKey
    from opendsec.model.access import Project as Project
    from opendsec.model.access import Role as Role
    from opendsec.model.command import CommandResult as CommandResult
    from opendsec.model.command import CommandStatus as CommandStatus
    from opendsec.model.command import EndReason as EndReason
    from opendsec.model.command import PtySize as PtySize
    from opendsec.model.file import FileEvent as FileEvent
    from opendsec.model.file import FileEventKind as FileEventKind
    from opendsec.model.file import FileKind as FileKind
    from opendsec.model.file import FileStat as FileStat
    from opendsec.model.fncall import CallStatus as CallStatus
    from opendsec.model.fncall import Case as Case
    from opendsec.model.fncall import CaseOutcome as CaseOutcome
    from opendsec.model.fncall import FnCallResult as FnCallResult
    from opendsec.model.fncall import GpuMode as GpuMode
    from opendsec.model.fncall import GpuRequest as GpuRequest
    from opendsec.model.fncall import RunOutcome as RunOutcome
    from opendsec.model.fncall import TaskType as TaskType
    from opendsec.model.fncall import Verdict as Verdict
    from opendsec.model.image import ImagePart as ImagePart
    from opendsec.model.image_view import Change as Change
    from opendsec.model.image_view import Difference as Difference
    from opendsec.model.image_view import ImageDetails as ImageDetails
    from opendsec.model.image_view import ImageSummary as ImageSummary
    from opendsec.model.image_view import TreeEntry as TreeEntry
    from opendsec.model.node import SandboxEnd as SandboxEnd
    from opendsec.model.node import SandboxState as SandboxState
    from opendsec.model.node import SandboxStatus as SandboxStatus
    from opendsec.model.screen import Button as Button
    from opendsec.model.screen import ScreenSize as ScreenSize
    from opendsec.model.snapshot import SnapshotSummary as SnapshotSummary
    from opendsec.model.spec import BackendKind as BackendKind
    from opendsec.model.spec import Lifetime as Lifetime
    from opendsec.model.spec import Resources as Resources
    from opendsec.model.spec import SandboxSpec as SandboxSpec
    from opendsec.wire.contracts import PackEvent as PackEvent
    from opendsec.wire.contracts import PackResult as PackResult
    from opendsec.wire.contracts import SnapshotEvent as SnapshotEvent
    from opendsec.wire.contracts import TreeStatus as TreeStatus

__all__ = [
    "BackendKind",
    "BackendUnavailableError",
    "Button",
    "CallStatus",
    "CapacityError",
    "Case",
    "CaseOutcome",
    "Change",
    "Clipboard",
    "CommandError",
    "CommandFailedError",
    "CommandLostError",
    "CommandResult",
    "CommandStatus",
    "CommandTimeoutError",
    "Commands",
    "ConflictError",
    "ConnectError",
    "DSecClient",
    "DSecContainerRunArgs",
    "DSecFnCallArgs",
    "DSecFullVMRunArgs",
    "DSecMicroVMRunArgs",
    "DSecRunArgs",
    "DeadlineError",
    "Difference",
    "DigestMismatchError",
    "DiskFullError",
    "DownloadedTree",
    "EndReason",
    "ExecError",
    "Failed",
    "FileError",
    "FileEvent",
    "FileEventKind",
    "FileKind",
    "FileStat",
    "Files",
    "FnCallResult",
    "ForbiddenError",
    "GpuMode",
    "GpuRequest",
    "HostCapabilityError",
    "ImageDetails",
    "ImageError",
    "ImageInvalidError",
    "ImageNotFoundError",
    "ImagePart",
    "ImageSummary",
    "Images",
    "InvalidSpecError",
    "KeyRecord",
    "Keyboard",
    "Keys",
    "Lifetime",
    "Mouse",
    "NewKey",
    "NoShellError",
    "NodeError",
    "NotFoundError",
    "OpenDSecError",
    "PackEvent",
    "PackResult",
    "PackedImage",
    "PortStream",
    "Ports",
    "Process",
    "ProcessInput",
    "ProcessOutput",
    "Project",
    "ProtocolError",
    "PtySize",
    "QuotaExceededError",
    "RequestError",
    "Resources",
    "Role",
    "RunOutcome",
    "Sandbox",
    "SandboxEnd",
    "SandboxError",
    "SandboxExitedError",
    "SandboxLostError",
    "SandboxSpec",
    "SandboxState",
    "SandboxStatus",
    "Screen",
    "ScreenSize",
    "Serial",
    "ShellResult",
    "SnapshotEvent",
    "SnapshotInvalidError",
    "SnapshotSummary",
    "Snapshots",
    "StartError",
    "Started",
    "TaskType",
    "TransferProgress",
    "TransportError",
    "TreeEntry",
    "TreeLimits",
    "TreeStatus",
    "UnauthorizedError",
    "UnschedulableError",
    "UnsupportedError",
    "Verdict",
]

_PLACES = {
    "opendsec.client._async.client": (
        "DSecClient",
        "Failed",
        "Started",
    ),
    "opendsec.client._async.commands": ("Commands",),
    "opendsec.client._async.files": ("Files",),
    "opendsec.client._async.images": ("Images",),
    "opendsec.client._async.process": (
        "Process",
        "ProcessInput",
        "ProcessOutput",
    ),
    "opendsec.client._async.keyboard": ("Keyboard",),
    "opendsec.client._async.keys": ("Keys",),
    "opendsec.client._async.mouse": ("Mouse",),
    "opendsec.client._async.screen": ("Clipboard", "Screen", "Serial"),
    "opendsec.client._async.ports": ("PortStream", "Ports"),
    "opendsec.client._async.sandbox": ("Sandbox",),
    "opendsec.client._async.snapshots": ("Snapshots",),
    "opendsec.client.fncall_args": ("DSecFnCallArgs",),
    "opendsec.client.packed": ("PackedImage",),
    "opendsec.client.progress": ("TransferProgress",),
    "opendsec.client.results": ("ShellResult",),
    "opendsec.client.run_args": (
        "DSecContainerRunArgs",
        "DSecFullVMRunArgs",
        "DSecMicroVMRunArgs",
        "DSecRunArgs",
    ),
    "opendsec.client.tree_unpack": (
        "DownloadedTree",
        "TreeLimits",
    ),
    "opendsec.errors": (
        "BackendUnavailableError",
        "CapacityError",
        "CommandError",
        "CommandFailedError",
        "CommandLostError",
        "CommandTimeoutError",
        "ConflictError",
        "ConnectError",
        "DeadlineError",
        "DigestMismatchError",
        "DiskFullError",
        "ExecError",
        "FileError",
        "ForbiddenError",
        "HostCapabilityError",
        "ImageError",
        "ImageInvalidError",
        "ImageNotFoundError",
        "InvalidSpecError",
        "NoShellError",
        "NodeError",
        "NotFoundError",
        "OpenDSecError",
        "ProtocolError",
        "QuotaExceededError",
        "RequestError",
        "SandboxError",
        "SandboxExitedError",
        "SandboxLostError",
        "SnapshotInvalidError",
        "StartError",
        "TransportError",
        "UnauthorizedError",
        "UnschedulableError",
        "UnsupportedError",
    ),
    "opendsec.model.access": (
        "KeyRecord",
        "NewKey",
        "Project",
        "Role",
    ),
    "opendsec.model.command": (
        "CommandResult",
        "CommandStatus",
        "EndReason",
        "PtySize",
    ),
    "opendsec.model.file": (
        "FileEvent",
        "FileEventKind",
        "FileKind",
        "FileStat",
    ),
    "opendsec.model.fncall": (
        "CallStatus",
        "Case",
        "CaseOutcome",
        "FnCallResult",
        "GpuMode",
        "GpuRequest",
        "RunOutcome",
        "TaskType",
        "Verdict",
    ),
    "opendsec.model.image": ("ImagePart",),
    "opendsec.model.image_view": (
        "Change",
        "Difference",
        "ImageDetails",
        "ImageSummary",
        "TreeEntry",
    ),
    "opendsec.model.node": (
        "SandboxEnd",
        "SandboxState",
        "SandboxStatus",
    ),
    "opendsec.model.screen": ("Button", "ScreenSize"),
    "opendsec.model.snapshot": ("SnapshotSummary",),
    "opendsec.model.spec": (
        "BackendKind",
        "Lifetime",
        "Resources",
        "SandboxSpec",
    ),
    "opendsec.wire.contracts": (
        "PackEvent",
        "PackResult",
        "SnapshotEvent",
        "TreeStatus",
    ),
}
_PLACE_OF = {name: place for place, names in _PLACES.items() for name in names}


def __getattr__(name: str) -> object:
    place = _PLACE_OF.get(name)
    if place is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(place), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
