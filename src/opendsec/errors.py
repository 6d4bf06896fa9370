"""Every error of OpenDSec, in one tree that says whose fault it was and whether to try again.

    OpenDSecError                          code, retryable, detail, remedy, request_id, sandbox_id
    ├─ RequestError                        the caller must change something; never retry
    │  ├─ InvalidSpecError                 a field is wrong; `detail["field"]` names it
    │  ├─ NotFoundError                    no such sandbox, command, image or file path in the API
    │  ├─ ConflictError                    the state, or an idempotency key with another body, forbids it
    │  ├─ UnauthorizedError                no key, or a wrong key
    │  ├─ ForbiddenError                   the key is good and has not this right
    │  └─ UnsupportedError                 this backend or host cannot do that; named, never ignored
    ├─ CapacityError                       try again later
    │  ├─ UnschedulableError               no edge took it; `detail["reasons"]` says why, edge by edge
    │  └─ QuotaExceededError               a project's limit
    ├─ SandboxError                        this sandbox
    │  ├─ StartError                       it could not be started
    │  ├─ SandboxExitedError               it has ended; `detail["end_reason"]` is the typed reason
    │  └─ SandboxLostError                 its guest agent or node is gone
    ├─ CommandError                        this command
    │  ├─ CommandTimeoutError              it ran into its own timeout (only with check=True)
    │  ├─ CommandFailedError               non-zero exit (only with check=True)
    │  ├─ CommandLostError                 how it ended cannot be known; never an exit code 0
    │  ├─ NoShellError                     the image has no shell to run a command line with
    │  └─ ExecError                        the program could not be executed (missing, not executable, bad user)
    ├─ FileError                           a path inside the sandbox; `detail["errno"]`, `detail["path"]`
    ├─ ImageError                          an image
    │  ├─ ImageNotFoundError
    │  ├─ ImageInvalidError                names layer and entry
    │  ├─ DigestMismatchError
    │  └─ SnapshotInvalidError             damaged, or made by another VMM, version, accelerator or processor
    ├─ NodeError                           host-side fault, not the task's
    │  ├─ BackendUnavailableError
    │  ├─ HostCapabilityError              names the probe that failed
    │  └─ DiskFullError                    the node's own disk
    └─ TransportError                      the way there, not the thing
       ├─ ConnectError                     nothing was sent
       ├─ ProtocolError                    the peer broke the protocol
       └─ DeadlineError                    the caller's own deadline passed first

A non-zero exit status is a result, not an exception. Errors cross processes as `code` + text + detail and are
rebuilt from `CODES`, never from a class the other side named; an unknown code becomes `OpenDSecError`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

Detail = Mapping[str, object]


class OpenDSecError(Exception):
    """Root of all errors raised by OpenDSec.

    Parameters: `message` is one sentence for a human; `detail` holds machine-readable facts (JSON types only);
    `remedy` says what to do about it; `retryable` overrides the class default.
    """

    code: ClassVar[str] = "internal"
    http_status: ClassVar[int] = 500
    default_retryable: ClassVar[bool] = False

    def __init__(
        self,
        message: str,
        *,
        detail: Detail | None = None,
        remedy: str = "",
        retryable: bool | None = None,
        request_id: str = "",
        sandbox_id: str = "",
    ) -> None:
        super().__init__(message)
        self.message = message
        self.detail: dict[str, object] = dict(detail or {})
        self.remedy = remedy
        self.retryable = self.default_retryable if retryable is None else retryable
        self.request_id = request_id
        self.sandbox_id = sandbox_id

    def __str__(self) -> str:
        return f"{self.message} ({self.remedy})" if self.remedy else self.message


class RequestError(OpenDSecError):
    """The caller must change the request."""

    code = "bad_request"
    http_status = 400


class InvalidSpecError(RequestError):
    """A field of the request is wrong; `detail["field"]` names it."""

    code = "invalid_spec"
    http_status = 422


class NotFoundError(RequestError):
    """The named thing does not exist, or not for this project."""

    code = "not_found"
    http_status = 404


class ConflictError(RequestError):
    """The present state forbids it, or one idempotency key came with two different bodies."""

    code = "conflict"
    http_status = 409


class UnauthorizedError(RequestError):
    """No API key, or a wrong one."""

    code = "unauthorized"
    http_status = 401


class ForbiddenError(RequestError):
    """The API key is good and does not have this right; another key may."""

    code = "forbidden"
    http_status = 403


class UnsupportedError(RequestError):
    """The backend or host does not offer this; the message names what was asked for."""

    code = "unsupported"
    http_status = 501


class CapacityError(OpenDSecError):
    """There is no room now; the same request may succeed later."""

    code = "capacity"
    http_status = 503
    default_retryable = True


class UnschedulableError(CapacityError):
    """No edge admitted the sandbox."""

    code = "unschedulable"


class QuotaExceededError(CapacityError):
    """A project's quota is used up."""

    code = "quota_exceeded"
    http_status = 429


