"""The durable record of one sandbox: an append-only file of JSON lines below
`<state>/edge/<name>/sandboxes/<id>/journal`.

A new edge process rebuilds everything from it: what was asked for, whether it was started, which commands were given
and how they ended. A line is written before the fact it stands for becomes visible: a command's intent before the
guest hears of it, its result before the caller does.

Refuses to guess: a last line without its newline was cut by the edge's death and never counted; what comes from another
line on that does not parse (a disk's fault) is set aside and told. A write that does not fit on the disk is taken back
whole, so the file never has a torn line in its middle.

Up- and downgrades: fields and kinds of lines this edge does not know are passed over, as a later edge's additions.
Whatever an earlier edge must not pass over comes with a higher VERSION, which it refuses.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import get_args

import msgspec

from opendsec.edge.writer import WriterThread
from opendsec.errors import DiskFullError, NodeError
from opendsec.model.command import CommandResult, ExecRequest
from opendsec.model.ids import SandboxId
from opendsec.model.image import ImageConfig, ImagePart, Layer
from opendsec.model.node import SandboxEnd
from opendsec.model.spec import Lifetime, SandboxSpec
from opendsec.wire import codec

log = logging.getLogger(__name__)

JOURNAL = "journal"
VERSION = 1


class Created(msgspec.Struct, frozen=True, tag="created", kw_only=True):
    """First line: admitted, nothing started yet."""

    version: int = VERSION
    sandbox_id: SandboxId
    project: str
    spec: SandboxSpec
    asked: SandboxSpec | None = None
    """What the request said, where that is not `spec` itself: one that starts from a snapshot is more than it says."""
    origin: str = ""
    """What it was started from if not from its image: `snapshot:<name>`, `fork:<token>` (`opendsec.edge.origins`)."""
    first_command: int = 1
    """Lower numbers are of the source's commands, which its guest agent may know."""
    sessions: tuple[str, ...] = ()
    """Names of the source's sessions."""
    image_digest: str
    image_config: ImageConfig
    image_layers: tuple[Layer, ...] = ()
    """What it was started from, lowest first."""
    image_parts: tuple[ImagePart, ...] = ()
    """The images those layers came from, lowest first."""
    slot: int
    created_at: float
    """Unix time."""
    created_mono_s: float
    """The same moment on the machine's monotonic clock, which goes on across restarts of the edge."""


class Started(msgspec.Struct, frozen=True, tag="started", kw_only=True):
    """The backend has started it; its handle."""

    backend: str
    handle_version: int
    handle: Mapping[str, str | int]
    ready_at: float


class Updated(msgspec.Struct, frozen=True, tag="updated", kw_only=True):
    """Lifetime and labels as they are from now on."""

    lifetime: Lifetime
    labels: Mapping[str, str]


class PauseState(msgspec.Struct, frozen=True, tag="pause", kw_only=True):
    """Whether it is paused from now on."""

    paused: bool


class Intent(msgspec.Struct, frozen=True, tag="intent", kw_only=True):
    """A command is about to be given to the guest. Given again after a restart: the guest knows it by its number and
    runs it once.
    """

    number: int
    request: ExecRequest
    digest: str
    started_at: float


class Result(msgspec.Struct, frozen=True, tag="result", kw_only=True):
    """How a command ended. Small outputs are here, larger ones in `out/`; None = look there."""

    number: int
    result: CommandResult
    stdout: bytes | None
    stderr: bytes | None
    stdout_kept: int
    stderr_kept: int
    oom_kills: int = 0
    """Counters of the sandbox as of this line, so that what happened before is not blamed on the next command."""
    pids_denied: int = 0
    never_ran: bool = False
    """It could not even be started, so the same operation id may run it."""


class Refused(msgspec.Struct, frozen=True, tag="refused", kw_only=True):
    """The command could not be started; the error's wire fields. If that is retryable, the same operation id may run
    it.
    """

    number: int
    error: Mapping[str, object]


class Ending(msgspec.Struct, frozen=True, tag="ending", kw_only=True):
    """Decided: it ends. A restart takes the removal up again."""

    reason: SandboxEnd
    detail: str


class Ended(msgspec.Struct, frozen=True, tag="ended", kw_only=True):
    """Nothing of it is left on the backend."""

    ended_at: float


OfCommand = Intent | Result | Refused
Record = Created | Started | Updated | PauseState | OfCommand | Ending | Ended

_KINDS = frozenset(str(kind.__struct_config__.tag) for kind in get_args(Record))
_decoder: msgspec.json.Decoder[Record] = msgspec.json.Decoder(Record)


class JournalError(NodeError):
    """A journal holds something that is not a journal; the message names file and line.

    `before`: the records that could be read.
    """

    def __init__(self, message: str, *, before: Sequence[tuple[int, Record]] = (), remedy: str = "") -> None:
        super().__init__(message, remedy=remedy)
        self.before = list(before)


def encode(record: Record) -> bytes:
    """One line."""
    return codec.encode(record) + b"\n"


def decode(line: bytes) -> Record:
    """The record of one line. Raises msgspec.DecodeError, ValueError."""
    if codec.has_stray_bytes(line):
        found: Record = msgspec.convert(codec.parse(line), Record)
        return found
    return _decoder.decode(line)


