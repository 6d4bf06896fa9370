"""Files of a sandbox over HTTP. Bytes pass through with back-pressure: neither side is read faster than the other
takes.

A download of known size has a Content-Length and stops there even if the file grows meanwhile; one that comes out
shorter cuts the connection.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import AsyncGenerator, AsyncIterator, Iterator

from opendsec import errors
from opendsec.backends.base import Capability
from opendsec.edge.node import Node
from opendsec.edge.requests import flag, integer, nothing_else, project_of
from opendsec.edge.sandbox import Sandbox
from opendsec.guest.base import Guest, GuestError, GuestStat
from opendsec.model.file import FileEvent, FileEventKind, FileKind, FileStat
from opendsec.model.spec import check_path
from opendsec.server.asgi import Receive, Scope, Send, query, read_body, send_json
from opendsec.server.streams import ndjson, send_stream, while_uploading
from opendsec.wire import codec
from opendsec.wire.contracts import (
    MAX_JSON_BODY,
    NDJSON_MEDIA_TYPE,
    TREE_MEDIA_TYPE,
    Empty,
    FileList,
    FileRequest,
    TreeStatus,
)

VERBS = {
    "stat": (),
    "list": (),
    "mkdir": ("mode", "parents"),
    "move": ("target", "overwrite"),
    "remove": ("recursive",),
    "chmod": ("mode",),
}
"""Which optional fields of a FileRequest each verb has a use for."""
_DEFAULTS = {"target": None, "mode": None, "parents": False, "recursive": False, "overwrite": True}


class FileRoutes:
    """`/v1/sandboxes/{id}/files/…`"""

    def __init__(self, node: Node) -> None:
        self._node = node

    async def download(self, sandbox_id: str, scope: Scope, receive: Receive, send: Send) -> None:
        """GET files/content"""
        sandbox, asked = self._ask(sandbox_id, scope)
        path, user = _path(asked), asked.pop("user", "")
        offset, length = integer(asked, "offset") or 0, integer(asked, "length")
        nothing_else(asked)
        async with sandbox.working(Capability.FILES) as guest:
            with file_errors(path):
                stat, chunks = await guest.open_read(path, offset=offset, length=length, user=user)
            expected = max(0, stat.size - offset) if length is None else min(length, max(0, stat.size - offset))
            # Files of /proc and /sys say 0 and are not empty: their end is the end of a chunked body.
            headers = [(b"content-length", b"%d" % expected)] if stat.size else []
            body = _exactly(path, chunks, expected if stat.size else None)
            await send_stream(receive, send, body, media_type="application/octet-stream", headers=headers)

    async def upload(self, sandbox_id: str, scope: Scope, receive: Receive, send: Send) -> None:
        """PUT files/content"""
        sandbox, asked = self._ask(sandbox_id, scope)
        path, user = _path(asked), asked.pop("user", "")
        mode, parents = integer(asked, "mode", most=0o7777, base=8), flag(asked, "parents")
        nothing_else(asked)
        async with sandbox.working(Capability.FILES) as guest:
            with file_errors(path):
                stat = await while_uploading(
                    receive, lambda chunks: guest.write_file(path, chunks, mode=mode, parents=parents, user=user)
                )
        await send_json(send, file_stat(stat, path))

    async def pack(self, sandbox_id: str, scope: Scope, receive: Receive, send: Send) -> None:
        """GET files/tree"""
        sandbox, asked = self._ask(sandbox_id, scope)
        path, user = _path(asked), asked.pop("user", "")
        nothing_else(asked)
        async with sandbox.working(Capability.FILES) as guest:
            await send_stream(receive, send, _told(path, guest.pack(path, user=user)), media_type=TREE_MEDIA_TYPE)

    async def unpack(self, sandbox_id: str, scope: Scope, receive: Receive, send: Send) -> None:
        """PUT files/tree"""
        sandbox, asked = self._ask(sandbox_id, scope)
        path, user = _path(asked), asked.pop("user", "")
        nothing_else(asked)
        async with sandbox.working(Capability.FILES) as guest:
            with file_errors(path):
                files, size = await while_uploading(receive, lambda chunks: guest.unpack(path, chunks, user=user))
        await send_json(send, TreeStatus(files=files, bytes=size))

    async def watch(self, sandbox_id: str, scope: Scope, receive: Receive, send: Send) -> None:
        """GET files/watch"""
        sandbox, asked = self._ask(sandbox_id, scope)
        path, user, recursive = _path(asked), asked.pop("user", ""), flag(asked, "recursive")
        nothing_else(asked)
        async with sandbox.working(Capability.FILES) as guest:
            events = _events(path, guest.watch(path, recursive=recursive, user=user))
            await send_stream(receive, send, ndjson(events), media_type=NDJSON_MEDIA_TYPE)

    async def verb(self, sandbox_id: str, name: str, scope: Scope, receive: Receive, send: Send) -> None:
        """POST files/{stat|list|mkdir|move|remove|chmod}"""
        sandbox, asked = self._ask(sandbox_id, scope)
        nothing_else(asked)
        request = codec.decode(await read_body(scope, receive, limit=MAX_JSON_BODY), FileRequest)
        check_request(name, request)
        async with sandbox.working(Capability.FILES) as guest:
            with file_errors(request.path):
                answer = await _perform(name, request, guest)
        await send_json(send, answer)

    def _ask(self, sandbox_id: str, scope: Scope) -> tuple[Sandbox, dict[str, str]]:
        sandbox = self._node.get(sandbox_id, project=project_of(scope))
        sandbox.require(Capability.FILES)
        return sandbox, query(scope)


def check_request(verb: str, request: FileRequest) -> None:
    """Raise InvalidSpecError for a field the verb has no use for, or lacks."""
    check_path(request.path, "path")
    for name, default in _DEFAULTS.items():
        if name not in VERBS[verb] and getattr(request, name) != default:
            raise errors.InvalidSpecError(f"{name}: {verb} has no use for it", detail={"field": name})
    if verb == "move":
        if request.target is None:
            raise errors.InvalidSpecError("target: move needs it", detail={"field": "target"})
        check_path(request.target, "target")
    if verb == "chmod" and request.mode is None:
        raise errors.InvalidSpecError("mode: chmod needs it", detail={"field": "mode"})
    if request.mode is not None and not 0 <= request.mode <= 0o7777:
        raise errors.InvalidSpecError("mode: is not between 0 and 0o7777", detail={"field": "mode"})


async def _perform(verb: str, request: FileRequest, guest: Guest) -> FileStat | FileList | Empty:
    path, user = request.path, request.user or ""
    if verb == "stat":
        return file_stat(await guest.stat(path, user=user), path)
    if verb == "list":
        below = path.rstrip("/")
        found = [file_stat(one, f"{below}/{one.path}") for one in await guest.list_dir(path, user=user)]
        return FileList(items=tuple(sorted(found, key=lambda one: one.path.encode("utf-8", "surrogateescape"))))
    if verb == "mkdir":
        mode = 0o755 if request.mode is None else request.mode
        await guest.mkdir(path, mode=mode, parents=request.parents, user=user)
        return file_stat(await guest.stat(path, user=user), path)
    if verb == "move":
        assert request.target is not None
        await guest.move(path, request.target, overwrite=request.overwrite, user=user)
        return file_stat(await guest.stat(request.target, user=user), request.target)
    if verb == "chmod":
        assert request.mode is not None
        await guest.chmod(path, request.mode, user=user)
        return file_stat(await guest.stat(path, user=user), path)
    await guest.remove(path, recursive=request.recursive, user=user)
    return Empty()


def file_stat(stat: GuestStat, path: str) -> FileStat:
    """The guest's fields as the API's."""
    return FileStat(
        path=path,
        kind=FileKind(stat.kind),
        mode=stat.mode & 0o7777,
        size_bytes=stat.size,
        mtime_s=stat.mtime_ns / 1e9,
        uid=stat.uid,
        gid=stat.gid,
        link_target=stat.link,
    )


@contextlib.contextmanager
def file_errors(path: str) -> Iterator[None]:
    """The guest's refusals as errors of ours."""
    try:
        yield
    except GuestError as exc:
        raise file_error(exc, path) from exc


