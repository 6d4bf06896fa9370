"""The fork server of function calls: this file's text is run by the *image's* Python, inside a pool's container.

    python3 -B -s -c <this text> <socket> <module>...

It imports the modules, connects to the socket, and then forks a process per call, as nobody. It never sees what a call
is about: code and arguments are in a memory file that only the forked process opens, so no later fork can find them in
its memory. When the process has ended, the call is answered; the host then counts, and has whatever else it started
killed (everybody but process 1 and this one). Standard library only, Python 3.7 or newer; nobody imports it.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import array
import gc
import json
import os
import signal
import socket
import struct
import sys
import traceback
import types

TYPE_CHECKING = False  # `typing` itself is memory that every fork would inherit
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

try:
    import resource
except ImportError:  # the control group's clock counts without it too
    resource = None  # type: ignore[assignment]

REQUEST = struct.Struct("<III")
"""Number of the call, seconds of processor time, bytes of the task; with it three descriptors: task, stdout, stderr."""
REPLY = struct.Struct("<IIII")
"""Number, wait status, killed leftovers, kills on request."""
ASK_KILLS = 0xFFFFFFFF
"""As the number of a call: only answer how many kills there were."""
ASK_SWEEP = 0xFFFFFFFE
"""As the number of a call: end whatever is left of the last one. A kill(-1) visits every process of the host, so it is
done only when the host has counted too many."""
UNPREPARED = 122
"""Exit status of a call's process that failed before the call began: the task is then still in its file."""
WORK = "/call/work"
USER_ID = 65534
DESCRIPTORS = 3
ENCODER = json.JSONEncoder(allow_nan=False)
EMPTY_BYTES = b"".__sizeof__()
MOST_HOLES = 20_000
POOL_MASK, POOL_HEADER = (0x3FFF, 48) if sys.version_info >= (3, 10) else (0xFFF, 48)
"""Where the first object of a pool of Python's allocator lies."""


