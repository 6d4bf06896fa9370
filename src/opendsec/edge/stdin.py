"""Bytes on their way to a command's stdin: each once, whatever is repeated or lost on the way."""

from __future__ import annotations

from collections.abc import AsyncIterator

from opendsec import errors
from opendsec.edge import outcome
from opendsec.edge.command import Command
from opendsec.guest.base import CHUNK_BYTES, GuestError, GuestLostError
from opendsec.wire.contracts import StdinStatus


async def write_stdin(command: Command, offset: int | None, chunks: AsyncIterator[bytes], *, eof: bool) -> StdinStatus:
    """Pass bytes on, once the command has begun; what lies below the accepted offset is skipped. Raises ConflictError
    for a gap, or when stdin is closed, and SandboxLostError, which may be tried again.
    """
    progress = command.stdin
    async with progress.turn:
        if offset is None and not progress.known:
            raise errors.ConflictError(
                "offset: is needed, for what was accepted before the edge was restarted is not known here",
                detail={"field": "offset", "accepted": progress.accepted},
            )
        position = progress.accepted if offset is None else offset
        if progress.known and position > progress.accepted:
            raise errors.ConflictError(
                f"offset: {position} leaves a gap, {progress.accepted} bytes were accepted",
                detail={"field": "offset", "accepted": progress.accepted},
            )
        async for chunk in chunks:
            for start in range(0, len(chunk), CHUNK_BYTES):
                part = chunk[start : start + CHUNK_BYTES]
                await _put(command, position, part, eof=False)
                position += len(part)
        if eof:
            await _put(command, position, b"", eof=True)
        return StdinStatus(accepted=progress.accepted, closed=progress.closed)


async def _put(command: Command, position: int, data: bytes, *, eof: bool) -> None:
    progress = command.stdin
    fresh = data[max(0, progress.accepted - position) :] if progress.known else data
    begin = position + len(data) - len(fresh)
    if not fresh and not eof:
        return
    if not command.request.stdin and command.request.pty is None:
        raise errors.ConflictError("this command has no stdin", remedy="start it with stdin=true")
    guest = await command.carried()
    if guest is None or (progress.closed and fresh):
        raise errors.ConflictError("the command's stdin is closed", detail={"accepted": progress.accepted})
    try:
        await guest.write_stdin(command.number, begin, fresh, eof=eof)
    except GuestError as exc:
        raise outcome.refusal(exc) from exc
    except GuestLostError as exc:
        raise errors.SandboxLostError(
            "the connection to the guest agent was lost; ask for the stdin offset and go on", retryable=True
        ) from exc
    progress.known = True
    progress.accepted = max(progress.accepted, begin + len(fresh))
    progress.closed = progress.closed or eof
