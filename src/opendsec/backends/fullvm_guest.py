"""The guest of a machine that has no agent of ours inside: it lives as long as its VMM, and answers nothing else.

The edge refuses commands and files of such a sandbox by name before they come here (`Backend.lacks`); what comes anyway
is refused in the same words.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, NoReturn

from opendsec.errors import UnsupportedError
from opendsec.guest.base import CommandEvent, Guest, GuestStat, GuestStream, KnownCommand, StartCommand

NO_AGENT = "its image has no guest agent"
REMEDY = "use its screen, input and serial console, or import the disk with our agent inside and --agent"


def _refuse() -> NoReturn:
    raise UnsupportedError(f"the sandbox runs no commands and has no files to reach: {NO_AGENT}", remedy=REMEDY)


class SilentGuest(Guest):
    """`ended` waits for the end of the machine; `dial` reaches a port inside by other ways."""

    def __init__(
        self,
        ended: Callable[[], Coroutine[Any, Any, None]],
        dial: Callable[[int], Coroutine[Any, Any, GuestStream]],
    ) -> None:
        self._ended = ended
        self._dial = dial
        self._closed = False

    async def wait_closed(self) -> None:
        await self._ended()
        self._closed = True

    async def aclose(self) -> None:
        self._closed = True

    @property
    def closed(self) -> bool:
        return self._closed

    async def ping(self) -> float:
        return 0.0

    async def list_commands(self) -> list[KnownCommand]:
        return []

    async def dial(self, port: int, host: str = "127.0.0.1") -> GuestStream:
        del host
        return await self._dial(port)

    def ack(self, command_id: int, stdout: int, stderr: int) -> None:
        """There are none."""

    def release(self, command_id: int) -> None:
        """There are none."""

    async def shutdown(self, grace_ms: int) -> None:
        """Nobody is told."""

    async def start(self, command_id: int, command: StartCommand) -> int:
        _refuse()

    def events(self, command_id: int) -> AsyncIterator[CommandEvent]:
        _refuse()

    async def attach(self, command_id: int, stdout: int, stderr: int) -> None:
        _refuse()

    async def write_stdin(self, command_id: int, offset: int, data: bytes, *, eof: bool) -> None:
        _refuse()

    async def kill(self, command_id: int, grace_ms: int) -> None:
        _refuse()

    async def signal(self, command_id: int, signal: int) -> None:
        _refuse()

    async def resize(self, command_id: int, rows: int, cols: int) -> None:
        _refuse()

    async def end_session(self, name: str) -> None:
        _refuse()

    async def stat(self, path: str, *, user: str = "") -> GuestStat:
        _refuse()

    async def list_dir(self, path: str, *, user: str = "") -> list[GuestStat]:
        _refuse()

    async def mkdir(self, path: str, *, mode: int = 0o755, parents: bool = False, user: str = "") -> None:
        _refuse()

    async def move(self, path: str, target: str, *, overwrite: bool = True, user: str = "") -> None:
        _refuse()

    async def remove(self, path: str, *, recursive: bool = False, user: str = "") -> None:
        _refuse()

    async def chmod(self, path: str, mode: int, *, user: str = "") -> None:
        _refuse()

    async def open_read(
        self, path: str, *, offset: int = 0, length: int | None = None, user: str = ""
    ) -> tuple[GuestStat, AsyncIterator[bytes]]:
        _refuse()

    async def write_file(
        self, path: str, chunks: AsyncIterator[bytes], *, mode: int | None = None, parents: bool = False, user: str = ""
    ) -> GuestStat:
        _refuse()

    def pack(self, path: str, *, user: str = "") -> AsyncIterator[bytes]:
        _refuse()

    async def unpack(self, path: str, chunks: AsyncIterator[bytes], *, user: str = "") -> tuple[int, int]:
        _refuse()

    def watch(self, path: str, *, recursive: bool = False, user: str = "") -> AsyncIterator[tuple[str, str]]:
        _refuse()
