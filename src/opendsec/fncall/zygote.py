"""The host's side of a fork server (`inside.py`): one function call at a time, each in a process of its own.

What crosses the border: a memory file with code and arguments, which becomes the value; two pipes for output; and the
fork server's word on how the process ended, over a socket that the process does not have.
"""

from __future__ import annotations

import array
import asyncio
import json
import os
import signal
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from opendsec.fncall import inside_frames as frames
from opendsec.fncall.box import CALL, Box
from opendsec.guest.base import Exit, Guest, GuestLostError, Output, StartCommand

SOURCE = Path(__file__).with_name("inside.py").read_text(encoding="utf-8")
SOCKET_NAME = "fork-server"
START_TIMEOUT_S = 120.0
"""Until everything is imported."""
ANSWER_TIMEOUT_S = 5.0
COMMAND_ID = 1
_SAID_BYTES = 4096


class ImportFailedError(Exception):
    """A module of the call could not be imported, or the image's Python not be run; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The fork server's answer about one call."""

    status: int
    """As wait(2) has it."""
    leftovers: int
    """How often something had to be killed after the call's own process was gone."""
    kills: int


class Zygote:
    """One running fork server. Made by `start_zygote`."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._loop = asyncio.get_running_loop()
        self._answer: asyncio.Future[Ended] | None = None
        self._number = 0
        self._asked_kills = 0
        self._pidfd = os.pidfd_open(_peer(control))
        self.lost = ""
        self._loop.add_reader(control.fileno(), self._read)

    def close(self) -> None:
        """Let go of it; it ends then."""
        if self._pidfd >= 0:
            self._loop.remove_reader(self._control.fileno())
            self._control.close()
            os.close(self._pidfd)
            self._pidfd = -1
        self._fail("was let go")

    def begin(self, *, cpu_s: int, task: int, size: int, out: int, err: int) -> asyncio.Future[Ended]:
        """Start a process for what is in the memory file `task` of `size` bytes. The future raises GuestLostError."""
        answer: asyncio.Future[Ended] = self._loop.create_future()
        if self.lost:
            answer.set_exception(GuestLostError(f"the fork server {self.lost}"))
            return answer
        self._number = (self._number + 1) % frames.ASK_SWEEP
        self._answer = answer
        fds = array.array("i", (task, out, err))
        try:
            self._control.sendmsg(
                [frames.REQUEST.pack(self._number, cpu_s, size)], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)]
            )
        except OSError as error:
            self._fail(f"cannot be asked: {error}")
        return answer

    def kill(self) -> None:
        """End the present call, whatever it has started; its end is answered as always."""
        self._asked_kills += 1
        signal.pidfd_send_signal(self._pidfd, signal.SIGUSR1)

    async def settle(self, ended: Ended) -> bool:
        """Whether no `kill` is on its way any more: one that came late must not hit the next call."""
        if ended.kills == self._asked_kills:
            return True
        return (await self._ask(frames.ASK_KILLS)).kills == self._asked_kills

    async def sweep(self) -> None:
        """End whatever the last call has started and is still there. Raises GuestLostError."""
        await self._ask(frames.ASK_SWEEP)

    async def _ask(self, question: int) -> Ended:
        if self.lost:
            raise GuestLostError(f"the fork server {self.lost}")
        answer: asyncio.Future[Ended] = self._loop.create_future()
        self._answer, before = answer, self._number
        self._number = question
        try:
            self._control.send(frames.REQUEST.pack(question, 0, 0))
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                return await answer
        except OSError as error:  # a time-out is one
            self._fail(f"does not answer: {error!r}")
            raise GuestLostError(f"the fork server {self.lost}") from error
        finally:
            self._number = before

    def _read(self) -> None:
        try:
            packet = self._control.recv(frames.REPLY.size)
        except BlockingIOError:
            return
        except OSError as error:
            packet = b""
            self._fail(f"cannot be heard: {error}")
        if not packet:
            self._loop.remove_reader(self._control.fileno())
            self._fail("has ended")
            return
        number, status, leftovers, kills = frames.REPLY.unpack(packet)
        answer, self._answer = self._answer, None
        if answer is None or answer.done() or number != self._number:
            self._fail("answered what nobody asked")
            return
        answer.set_result(Ended(status=status, leftovers=leftovers, kills=kills))

    def _fail(self, how: str) -> None:
        self.lost = self.lost or how
        answer, self._answer = self._answer, None
        if answer is not None and not answer.done():
            answer.set_exception(GuestLostError(f"the fork server {self.lost}"))
            answer.exception()  # seen, also by whoever was cancelled meanwhile


def _peer(control: socket.socket) -> int:
    credentials = control.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return int.from_bytes(credentials[:4], "little")


async def start_zygote(guest: Guest, box: Box, modules: tuple[str, ...], env: Mapping[str, str]) -> Zygote:
    """Run the image's python3 with `modules` imported. Raises ImportFailedError, GuestLostError."""
    path = f"/proc/self/fd/{box.call}/{SOCKET_NAME}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.setblocking(False)
        listener.bind(path)
        try:
            Path(path).chmod(0o777)  # for root inside, who is nobody here; nothing untrusted runs yet
            listener.listen(1)
            return await _started(guest, listener, modules, env)
        finally:
            os.unlink(SOCKET_NAME, dir_fd=box.call)


async def _started(guest: Guest, listener: socket.socket, modules: tuple[str, ...], env: Mapping[str, str]) -> Zygote:
    argv = ("python3", "-B", "-s", "-c", SOURCE, f"{CALL}/{SOCKET_NAME}", *modules)
    await guest.start(COMMAND_ID, StartCommand(argv=argv, env=dict(env)))
    loop = asyncio.get_running_loop()
    ending = loop.create_task(_last_words(guest))
    greeting = loop.create_task(_greeted(loop, listener))
    try:
        await asyncio.wait((ending, greeting), timeout=START_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
        if greeting.done():
            control, hello = greeting.result()
        elif ending.done():
            raise ImportFailedError(f"the image's python3 ended at once: {ending.result()}")
        else:
            raise ImportFailedError(f"nothing was imported within {START_TIMEOUT_S:g} s")
    finally:
        for task in (ending, greeting):
            task.cancel()
        await asyncio.wait((ending, greeting))
    if not hello.get("ok"):
        control.close()
        raise ImportFailedError(str(hello.get("error", "no reason given")))
    return Zygote(control)


async def _greeted(loop: asyncio.AbstractEventLoop, listener: socket.socket) -> tuple[socket.socket, dict[str, object]]:
    control, _ = await loop.sock_accept(listener)
    control.setblocking(False)
    try:
        packet = await loop.sock_recv(control, 65536)
        found = json.loads(packet) if packet else {"ok": False, "error": "it ended while importing"}
    except BaseException:
        control.close()
        raise
    return control, found if isinstance(found, dict) else {}


async def _last_words(guest: Guest) -> str:
    said = b""
    async for event in guest.events(COMMAND_ID):
        if isinstance(event, Output):
            said = (said + event.data)[-_SAID_BYTES:]
        elif isinstance(event, Exit):
            break
    return said.decode(errors="replace").strip()
