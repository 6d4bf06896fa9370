"""The HTTP contract, spoken alike by the apiserver (to clients) and by an edge (to the apiserver).

Management (JSON)
    POST   /v1/sandboxes                        CreateRequest → 201 SandboxStatus, when the sandbox is ready
    POST   /v1/sandbox-batches                  BatchRequest → 200, NDJSON of BatchItem as they become ready (any order)
    POST   /v1/sandbox-batches/abandon          AbandonRequest → Empty; ends what the batch of this Idempotency-Key
                                                started, but for the indexes to keep, and starts no more of it
    GET    /v1/sandboxes?label=k=v&state=&limit=&cursor=&usage=BOOL          → SandboxPage
    GET    /v1/sandboxes/{id}                   → SandboxStatus (ended ones too, for a while)
    PATCH  /v1/sandboxes/{id}                   UpdateRequest → SandboxStatus
    DELETE /v1/sandboxes/{id}                   → SandboxStatus; idempotent, valid in every state, wins every race
    POST   /v1/sandboxes/{id}/pause | /resume   → SandboxStatus
    POST   /v1/sandboxes/{id}/pack              PackRequest → 200, NDJSON of PackEvent; the last line has `result` or
                                                `error`, without it the answer was cut
    POST   /v1/sandboxes/{id}/snapshot          SnapshotRequest → 200, NDJSON of SnapshotEvent, ended as a pack's answer
    POST   /v1/sandboxes/{id}/fork              ForkRequest → 200, NDJSON of ForkItem; the last line has `done`
    POST   /v1/sandboxes/{id}/ports/{port}      raw body in, port stream (below) out, both at once: one connection
    GET    /v1/snapshots                        → SnapshotList, by name
    DELETE /v1/snapshots?name=&force=BOOL       → SnapshotSummary of what it was
    GET    /v1/images?prefix=&limit=&cursor=    → ImagePage, by name
    DELETE /v1/images?image=&force=BOOL         → ImageSummary of what the name meant
    GET    /v1/images/inspect?image=            → ImageDetails
    GET    /v1/images/tree?image=&path=&depth=  → NDJSON of TreeEntry: what a sandbox that was just started would see
    GET    /v1/images/diff?before=&after=&times=BOOL          → NDJSON of Difference
    POST   /v1/images/tag | /compose            TagRequest | ComposeRequest → ImageSummary
    POST   /v1/fncalls                          FnCallSpec → FnCallResult
    POST   /v1/fncall-batches                   FnCallBatch → 200, NDJSON of FnCallItem as calls end (any order); the
                                                last line has `done`, without it the answer was cut
    POST   /v1/keys | GET /v1/keys              KeyRequest → 201 NewKey | → KeyList      (apiserver only, admins)
    DELETE /v1/keys/{key_id}                    → 204                   (apiserver only, admins)
    POST   /v1/projects | GET /v1/projects      ProjectRequest → 201 Project | → ProjectList (apiserver only, admins)
    GET    /v1/node                             → NodeReport            (edge only)
    POST   /v1/node/backends                    → NodeReport, when backends that did not work were looked at again
                                                (edge only)
    GET    /healthz                             → 200 "ok"
Machines with a screen
    GET    /v1/sandboxes/{id}/screen            → PNG
    GET    /v1/sandboxes/{id}/screen/size       → ScreenSize
    POST   /v1/sandboxes/{id}/screen/view       ViewRequest → View: an address for a browser
    GET    /v1/sandboxes/{id}/screen/vnc        WebSocket, binary: RFB 3.8
    POST   /v1/sandboxes/{id}/input             InputRequest → Empty, when all of it is done
    GET    /v1/sandboxes/{id}/serial?offset=N&wait=S          → bytes from there on; X-OpenDSec-Offset says from where
    POST   /v1/sandboxes/{id}/serial            raw bytes → SerialStatus
Commands
    POST   /v1/sandboxes/{id}/commands          ExecRequest → exec stream (below); with ?detach=true → 201 CommandStatus
    GET    /v1/sandboxes/{id}/commands          → CommandList
    GET    /v1/sandboxes/{id}/commands/{cid}    → CommandStatus
    GET    /v1/sandboxes/{id}/commands/{cid}/output?stdout=N&stderr=N   → exec stream from those byte offsets, following
    POST   /v1/sandboxes/{id}/commands/{cid}/stdin?offset=N&eof=BOOL    raw body → StdinStatus; bytes below `offset`
                                                that are known already are skipped
    POST   /v1/sandboxes/{id}/commands/{cid}/signal    SignalRequest → CommandStatus (process group of the command)
    POST   /v1/sandboxes/{id}/commands/{cid}/resize    PtySize → CommandStatus
    DELETE /v1/sandboxes/{id}/commands/{cid}?grace=S   → CommandStatus; ends the whole tree (TERM, grace, KILL)
Files (path is a query parameter, percent-encoded UTF-8 with surrogateescape for other bytes)
    GET    /v1/sandboxes/{id}/files/content?path=&offset=&length=&user=      → raw bytes; a cut body is noticed by
                                                Content-Length or FILE frames
    PUT    /v1/sandboxes/{id}/files/content?path=&mode=&user=&parents=BOOL   raw body → FileStat; atomic (temporary
                                                name + rename)
    GET    /v1/sandboxes/{id}/files/tree?path=&user=   → tree stream (docs/reference/guest-protocol.md)
    PUT    /v1/sandboxes/{id}/files/tree?path=&user=   tree stream → TreeStatus
    POST   /v1/sandboxes/{id}/files/{stat|list|mkdir|move|remove|chmod}      FileRequest → FileStat | FileList | Empty
    GET    /v1/sandboxes/{id}/files/watch?path=&recursive=BOOL               → NDJSON of FileEvent

Exec stream: a body of frames (wire.frames, id 0). Types: EXEC_STARTED (JSON CommandStatus), EXEC_STDOUT / EXEC_STDERR
(u64 LE offset, then bytes), EXEC_RESULT (JSON CommandResult, last frame), EXEC_ERROR (JSON error, last frame),
EXEC_KEEPALIVE (empty, every 10 s of silence). A stream without EXEC_RESULT or EXEC_ERROR was cut: the caller asks again
with its offsets.

Port stream: a body of frames (id 0): PORT_DATA (bytes), PORT_EOF (the sandbox has ended its direction), PORT_ERROR
(JSON error, last), PORT_KEEPALIVE (empty, every 10 s of silence). It ends when the request's body has ended, too.

Headers: `Authorization: Bearer <key>` (apiserver) or the edge's token; `Idempotency-Key` on creates, packs, snapshots
and forks (same key and body: same answer; same key, other body: 409); `X-OpenDSec-Project` and `X-OpenDSec-Rights` from
the apiserver to the edge; `X-Request-Id` both ways, echoed; `X-OpenDSec-Timeout` in seconds on creates and calls.
Errors: codec.encode_error with the status of the class.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from opendsec.model.access import KeyRecord, Project, Role
from opendsec.model.command import CommandStatus
from opendsec.model.file import FileStat
from opendsec.model.fncall import FnCallResult, FnCallSpec
from opendsec.model.ids import SandboxId
from opendsec.model.image import ImageConfig, LayerRole
from opendsec.model.image_view import ImageSummary
from opendsec.model.node import SandboxStatus
from opendsec.model.snapshot import SnapshotSummary
from opendsec.model.spec import Lifetime, SandboxSpec

EXEC_STARTED = 1
EXEC_STDOUT = 2
EXEC_STDERR = 3
EXEC_RESULT = 4
EXEC_ERROR = 5
EXEC_KEEPALIVE = 6

PORT_DATA = 1
PORT_EOF = 2
PORT_ERROR = 3
PORT_KEEPALIVE = 4

KEEPALIVE_S = 10.0
STREAM_MEDIA_TYPE = "application/vnd.opendsec.frames"
PORT_MEDIA_TYPE = "application/vnd.opendsec.port"
TREE_MEDIA_TYPE = "application/vnd.opendsec.tree"
NDJSON_MEDIA_TYPE = "application/x-ndjson"

HEADER_IDEMPOTENCY = "Idempotency-Key"
OWN_KEY_PREFIX = "auto-"
"""Keys that begin so were made up by a client for one call of its own: remembered for an hour, not for a day."""
HEADER_PROJECT = "X-OpenDSec-Project"
HEADER_RIGHTS = "X-OpenDSec-Rights"
"""What the caller's key may do beyond running sandboxes, with commas between: `build`. An edge believes the apiserver;
without this header a caller with a project has no such right."""
RIGHT_BUILD = "build"
HEADER_REQUEST_ID = "X-Request-Id"
HEADER_TIMEOUT = "X-OpenDSec-Timeout"
VIEW_ROOT = "/view/"
"""Below it lie pages for browsers, which bring a token in the address and no key."""
HEADER_OFFSET = "X-OpenDSec-Offset"
"""Of a serial console's answer: the offset of its first byte."""
MAX_JSON_BODY = 8 * 1024 * 1024
MAX_FORKS = 1000
"""Of one fork: they all start on one node."""
MAX_CALLS_BODY = 64 * 1024 * 1024
"""Of a batch of calls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateRequest:
    """Start one sandbox.

    `sandbox_id` is set by the apiserver only (repeats are then harmless); clients leave it out.
    """

    spec: SandboxSpec
    sandbox_id: SandboxId | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRequest:
    """Start `count` sandboxes of one spec. `sandbox_ids` is set by the apiserver only."""

    spec: SandboxSpec
    count: int
    sandbox_ids: tuple[SandboxId, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchItem:
    """One line of a batch answer: exactly one of status and error. The last line has `done` and neither."""

    index: int = -1
    status: SandboxStatus | None = None
    error: Mapping[str, object] | None = None
    """codec.error_fields of the failure."""
    done: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AbandonRequest:
    """The rest of a batch is not wanted. `keep`: the indexes that are."""

    keep: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FnCallBatch:
    """Carry out every call, in no order."""

    calls: tuple[FnCallSpec, ...]
    """At most model.fncall.MAX_CALLS. One that is wrong fails alone."""
    indexes: tuple[int, ...] = ()
    """Set by the apiserver only: what the answer calls each of them; (): 0, 1, 2, …"""


FNCALL_TELL_EVERY_S = 10.0
"""A line comes so often while no call of a batch ends."""
FNCALL_SILENCE_S = 60.0
"""A batch's answer that says nothing for so long comes from nobody any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FnCallItem:
    """One line of a batch's answer: exactly one of result and error. The last line has `done` and neither, and so has
    a line without `done` that comes while nothing ends (index -1): it says that somebody is there.

    `index` and `result` come first in the line, in this order: the apiserver passes lines on without decoding them.
    """

    index: int = -1
    result: FnCallResult | None = None
    error: Mapping[str, object] | None = None
    """codec.error_fields of the failure."""
    done: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxPage:
    """One page of a listing; `cursor` is "" on the last."""

    items: tuple[SandboxStatus, ...]
    cursor: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRequest:
    """Make a key. `project`: None is the caller's own."""

    project: str | None = None
    role: Role = Role.MEMBER
    title: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectRequest:
    """Make a project."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyList:
    """All keys, oldest first."""

    items: tuple[KeyRecord, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectList:
    """All projects, by name."""

    items: tuple[Project, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateRequest:
    """Change what may change; None leaves a field alone."""

    lifetime: Lifetime | None = None
    labels: Mapping[str, str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PackRequest:
    """Make an image of what a sandbox has written on top of what it was started from."""

    name: str
    """Of the new image."""
    role: LayerRole = LayerRole.WORKSPACE
    """Of the new layer."""
    alone: bool = False
    """The image holds the new layer and nothing below it: a workspace or toolkit to lay over other images."""
    scrub: tuple[str, ...] = ()
    """Patterns of paths to leave out, beyond the defaults (docs/howto/pack.md)."""
    keep: tuple[str, ...] = ()
    """Patterns of paths that stay, whatever the other patterns say."""
    defaults: bool = True
    """Leave out what the default patterns match."""
    replace: bool = False
    """Let the name mean the new image when it means another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackResult:
    """What a pack has made."""

    image: str
    """Reference that always means this very image: `name@sha256:…`. When nothing had changed, that of the source."""
    name: str
    digest: str
    changed: bool
    """False: nothing was left to pack, and no layer was made."""
    layer: str = ""
    """Digest of the new layer."""
    layer_bytes: int = 0
    """Of its files in the store."""
    files: int = 0
    """Entries packed: files, directories, links, whiteouts and all others."""
    bytes: int = 0
    """Content of the regular files among them."""
    left_out: int = 0
    """Entries the patterns kept out of the layer."""
    left_out_paths: tuple[str, ...] = ()
    """The first 100 of them; a directory stands for all below it."""
    fell_back: int = 0
    """Paths among those left out that show an older version of the source image again."""
    fell_back_paths: tuple[str, ...] = ()
    """The first 100 of them."""
    crash_consistent: bool = False
    """The disk of a full VM, as after a power cut: its file systems were not made whole on it first."""
    frozen_ms: float = 0.0
    """How long the sandbox's processes stood still; 0 when it was paused."""
    duration_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PackEvent:
    """One line of a pack's answer: where it stands (at least every 10 s), or, last, how it ended."""

    phase: str = ""
    done: int = 0
    total: int | None = None
    result: PackResult | None = None
    error: Mapping[str, object] | None = None
    """codec.error_fields of the failure; nothing of it is left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotRequest:
    """Save a sandbox whole, under a name of the project."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotResult:
    """What was saved."""

    snapshot: SnapshotSummary
    saving_ms: float = 0.0
    """So long the backend took; the sandbox stood still for a part of it."""
    duration_s: float = 0.0
    """Of all of it, waiting for its turn and publishing included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotEvent:
    """One line of a snapshot's answer: where it stands (at least every 10 s), or, last, how it ended."""

    phase: str = ""
    done: int = 0
    total: int | None = None
    result: SnapshotResult | None = None
    error: Mapping[str, object] | None = None
    """codec.error_fields of the failure; nothing of it is left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotList:
    """All snapshots of a project, by name."""

    items: tuple[SnapshotSummary, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkRequest:
    """Start `count` sandboxes that go on from the present state of one, on its node."""

    count: int
    labels: Mapping[str, str] | None = None
    """None: the source's."""
    lifetime: Lifetime | None = None
    """None: the source's."""
    abandon: bool = False
    """End what the fork of this Idempotency-Key has started, and start nothing under it any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkItem:
    """One line of a fork's answer: where it stands (`phase`), or one sandbox by its status or its error; the last line
    has `done` and nothing else."""

    phase: str = ""
    index: int = -1
    status: SandboxStatus | None = None
    error: Mapping[str, object] | None = None
    done: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandList:
    """All commands of a sandbox the edge remembers, oldest first."""

    items: tuple[CommandStatus, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ImagePage:
    """One page of images, by name; `cursor` is "" on the last."""

    items: tuple[ImageSummary, ...]
    cursor: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TagRequest:
    """Let `name` mean the image the reference `image` means now."""

    name: str
    image: str
    """`scratch` is an image without a single file, which is always there."""
    config: ImageConfig | None = None
    """The same files with these defaults of commands, and with what it refers to made its own; None: as it is."""
    replace: bool = False
    """Also when it means another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComposeRequest:
    """Make an image that refers to others; nothing is copied."""

    name: str
    base: str
    """Reference to the image below."""
    workspace: str | None = None
    """Reference to the image whose layers become its own."""
    toolkits: tuple[str, ...] | None = None
    """References, lowest first; None: those the base asks for."""
    pin: bool = False
    """Write the references down with their digests, so that it never changes."""
    replace: bool = False
    """Let the name mean it also when it means another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StdinStatus:
    """How many bytes of stdin have been accepted so far."""

    accepted: int
    closed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SignalRequest:
    """Signal number 1-64."""

    signal: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRequest:
    """Arguments of the JSON file verbs; each verb refuses the fields it has no use for."""

    path: str
    user: str | None = None
    target: str | None = None
    """move: the new path."""
    mode: int | None = None
    """mkdir, chmod."""
    parents: bool = False
    """mkdir: make missing parents, an existing directory is fine."""
    recursive: bool = False
    """remove: a directory with all below it."""
    overwrite: bool = True
    """move: replace an existing target."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileList:
    """A directory's entries, sorted by name bytes."""

    items: tuple[FileStat, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeStatus:
    """What an uploaded tree left."""

    files: int
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Empty:
    """Nothing to say but yes."""

    ok: bool = True