def _is_of_a_later_edge(line: bytes) -> bool:
    """Whether it is a whole line of a kind this edge does not know."""
    try:
        fields = codec.parse(line)
    except (msgspec.DecodeError, ValueError):
        return False
    kind = fields.get("type") if isinstance(fields, dict) else None
    return isinstance(kind, str) and kind not in _KINDS


def read(directory: Path) -> list[tuple[int, Record]]:
    """All records of a sandbox with the positions of their lines, cutting off a torn last line on the disk too.

    Raises FileNotFoundError, and JournalError for a line that is damaged: a copy of the file is kept then, and the
    journal ends before that line from now on.
    """
    path = directory / JOURNAL
    found: list[tuple[int, Record]] = []
    position = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                os.truncate(path, position)
                break
            try:
                record = decode(line)
            except (msgspec.DecodeError, ValueError) as exc:
                if not _is_of_a_later_edge(line):
                    raise _damaged(path, number, position, found, str(exc)) from exc
            else:
                _check_version(path, record)
                found.append((position, record))
            position += len(line)
    return found


def _damaged(path: Path, number: int, position: int, before: list[tuple[int, Record]], why: str) -> JournalError:
    if position:
        shutil.copyfile(path, path.with_name(f"{JOURNAL}.damaged"))
        os.truncate(path, position)
    return JournalError(
        f"{path}, line {number}: {why}", before=before, remedy="move the directory away and restart the edge"
    )


def _check_version(path: Path, record: Record) -> None:
    if isinstance(record, Created) and record.version > VERSION:
        raise JournalError(
            f"{path}: version {record.version}, this edge reads up to {VERSION}",
            remedy="start the newer edge again, or end its sandboxes there before going back",
        )


class Journal:
    """The file of one sandbox, written by the node's writer thread and held open while the sandbox lives: a line costs
    one system call.
    """

    def __init__(self, directory: Path, writer: WriterThread) -> None:
        self.directory = directory
        self._path = f"{directory}/{JOURNAL}"
        self._writer = writer
        # Both belong to the writer thread.
        self._fd = -1
        self._size = 0

    async def create(self, record: Created, *, directories: tuple[Path, ...]) -> None:
        """Make the directories (in this order; the first is the sandbox's own) and write the first line, or leave
        nothing.
        """
        line = encode(record)
        try:
            await self._writer.run(lambda: self._create(directories, line))
        except OSError as exc:
            raise _node_error(exc, self._path) from exc

    async def is_begun(self) -> bool:
        """Whether a `create` nobody waited for has written the first line; waits for it."""
        return await self._writer.run(lambda: self._size > 0)

    async def append(self, record: Record) -> int:
        """Write a line; returns where it begins, for `read_at`. Raises DiskFullError or NodeError, and then nothing
        was written.
        """
        line = encode(record)
        try:
            return await self._writer.run(lambda: self._append(line))
        except OSError as exc:
            raise _node_error(exc, self._path) from exc

    def append_soon(self, record: Record) -> None:
        """Queue a line nobody waits for; a failure is logged. Lines keep the order in which they were queued."""
        line = encode(record)
        self._writer.run(lambda: self._append(line)).add_done_callback(self._log_failure)

    def close_soon(self) -> None:
        """Give the descriptor back after the lines queued so far; a later line opens the file again."""
        self._writer.run(self.close)

    def close(self) -> None:
        """At once; for the writer thread, or when there is none any more."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _create(self, directories: tuple[Path, ...], line: bytes) -> None:
        made: list[Path] = []
        try:
            for directory in directories:
                directory.mkdir(0o700)
                made.append(directory)
            self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            self._append(line)
        except OSError:
            self.close()
            if made:
                Path(self._path).unlink(missing_ok=True)
            for directory in reversed(made):
                directory.rmdir()
            raise

    def _append(self, line: bytes) -> int:
        if self._fd < 0:
            self._fd = os.open(self._path, os.O_WRONLY | os.O_CLOEXEC)
            self._size = os.lseek(self._fd, 0, os.SEEK_END)
        begin = self._size
        write_line(self._fd, begin, line)
        self._size += len(line)
        return begin

    def _log_failure(self, done: asyncio.Future[int]) -> None:
        error = done.exception()
        if error is not None:
            log.error("journal_line_lost", extra={"fields": {"path": self._path, "reason": str(error)}})

    def read_at(self, position: int) -> Record:
        """The record whose line begins there. Blocking: for a thread of its own."""
        with Path(self._path).open("rb") as file:
            file.seek(position)
            return decode(file.readline())


def _node_error(exc: OSError, path: str) -> NodeError:
    if exc.errno in (errno.ENOSPC, errno.EDQUOT):
        return DiskFullError(
            f"the node's disk is full: {path}", remedy="free space on the state file system", detail={"path": path}
        )
    return NodeError(f"{path}: {exc.strerror}", detail={"path": path, "errno": errno.errorcode.get(exc.errno or 0, "")})


def write_line(fd: int, begin: int, line: bytes) -> None:
    """Write a line at the end of a file of that size, all or nothing. Blocking. Raises OSError."""
    view = memoryview(line)
    try:
        while view:
            view = view[os.write(fd, view) :]
    except OSError:
        os.ftruncate(fd, begin)
        os.lseek(fd, begin, os.SEEK_SET)
        raise
