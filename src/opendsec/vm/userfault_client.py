"""The edge's side of `vm.userfault`: start that process when it is first needed, hand machines to it, and end them
should it die before them.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from opendsec.linux import process
from opendsec.linux.process import ProcessIdentity
from opendsec.vm.userfault import CONTROL, READ_S

SOCKET: Final = "userfault.sock"
_ANSWER_S: Final = 30.0
_BACKLOG: Final = 64
_TRIES: Final = 5
_MOMENT_S: Final = 0.02


class MemoryServer:
    """`directory` is the edge's run directory: the process is found again there by the next edge. A machine whose
    memory cannot be read within `read_s` seconds is ended.
    """

    def __init__(self, directory: Path, *, read_s: float = READ_S) -> None:
        self._read_s = read_s
        self._path = directory / SOCKET
        self._starting = asyncio.Lock()
        self._pidfd = -1
        self._identity: ProcessIdentity | None = None
        self._on_end: set[Callable[[], None]] = set()

    async def serve(
        self, *, pidfd: int, listener: socket.socket, directory: Path, layers: Sequence[Path], table: Path | None
    ) -> ProcessIdentity:
        """Have it wait at `listener` for the VMM `pidfd`; the process that serves it. Raises OSError."""
        fds: list[int] = []
        try:
            fds.append(os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC))
            paths = [*([table] if table else []), *layers]
            fds += [await asyncio.to_thread(os.open, path, os.O_RDONLY | os.O_CLOEXEC) for path in paths]
            request = json.dumps({"table": table is not None}).encode()
            return await self._ask(request, [pidfd, listener.fileno(), *fds])
        finally:
            for fd in fds:
                os.close(fd)

    async def _ask(self, request: bytes, fds: list[int]) -> ProcessIdentity:
        for _ in range(_TRIES):
            async with self._starting:
                connection = await self._connected()
            with connection:
                try:
                    socket.send_fds(connection, [request], fds)
                    async with asyncio.timeout(_ANSWER_S):
                        content = await asyncio.get_running_loop().sock_recv(connection, 4096)
                except ConnectionError:
                    continue  # it had just decided that nobody needs it
            answer = json.loads(content or b"{}")
            if "error" in answer:
                raise OSError(errno.EIO, f"the memory server refused: {answer['error']}")
            identity = process.identify(answer["pid"]) if answer else None
            if identity is not None and (identity == self._identity or self._adopt(identity)):
                return identity
        raise OSError(errno.ECONNREFUSED, "the memory server has ended before it answered")

    def on_end(self, served_by: ProcessIdentity, call: Callable[[], None]) -> Callable[[], None]:
        """Call it when that process ends (at once, when it has); returns what takes this back."""
        if served_by != self._identity and not self._adopt(served_by):
            call()
            return lambda: None
        self._on_end.add(call)
        return lambda: self._on_end.discard(call)

    async def close(self) -> None:
        """Stop watching. The process ends with its last machine: before this returns, when it has none."""
        for _ in range(_TRIES):
            if await self._machines() == 0:
                await self._wait_ended()
                self._path.unlink(missing_ok=True)
                break
            await asyncio.sleep(_MOMENT_S)  # of one that was just ended
        self._forget()

    async def _machines(self) -> int:
        sock = self._connect()
        if sock is None:
            return 0
        with sock, contextlib.suppress(ConnectionError, TimeoutError):
            sock.send(b"{}")
            async with asyncio.timeout(_ANSWER_S):
                return int(json.loads(await asyncio.get_running_loop().sock_recv(sock, 4096) or b"{}")["machines"])
        return 0

    async def _wait_ended(self) -> None:
        identity, pidfd = self._identity, os.dup(self._pidfd) if self._pidfd >= 0 else -1
        if identity is None or pidfd < 0:
            return
        try:
            with contextlib.suppress(TimeoutError):
                await process.wait_ended(pidfd, timeout_s=_ANSWER_S)
        finally:
            os.close(pidfd)
        process.reap(identity.pid)

    async def _connected(self) -> socket.socket:
        sock = self._connect()
        if sock is None:
            await self._start()
            sock = self._connect()
        if sock is None:
            raise OSError(errno.ECONNREFUSED, "the memory server does not come up")
        return sock

    def _connect(self) -> socket.socket | None:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.setblocking(False)
        try:
            sock.connect(os.fspath(self._path))
        except OSError:
            sock.close()
            return None
        return sock

    async def _start(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._path.unlink()
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(os.fspath(self._path))
            self._path.chmod(0o600)
            listener.listen(_BACKLOG)
            argv = ["-I", "-m", "opendsec.vm.userfault", str(self._read_s)]
            pid, pidfd = process.spawn(Path(sys.executable), argv=argv, fds={CONTROL: listener.fileno()})
        os.close(pidfd)
        identity = process.identify(pid)
        if identity is not None:
            self._adopt(identity)

    def _adopt(self, identity: ProcessIdentity) -> bool:
        pidfd = process.open_process(identity)
        if pidfd is None:
            return False
        self._forget()
        self._pidfd, self._identity = pidfd, identity
        asyncio.get_running_loop().add_reader(pidfd, self._ended)
        return True

    def _forget(self) -> None:
        if self._pidfd >= 0:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)
        self._pidfd, self._identity = -1, None

    def _ended(self) -> None:
        assert self._identity is not None
        process.reap(self._identity.pid)
        self._forget()
        calls, self._on_end = self._on_end, set()
        for call in calls:
            call()
