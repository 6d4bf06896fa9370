"""Bodies that are lines of JSON."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from opendsec.client._async.transport import SILENCE_S, Body
from opendsec.errors import ProtocolError, TransportError

MAX_LINE_BYTES = 4 * 1024 * 1024


async def read_lines(
    body: Body, *, deadline: float | None = None, silence_s: float = SILENCE_S, most: int = MAX_LINE_BYTES
) -> AsyncGenerator[bytes, None]:
    """Each complete line without its end, empty ones left out. Ends when the body ends; a last line without end is
    a cut. `most`: bytes of a line."""
    rest: list[bytes] = []
    size = 0
    while data := await body.read(deadline=deadline, silence_s=silence_s):
        rest.append(data)
        size += len(data)
        if b"\n" in data:
            *lines, last = b"".join(rest).split(b"\n")
            rest, size = [last], len(last)
            for line in lines:
                if line.strip():
                    yield line
        if size > most:
            raise ProtocolError(f"a line of the answer is longer than {most} bytes")
    if b"".join(rest).strip():
        raise TransportError("the answer was cut in the middle of a line")