class SandboxError(OpenDSecError):
    """Something about one sandbox."""

    code = "sandbox"
    http_status = 500


class StartError(SandboxError):
    """The sandbox could not be started; nothing of it is left."""

    code = "start_failed"
    default_retryable = True


class SandboxExitedError(SandboxError):
    """The sandbox has ended; `detail["end_reason"]` says why."""

    code = "sandbox_exited"
    http_status = 410


class SandboxLostError(SandboxError):
    """The sandbox's guest agent or node is gone."""

    code = "sandbox_lost"
    http_status = 502


class CommandError(OpenDSecError):
    """Something about one command."""

    code = "command"
    http_status = 400


class CommandTimeoutError(CommandError):
    """The command ran into its timeout (raised only with `check=True`)."""

    code = "command_timeout"


class CommandFailedError(CommandError):
    """The command did not exit with 0 (raised only with `check=True`)."""

    code = "command_failed"


class CommandLostError(CommandError):
    """How the command ended cannot be known."""

    code = "command_lost"
    http_status = 502


class NoShellError(CommandError):
    """The image has neither /bin/bash nor /bin/sh."""

    code = "no_shell"


class ExecError(CommandError):
    """The program could not be executed: missing, not executable, unknown user, bad working directory."""

    code = "exec_failed"


class FileError(OpenDSecError):
    """A file operation inside the sandbox failed; `detail` has `errno` (symbolic) and `path`."""

    code = "file"
    http_status = 400


class ImageError(OpenDSecError):
    """Something about an image."""

    code = "image"
    http_status = 400


class ImageNotFoundError(ImageError):
    """No image of this name on this node's store."""

    code = "image_not_found"
    http_status = 404


class ImageInvalidError(ImageError):
    """The image is malformed; the message names layer and entry."""

    code = "image_invalid"


class DigestMismatchError(ImageError):
    """Bytes do not match their digest."""

    code = "digest_mismatch"


class SnapshotInvalidError(ImageError):
    """The snapshot is damaged, or this node cannot go on from it; the message names what differs."""

    code = "snapshot_invalid"


class NodeError(OpenDSecError):
    """A fault of the host, not of the task."""

    code = "node"
    http_status = 500
    default_retryable = True


class BackendUnavailableError(NodeError):
    """This node cannot run that backend now."""

    code = "backend_unavailable"
    http_status = 503


class HostCapabilityError(NodeError):
    """The host lacks something; `detail["probe"]` names it."""

    code = "host_capability"
    http_status = 503
    default_retryable = False


class DiskFullError(NodeError):
    """The node's own disk is full (a full sandbox disk is a command's end reason instead)."""

    code = "node_disk_full"
    http_status = 507


class TransportError(OpenDSecError):
    """The way to the platform failed; what became of the request is unknown unless a subclass says so."""

    code = "transport"
    http_status = 502
    default_retryable = True


class ConnectError(TransportError):
    """No connection was made: nothing was sent."""

    code = "connect"
    http_status = 503


class ProtocolError(TransportError):
    """The peer broke the protocol."""

    code = "protocol"
    default_retryable = False


class DeadlineError(TransportError):
    """The caller's deadline passed first."""

    code = "deadline"
    http_status = 504


def _walk(cls: type[OpenDSecError]) -> list[type[OpenDSecError]]:
    return [cls, *(found for sub in cls.__subclasses__() for found in _walk(sub))]


CODES: Mapping[str, type[OpenDSecError]] = {cls.code: cls for cls in _walk(OpenDSecError)}
"""Wire code → class; the only way an error is rebuilt on the other side."""
