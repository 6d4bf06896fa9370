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
from collections.abc import Callable
from typing import Any

try:
    import resource
except ImportError:  # the control group's clock counts without it too
    resource = None  # type: ignore[assignment]

REQUEST = struct.Struct("<II")
"""Number of the call, seconds of processor time; with it three descriptors: task, stdout, stderr."""
REPLY = struct.Struct("<IIQQQII")
"""Number, wait status, user and system time in us, largest resident set in KiB, killed leftovers, kills on request."""
ASK_KILLS = 0xFFFFFFFF
"""As the number of a call: only answer how many kills there were."""
ASK_SWEEP = 0xFFFFFFFE
"""As the number of a call: end whatever is left of the last one. A kill(-1) visits every process of the host, so it is
done only when the host has counted too many."""
WORK = "/call/work"
USER_ID = 65534
DESCRIPTORS = 3
ENCODER = json.JSONEncoder(allow_nan=False)
DECODER = json.JSONDecoder()


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


def become_nobody(cpu_s: int) -> None:
    """Give up what this process has beyond a call."""
    fd = os.open("/proc/self/oom_score_adj", os.O_WRONLY)
    os.write(fd, b"1000")
    os.close(fd)
    os.setgroups([])
    os.setresgid(USER_ID, USER_ID, USER_ID)
    os.setresuid(USER_ID, USER_ID, USER_ID)
    os.setsid()
    os.chdir(WORK)
    if resource is not None:
        resource.setrlimit(0, (cpu_s, cpu_s + 1))  # RLIMIT_CPU


def read_task(fd: int) -> dict[str, Any]:
    """What to do. Nothing of it stays in the file."""
    text = os.pread(fd, os.fstat(fd).st_size, 0)
    os.ftruncate(fd, 0)
    task: dict[str, Any] = DECODER.scan_once(text.decode("utf-8"), 0)[0]  # type: ignore[attr-defined]
    return task


def call(task: dict[str, Any]) -> bytes:
    """The value, as JSON."""
    module = types.ModuleType("fncall")
    module.__file__ = "code.py"
    sys.modules["fncall"] = module
    code = compile(task["code"], "code.py", "exec", dont_inherit=True)  # without this file's own `from __future__`
    exec(code, module.__dict__)  # noqa: S102 that is what is asked for
    arguments, keywords = task["arguments"]
    value = module.__dict__[task["function"]](*arguments, **keywords)
    if isinstance(value, types.CoroutineType):
        import asyncio

        value = asyncio.run(value)
    return encode(value)


def make_encode() -> Callable[[Any], bytes]:
    """`ENCODER.encode`, without what that writes in memory that is the fork server's: every such page is copied."""
    make = json.encoder.c_make_encoder  # type: ignore[attr-defined]
    if make is None:
        return lambda value: ENCODER.encode(value).encode("ascii")
    quote = json.encoder.encode_basestring_ascii
    chunks = make({}, ENCODER.default, quote, None, ": ", ", ", False, False, False)
    return lambda value: "".join(chunks(value, 0)).encode("ascii")


encode = make_encode()


def remember_source(code: str) -> None:
    """For tracebacks."""
    import linecache

    linecache.cache["code.py"] = (len(code), None, code.splitlines(True), "code.py")


def renew_randomness() -> None:
    """`random` does it by itself after a fork; numpy's global generator would be the same in every call."""
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()


def run(task_fd: int, cpu_s: int) -> int:
    """The forked process's whole life; its exit status."""
    own = os.getpid()
    become_nobody(cpu_s)
    task = read_task(task_fd)
    if task["env"]:  # the rest is the fork server's own
        os.environ.update(task["env"])  # noqa: TID251 the call's own process
    sys.path.insert(0, WORK)
    renew_randomness()
    status = 1
    try:
        value = call(task)
        while value and os.getpid() == own:  # a child that the function has forked returns, too: that is no answer
            value = value[os.write(task_fd, value) :]
        status = 0
    except BaseException:  # noqa: BLE001 whatever leaves the function is the call's own
        remember_source(task["code"])
        traceback.print_exc()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            status = status or 1
    return status


def warm_up() -> None:
    """Go once through what every call does: memory that is written here once is not copied in every fork (2.3 -> 1.1
    CPU-ms, 425 -> 263 page faults).
    """
    code = "def warm(first, second=2):\n    return [first, {'second': second}]\n"
    call(json.loads(json.dumps({"code": code, "function": "warm", "arguments": [[1], {"second": 2}]})))
    del sys.modules["fncall"]
    os.environ.update(os.environ)  # noqa: TID251 the fork server's own


class Server:
    """Answers calls until the host lets go."""

    def __init__(self, control: socket.socket) -> None:
        self.control = control
        self.control_fd = control.fileno()
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
            number, cpu_s = REQUEST.unpack(message)
            if number in (ASK_KILLS, ASK_SWEEP):
                left = sweep() if number == ASK_SWEEP else 0
                self.control.send(REPLY.pack(number, 0, 0, 0, 0, left, self.kills))
                continue
            fds = array.array("i")
            fds.frombytes(ancillary[0][2])
            self.answer(number, cpu_s, fds)

    def answer(self, number: int, cpu_s: int, fds: array.array[int]) -> None:
        """Carry out one call."""
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                status = self.live(cpu_s, fds)
            finally:
                os._exit(status)
        for fd in fds:
            os.close(fd)
        _, status, usage = os.wait4(pid, 0)
        user, system = int(usage.ru_utime * 1e6), int(usage.ru_stime * 1e6)
        self.control.send(REPLY.pack(number, status, user, system, usage.ru_maxrss, 0, self.kills))

    def live(self, cpu_s: int, fds: array.array[int]) -> int:
        """In the forked process: keep nothing of the server's but its modules."""
        task, out, err = fds
        _signal.signal(10, 0)  # SIGUSR1, SIG_DFL: the module above it would look names of numbers up
        os.close(self.control_fd)
        os.dup2(out, 1)
        os.dup2(err, 2)
        os.close(out)
        os.close(err)
        return run(task, cpu_s)


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
    server = Server(control)
    signal.signal(signal.SIGUSR1, server.on_request)
    sys.argv = [""]
    warm_up()
    gc.collect()
    gc.freeze()
    sys.stdout.flush()
    control.send(json.dumps({"ok": True, "python": sys.version.split()[0]}).encode("ascii"))
    server.serve()


if __name__ == "__main__":
    main()
