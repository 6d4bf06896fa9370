"""The screen of a sandbox that is a whole machine: `sandbox.screen`, and beside it `sandbox.serial` and
`sandbox.clipboard`.

What is seen is what the display shows at that moment; nothing waits for a picture to settle.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator

from opendsec.client import clipboard
from opendsec.client._async.commands import Commands
from opendsec.client._async.transport import Transport, target
from opendsec.model.screen import ScreenSize, SerialStatus, View, ViewRequest, check_view
from opendsec.wire.contracts import HEADER_OFFSET

MAX_PICTURE_BYTES = 256 * 1024 * 1024
MAX_SERIAL_BYTES = 4 * 1024 * 1024
SERIAL_PIECE = 32 * 1024
WAIT_S = 20.0
_OFFSET = HEADER_OFFSET.lower().encode("ascii")


class Screen:
    """`sandbox.screen`. Methods raise UnsupportedError where the sandbox has no screen."""

    def __init__(self, transport: Transport, sandbox_id: str) -> None:
        self._transport = transport
        self._sandbox_id = sandbox_id

    async def screenshot(self) -> bytes:
        """What it shows now, as PNG."""
        deadline = self._transport.deadline(None)
        body = await self._transport.open("GET", target("sandboxes", self._sandbox_id, "screen"), deadline=deadline)
        return await body.read_all(MAX_PICTURE_BYTES, deadline=deadline)

    async def size(self) -> ScreenSize:
        """In pixels, now: the guest changes it as it likes."""
        return await self._transport.call("GET", target("sandboxes", self._sandbox_id, "screen", "size"), ScreenSize)

    async def view(self, *, seconds: float = 300.0) -> str:
        """An address that shows the screen in a browser, and lets whoever has it use mouse and keyboard.

        It is good for `seconds` (at most 3600), as long as the sandbox's edge lives; a view that was opened goes on.
        """
        request = check_view(ViewRequest(seconds=seconds))
        where = target("sandboxes", self._sandbox_id, "screen", "view")
        view = await self._transport.call("POST", where, View, value=request, idempotent=False)
        return f"{self._transport.endpoint.url.rstrip('/')}{view.path}"


class Serial:
    """`sandbox.serial`: the serial console. All it says is recorded while the sandbox's edge lives, the last MiB of it
    is kept; offsets count from the start of the sandbox."""

    def __init__(self, transport: Transport, sandbox_id: str) -> None:
        self._transport = transport
        self._where = target("sandboxes", sandbox_id, "serial")

    async def read(self, offset: int = 0) -> bytes:
        """What it has said from `offset` on, as far as it is kept."""
        _, data = await self._read(offset, 0.0)
        return data

    async def follow(self, offset: int = 0) -> AsyncGenerator[bytes, None]:
        """What it says from `offset` on, for ever; ends with SandboxExitedError."""
        while True:
            at, data = await self._read(offset, WAIT_S)
            offset = at + len(data)
            if data:
                yield data

    async def write(self, data: bytes | str) -> None:
        """Say something to it; text is UTF-8. Waits while the guest takes nothing."""
        raw = data.encode("utf-8") if isinstance(data, str) else bytes(data)
        for start in range(0, len(raw), SERIAL_PIECE):
            piece = raw[start : start + SERIAL_PIECE]
            await self._transport.call("POST", self._where, SerialStatus, raw=piece, idempotent=False)

    async def _read(self, offset: int, wait_s: float) -> tuple[int, bytes]:
        deadline = self._transport.deadline(None)
        where = f"{self._where}?offset={offset}" + (f"&wait={wait_s:g}" if wait_s else "")
        body = await self._transport.open("GET", where, deadline=deadline)
        at = int(body.headers.get(_OFFSET, b"0"))
        return at, await body.read_all(MAX_SERIAL_BYTES, deadline=deadline)


class Clipboard:
    """`sandbox.clipboard`: needs our agent inside, and xclip or wl-clipboard."""

    def __init__(self, commands: Commands) -> None:
        self._commands = commands

    async def get(self, *, user: str | None = None) -> str:
        """The text that was copied last; "" when there is none. `user`: whose desktop it is; None: the sandbox's."""
        result = await self._commands.run(
            clipboard.GET_SCRIPT, user=user, timeout=clipboard.TIMEOUT_S, max_output_bytes=clipboard.MAX_BYTES
        )
        return clipboard.text_of(result)

    async def set(self, text: str, *, user: str | None = None) -> None:
        """As if `text` had been copied inside."""
        result = await self._commands.run(clipboard.SET_SCRIPT, user=user, timeout=clipboard.TIMEOUT_S, stdin=text)
        clipboard.check_result(result)
