"""The public names of the SDK for code without an event loop: the same as `opendsec`, without `await`.

A client may be used by several threads at once; a call blocks its own thread only.
"""

from __future__ import annotations

from opendsec.client._sync.client import DSecClient, Failed, Started
from opendsec.client._sync.commands import Commands
from opendsec.client._sync.files import Files
from opendsec.client._sync.images import Images
from opendsec.client._sync.keyboard import Keyboard
from opendsec.client._sync.keys import Keys
from opendsec.client._sync.mouse import Mouse
from opendsec.client._sync.ports import Ports, PortStream
from opendsec.client._sync.process import Process, ProcessInput, ProcessOutput
from opendsec.client._sync.sandbox import Sandbox
from opendsec.client._sync.screen import Clipboard, Screen, Serial
from opendsec.client._sync.snapshots import Snapshots
from opendsec.client.fncall_args import DSecFnCallArgs
from opendsec.client.packed import PackedImage
from opendsec.client.progress import TransferProgress
from opendsec.client.results import ShellResult
from opendsec.client.run_args import DSecContainerRunArgs, DSecFullVMRunArgs, DSecMicroVMRunArgs, DSecRunArgs
from opendsec.client.tree_unpack import DownloadedTree, TreeLimits
from opendsec.errors import (
    BackendUnavailableError,
    CapacityError,
    CommandError,
    CommandFailedError,
    CommandLostError,
    CommandTimeoutError,
    ConflictError,
    ConnectError,
    DeadlineError,
    DigestMismatchError,
    DiskFullError,
    ExecError,
    FileError,
    ForbiddenError,
    HostCapabilityError,
    ImageError,
    ImageInvalidError,
    ImageNotFoundError,
    InvalidSpecError,
    NodeError,
    NoShellError,
    NotFoundError,
    OpenDSecError,
    ProtocolError,
    QuotaExceededError,
    RequestError,
    SandboxError,
    SandboxExitedError,
    SandboxLostError,
    SnapshotInvalidError,
    StartError,
    TransportError,
    UnauthorizedError,
    UnschedulableError,
    UnsupportedError,
)
from opendsec.model.access import KeyRecord, NewKey, Project, Role
from opendsec.model.command import CommandResult, CommandStatus, EndReason, PtySize
from opendsec.model.file import FileEvent, FileEventKind, FileKind, FileStat
from opendsec.model.fncall import (
    CallStatus,
    Case,
    CaseOutcome,
    FnCallResult,
    GpuMode,
    GpuRequest,
    RunOutcome,
    TaskType,
    Verdict,
)
from opendsec.model.image import ImagePart
from opendsec.model.image_view import Change, Difference, ImageDetails, ImageSummary, TreeEntry
from opendsec.model.node import SandboxEnd, SandboxState, SandboxStatus
from opendsec.model.screen import Button, ScreenSize
from opendsec.model.snapshot import SnapshotSummary
from opendsec.model.spec import BackendKind, Lifetime, Resources, SandboxSpec
from opendsec.wire.contracts import PackEvent, PackResult, SnapshotEvent, TreeStatus

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