def kill_all() -> bool:
    """SIGKILL to every process but process 1 and this one; whether there was one."""
    try:
        os.kill(-1, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def sweep() -> int:
    """Until nobody is left; process 1 reaps orphans. Returns how often somebody was."""
    rounds = 0
    while kill_all():
        rounds += 1
        try:
            os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            signal.sigtimedwait([], 0.0005)
    return rounds


def make_call() -> Callable[[dict[str, Any]], bytes]:
    """The call itself: from what was asked to the value, as JSON. What it needs is bound here: see `make_life`."""
    modules, new_module, coroutine = sys.modules, types.ModuleType, types.CoroutineType
    encode = make_encode()

    def call(task: dict[str, Any]) -> bytes:
        module = new_module("fncall")
        module.__file__ = "code.py"
        modules["fncall"] = module
        names = module.__dict__
        # without this file's own `from __future__`
        exec(compile(task["code"], "code.py", "exec", 0, True), names)  # noqa: S102 that is what is asked for
        arguments, keywords = task["arguments"]
        value = names[task["function"]](*arguments, **keywords)
        if isinstance(value, coroutine):
            import asyncio

            value = asyncio.run(value)
        return encode(value)

    return call


def make_encode() -> Callable[[Any], bytes]:
    """`ENCODER.encode`, without what that writes in memory that is the fork server's: every such page is copied."""
    make = json.encoder.c_make_encoder  # type: ignore[attr-defined]
    if make is None:
        return lambda value: ENCODER.encode(value).encode("ascii")
    quote = json.encoder.encode_basestring_ascii
    chunks = make({}, ENCODER.default, quote, None, ": ", ", ", False, False, False)
    return lambda value: "".join(chunks(value, 0)).encode("ascii")


def make_life(control_fd: int) -> Callable[[array.array[int], int, int], int]:  # noqa: PLR0915 see below
    """The forked process's whole life, to its exit status, in one function with all it needs at hand.

    Every name looked up in a module, and every function called, is a page of the fork server's that has to be copied
    because a reference was counted in it.
    """
    close, dup2, open_file, write, getpid = os.close, os.dup2, os.open, os.write, os.getpid
    setgroups, setresgid, setresuid, setsid, chdir = os.setgroups, os.setresgid, os.setresuid, os.setsid, os.chdir
    set_signal = _signal.signal
    scan, path, call = json.JSONDecoder().scan_once, sys.path, make_call()  # type: ignore[attr-defined]
    # `random` does it by itself after a fork; numpy's global generator would be the same in every call
    seed = sys.modules["numpy.random"].seed if "numpy.random" in sys.modules else None

    def life(fds: array.array[int], size: int, cpu_s: int) -> int:
        task_fd, out, err = fds
        try:
            set_signal(10, 0)  # SIGUSR1, SIG_DFL: the module above it would look names of numbers up
            close(control_fd)
            dup2(out, 1)
            dup2(err, 2)
            close(out)
            close(err)
            fd = open_file("/proc/self/oom_score_adj", 1)  # O_WRONLY
            write(fd, b"1000")
            close(fd)
            setgroups(())
            setresgid(USER_ID, USER_ID, USER_ID)
            setresuid(USER_ID, USER_ID, USER_ID)
            setsid()
            chdir(WORK)
            if resource is not None:
                resource.setrlimit(0, (cpu_s, cpu_s + 1))  # RLIMIT_CPU
            own = getpid()
            task = scan(os.pread(task_fd, size, 0).decode(), 0)[0]
            if task["env"]:  # the rest is the fork server's own
                os.environ.update(task["env"])  # noqa: TID251 the call's own process
            path.insert(0, WORK)
            if seed is not None:
                seed()
            os.ftruncate(task_fd, 0)  # nothing of it stays in the file
        except BaseException as fault:  # noqa: BLE001 nothing of the code has run: it is not to blame
            return unprepared(fault)
        try:
            value = call(task)
            while value and getpid() == own:  # a child that the function has forked returns, too: that is no answer
                value = value[write(task_fd, value) :]
            status = 0
        except BaseException:  # noqa: BLE001 whatever leaves the function is the call's own
            print_error(task["code"])
            status = 1
        return flushed(status)

    return life


def unprepared(fault: BaseException) -> int:
    """The exit status, after saying why."""
    try:
        os.write(2, repr(fault)[:1000].encode("ascii", "replace"))
    except OSError:  # nobody listens, or it never got that far: the status tells
        pass
    return UNPREPARED


def print_error(code: str) -> None:
    """The traceback, with lines of the code."""
    import linecache

    linecache.cache["code.py"] = (len(code), None, code.splitlines(True), "code.py")
    traceback.print_exc()


def flushed(status: int) -> int:
    """What is printed is printed, or the call has failed. Code may have put None there, which prints nothing, or
    anything else."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except BaseException as fault:  # noqa: BLE001 see above
            status = status or 1
            if not isinstance(fault, (OSError, ValueError)):
                traceback.print_exc(file=sys.__stderr__)
    return status


def warm_up() -> None:
    """Go once through what every call does: memory that is written here once is not copied in every fork (2.3 -> 1.1
    CPU-ms).
    """
    code = "def warm(first, second=2):\n    return [first, {'second': second}]\n"
    make_call()(json.loads(json.dumps({"code": code, "function": "warm", "arguments": [[1], {"second": 2}]})))
    del sys.modules["fncall"]
    os.environ.update(os.environ)  # noqa: TID251 the fork server's own


def fill_holes() -> list[object]:
    """Objects in every free place of pages in use, to be kept: what a forked process makes of its own then lies
    together in few new pages, not in a free place each of pages that have to be copied for it (30 page faults less).
    """
    kept: list[object] = []
    for size in range(16, 513, 16):  # the classes of Python's allocator
        for _ in range(MOST_HOLES):
            made: object = object() if size == 16 else float(size) if size == 32 else bytes(size - EMPTY_BYTES)
            kept.append(made)
            if id(made) & POOL_MASK == POOL_HEADER:  # the first place of a pool: all before are full
                break
    return kept


class Server:
    """Answers calls until the host lets go."""

    def __init__(self, control: socket.socket) -> None:
        self.control = control
        self.control_fd = control.fileno()
        self.life = make_life(self.control_fd)
        self.kills = 0
        """On request, so far."""

    def on_request(self, signum: int, frame: object) -> None:
        """The host wants the present call ended."""
        kill_all()
        self.kills += 1

    def serve(self) -> None:
        """One call after the other."""
        space = socket.CMSG_SPACE(DESCRIPTORS * array.array("i").itemsize)
        while True:
            message, ancillary, _, _ = self.control.recvmsg(REQUEST.size, space, socket.MSG_CMSG_CLOEXEC)
            if not message:
                return
            number, cpu_s, size = REQUEST.unpack(message)
            if number in (ASK_KILLS, ASK_SWEEP):
                left = sweep() if number == ASK_SWEEP else 0
                self.control.send(REPLY.pack(number, 0, left, self.kills))
                continue
            fds = array.array("i")
            fds.frombytes(ancillary[0][2])
            self.answer(number, cpu_s, size, fds)

    def answer(self, number: int, cpu_s: int, size: int, fds: array.array[int]) -> None:
        """Carry out one call."""
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                status = self.life(fds, size, cpu_s)
            finally:
                os._exit(status)
        for fd in fds:
            os.close(fd)
        _, status = os.waitpid(pid, 0)
        self.control.send(REPLY.pack(number, status, 0, self.kills))


def main() -> None:
    """Imports, greets, serves."""
    path, *modules = sys.argv[1:]
    sys.path = [place for place in sys.path if place]
    control = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    control.connect(path)
    try:
        for module in modules:
            __import__(module)
    except BaseException:  # noqa: BLE001 whatever a module raises is told
        control.send(json.dumps({"ok": False, "error": traceback.format_exc()[-4000:]}).encode("ascii"))
        return
    sys.argv = [""]
    warm_up()
    gc.collect()
    kept = fill_holes()
    server = Server(control)
    signal.signal(signal.SIGUSR1, server.on_request)
    gc.collect()
    gc.freeze()
    sys.stdout.flush()
    control.send(json.dumps({"ok": True, "python": sys.version.split()[0]}).encode("ascii"))
    server.serve()
    del kept


if __name__ == "__main__":
    main()
