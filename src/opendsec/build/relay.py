"""A tree stream from one sandbox, renamed and with other owners, as part of a stream into another. Flat memory."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from dataclasses import replace

from opendsec.build.items import Changes
from opendsec.client.tree_format import ENTRY_LENGTH, MAX_ENTRY_BYTES, TreeEntry, pack_entry, unpack_entry
from opendsec.errors import FileError, ProtocolError, TransportError


class Relay:
    """Passes one stream on."""

    def __init__(self, target: str, changes: Changes) -> None:
        self._target = os.fsencode(target)
        self._changes = changes

    async def run(self, chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """Everything but the mark at the end. Raises ProtocolError, TransportError when the stream was cut."""
        pending = bytearray()
        left = 0
        finished = False
        async for chunk in chunks:
            pending += chunk
            out = bytearray()
            at = 0
            while at < len(pending) and not finished:
                if left:
                    taken = min(left, len(pending) - at)
                    out += pending[at : at + taken]
                    at, left = at + taken, left - taken
                    continue
                body = _head(pending, at)
                if body is None:
                    break
                at += ENTRY_LENGTH.size + len(body)
                if not body:
                    finished = True
                    break
                entry = self._renamed(unpack_entry(body))
                left = entry.size
                out += pack_entry(entry)
            del pending[:at]
            if out:
                yield bytes(out)
        if not finished or left:
            raise TransportError("the tree stream was cut")

    def _renamed(self, entry: TreeEntry) -> TreeEntry:
        name = b"/".join(part for part in (self._target, entry.name) if part)
        if not name:
            raise ProtocolError("a tree stream with an entry that has no name")
        return self._changes.applied(replace(entry, name=name))


def _head(pending: bytearray, at: int) -> bytes | None:
    """The next entry's fields; None when they are not all there; empty at the end."""
    if len(pending) - at < ENTRY_LENGTH.size:
        return None
    (length,) = ENTRY_LENGTH.unpack_from(pending, at)
    if length > MAX_ENTRY_BYTES:
        raise FileError(
            f"an entry of {length} bytes, at most {MAX_ENTRY_BYTES}: its path is too long to copy",
            detail={"errno": "ENAMETOOLONG"},
        )
    start = at + ENTRY_LENGTH.size
    return bytes(pending[start : start + length]) if len(pending) - start >= length else None