def file_error(exc: GuestError, path: str) -> errors.OpenDSecError:
    """FileError for what the kernel said about a path; a user or a limit is another matter."""
    if exc.code == "no_user":
        return errors.InvalidSpecError(f"user: {exc}", detail={"field": "user"})
    if exc.code == "limit":
        return errors.CapacityError(f"too many file operations at once in this sandbox: {exc}")
    if exc.code == "protocol" and not exc.errno:
        return errors.ProtocolError(f"{path}: {exc}", remedy="the guest agent is broken; start a new sandbox")
    name = errno.errorcode.get(exc.errno, "") if exc.errno else exc.code
    return errors.FileError(str(exc) or f"{path}: {exc.code}", detail={"errno": name, "path": path})


def _path(asked: dict[str, str]) -> str:
    path = asked.pop("path", None)
    if path is None:
        raise errors.InvalidSpecError("path: is missing", detail={"field": "path"})
    check_path(path, "path")
    return path


async def _exactly(path: str, chunks: AsyncIterator[bytes], expected: int | None) -> AsyncGenerator[bytes]:
    left = expected
    async for chunk in _told(path, chunks):
        if left is None:
            yield chunk
            continue
        yield chunk[:left] if len(chunk) > left else chunk
        left -= min(left, len(chunk))
        if not left:
            return
    if left:
        raise errors.FileError(
            f"{path}: became {left} bytes shorter while it was read", detail={"errno": "", "path": path}
        )


async def _told(path: str, chunks: AsyncIterator[bytes]) -> AsyncGenerator[bytes]:
    with file_errors(path):
        try:
            async for chunk in chunks:
                yield chunk
        finally:
            close = getattr(chunks, "aclose", None)
            if close is not None:
                await close()


async def _events(path: str, events: AsyncIterator[tuple[str, str]]) -> AsyncGenerator[FileEvent]:
    with file_errors(path):
        try:
            async for name, where in events:
                yield FileEvent(kind=FileEventKind(name), path=where)
        finally:
            close = getattr(events, "aclose", None)
            if close is not None:
                await close()
