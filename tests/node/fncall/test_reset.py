"""Nothing of a call is left for the next one in the same container.

Every test here makes a container dirty by a call, and then asks a second call in the *same* container (its host name
says so: it is counted) what it finds. Where nothing can be made at all, the refusal is what is tested.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest
from tests.node.fncall.places import Ground

from opendsec.fncall.engine import Engine
from opendsec.model.fncall import CallStatus, FnCallResult, FnCallSpec, TaskType

pytestmark = [
    pytest.mark.anyio,
    *(getattr(pytest.mark, name) for name in ("root", "userns", "netns", "cgroup", "memcg", "overlay", "native")),
    pytest.mark.erofs,
    pytest.mark.image,
]

LOOK = """
import glob, json, os, sys

def look():
    mine = str(os.getpid())
    return {
        "files": sorted(
            os.path.join(directory, name)
            for top in ("/call", "/tmp", "/var/tmp", "/dev/shm")
            for directory, directories, names in os.walk(top)
            for name in (*directories, *names)
        ),
        "processes": [pid for pid in os.listdir("/proc") if pid.isdigit() and pid != mine
                      and os.stat(f"/proc/{pid}").st_uid == os.getuid()],
        "count": sum(pid.isdigit() for pid in os.listdir("/proc")),
        "environment": dict(os.environ),
        "modules": sorted(sys.modules),
        "path": sys.path,
        "ipc": [len(open(f"/proc/sysvipc/{kind}").read().splitlines()) for kind in ("shm", "sem", "msg")],
        "unix": [line for line in open("/proc/net/unix").read().splitlines() if "@" in line],
        "tcp": open("/proc/net/tcp").read().splitlines()[1:],
        "descriptors": len(os.listdir("/proc/self/fd")),
        "cwd": [os.getcwd(), os.stat(".").st_uid == os.getuid(), os.listdir(".")],
        "umask": (os.umask(0o22), os.nice(0)),
        "builtin": hasattr(__builtins__, "leak") if not isinstance(__builtins__, dict) else "leak" in __builtins__,
        "limits": __import__("resource").getrlimit(__import__("resource").RLIMIT_NOFILE),
    }
"""

DIRTY = {
    "files": """
def dirty():
    import os
    for place in (".", "/tmp", "/var/tmp", "/dev/shm"):
        deep = place
        for level in range(100):
            deep += "/d"
            os.mkdir(deep)
        open(place + "/file", "w").write("secret")
        open(place + "/.hidden", "w").write("secret")
        os.symlink("/etc/passwd", place + "/link")
        os.mkfifo(place + "/fifo")
        os.chmod(place + "/d", 0)
""",
    "many files": """
def dirty():
    made = 0
    try:
        while True:
            open(f"/tmp/{made}", "w").close()
            made += 1
    except OSError:
        return made
""",
    "processes": """
def dirty():
    import os, time
    for _ in range(5):
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                while True:
                    time.sleep(1)
            os._exit(0)
        os.wait()
""",
    "a bomb behind": """
def dirty():
    import os
    if os.fork() == 0:
        os.setsid()
        while True:
            try:
                os.fork()
            except OSError:
                pass
""",
    "stopped processes": """
def dirty():
    import os, signal, time
    pid = os.fork()
    if pid == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(0.05)
""",
    "environment and modules": """
def dirty():
    import builtins, os, sys, json, decimal, locale, resource
    os.environ["LEAK"] = "1"
    os.putenv("LEAK", "1")
    builtins.leak = 1
    json.loads = None
    sys.path.append("/leak")
    sys.modules["leak"] = sys
    os.umask(0)
    os.nice(5)
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    sys.setrecursionlimit(50000)
""",
    "sockets": """
def dirty():
    import os, socket, time
    one = socket.socket(socket.AF_UNIX)
    one.bind("\\0leak")
    one.listen()
    two = socket.socket()
    two.bind(("127.0.0.1", 4711))
    two.listen()
    if os.fork() == 0:
        os.setsid()
        time.sleep(600)
""",
    "memory": """
def dirty():
    global held
    held = [b"secret" * 1000 for _ in range(1000)]
    import ctypes
    ctypes.CDLL(None).mlockall(3)
""",
    "its streams": """
def dirty():
    import fcntl, os
    for fd in (1, 2):
        fcntl.fcntl(fd, fcntl.F_SETFL, os.O_NONBLOCK)
        fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, 4096)
    os.close(0)
""",
    "its death": """
def dirty():
    import os, signal
    os.kill(os.getpid(), signal.SIGSEGV)
""",
}


@dataclass(slots=True)
class One:
    """An engine whose only container is used again and again."""

    engine: Engine

    async def function(self, code: str, name: str, **more: Any) -> FnCallResult:
        spec = FnCallSpec(task_type=TaskType.FUNCTION, code=code, function=name, **more)
        return await self.engine.call(spec, project="p")

    async def look(self, **more: Any) -> dict[str, Any]:
        result = await self.function(LOOK, "look", **more)
        assert result.status is CallStatus.OK, result
        found = json.loads(result.value or "")
        assert isinstance(found, dict)
        return found

    @property
    def container(self) -> str:
        (line,) = self.engine._open_pools._lines.values()
        (member,) = line.idle
        assert member.doubt == ""
        return member.name


@pytest.fixture
async def one(place: Ground) -> AsyncIterator[One]:
    async with place.engine(containers=1) as engine:
        yield One(engine)


@pytest.mark.parametrize("how", DIRTY)
async def test_a_function_call_leaves_nothing(one: One, how: str) -> None:
    before = await one.look()
    container = one.container
    assert before["files"] == ["/call/work"]
    assert before["processes"] == []
    result = await one.function(DIRTY[how], "dirty", memory_mb=256, processes=32)
    assert result.status is (CallStatus.RUNTIME_ERROR if how == "its death" else CallStatus.OK), result
    after = await one.look()
    assert after == before
    assert one.container == container


SCRIPTS = {
    "files": "for p in . /tmp /var/tmp /dev/shm; do mkdir -p $p/a/b; echo x > $p/a/b/c; chmod 0 $p/a; done",
    "daemons": "for i in 1 2 3; do (setsid sleep 600 &) ; done; nohup sleep 600 > /dev/null 2>&1 &",
    "a bomb behind": "bomb() { bomb | bomb & }; bomb 2> /dev/null & exit 0",
    "a terminal": "script -qc 'sleep 600 &' /dev/null > /dev/null; exit 0",
}


@pytest.mark.parametrize("how", SCRIPTS)
async def test_a_script_leaves_nothing(place: Ground, how: str) -> None:
    look = "import json\n" + LOOK + "found = look(); del found['modules'], found['path']; print(json.dumps(found))"
    async with place.engine(containers=1) as engine:
        found = []
        for language, code in (("python", look), ("bash", SCRIPTS[how]), ("python", look)):
            result = await engine.call(FnCallSpec(language=language, code=code, processes=32), project="p")
            assert result.status is CallStatus.OK, result
            found.append(result)
        (line,) = engine._open_pools._lines.values()
        assert [member.calls for member in line.idle] == [3]
    assert found[0].run is not None
    assert found[2].run is not None
    assert json.loads(found[2].run.stdout) == json.loads(found[0].run.stdout)
    assert json.loads(found[0].run.stdout)["processes"] == []


async def test_what_would_outlive_a_process_cannot_be_made(one: One) -> None:
    """System V segments, semaphores and queues, POSIX queues, keys; mounts and namespaces; the root."""
    code = """
import ctypes, errno, os

libc = ctypes.CDLL(None, use_errno=True)

def refused():
    found = {}
    def note(name, result):
        found[name] = errno.errorcode.get(ctypes.get_errno(), "?") if result == -1 else "done"
    note("shmget", libc.shmget(0, 4096, 0o1600))
    note("semget", libc.semget(0, 1, 0o1600))
    note("msgget", libc.msgget(0, 0o1600))
    note("mq_open", libc.mq_open(b"/leak", os.O_CREAT | os.O_RDWR, 0o600, None))
    note("add_key", libc.syscall(248, b"user", b"leak", b"x", 1, -5))
    note("unshare", libc.unshare(0x10000000))
    note("mount", libc.mount(b"none", b"/tmp", b"tmpfs", 0, None))
    note("setuid", libc.setuid(0))
    for place in ("/", "/etc", "/usr/bin", "/run", "/proc/sys/kernel", "/sys", "/dev", "/home", "/call"):
        try:
            os.close(os.open(place + "/made", os.O_CREAT | os.O_WRONLY))
            found[place] = "done"
        except OSError as error:
            found[place] = errno.errorcode[error.errno]
    return found
"""
    found = json.loads((await one.function(code, "refused")).value or "")
    assert "done" not in found.values(), found
    assert (found["shmget"], found["semget"], found["msgget"]) == ("ENOSPC", "EINVAL", "ENOSPC")
    assert found["mq_open"] in ("ENOSPC", "ENOSYS")
    assert {found[path] for path in ("/", "/etc", "/usr/bin", "/run", "/home")} == {"EROFS"}


async def test_no_place_can_be_written_but_those_that_are_emptied(one: One) -> None:
    """The whole tree is walked, so an image's own world-writable directory counts too."""
    code = """
import os

def writable():
    found = []
    for directory, names, _ in os.walk("/"):
        names[:] = [name for name in names if os.path.join(directory, name) != "/proc"]
        if os.access(directory, os.W_OK):
            found.append(directory)
    return sorted(found)
"""
    found = await one.function(code, "writable")
    assert json.loads(found.value or "") == ["/call/work", "/dev/shm", "/tmp", "/var/tmp"]


async def test_random_numbers_differ(place: Ground) -> None:
    """Every call is forked from one process, whose generators have one state."""
    code = "import os, random, uuid\ndef draw():\n    return [random.random(), os.urandom(8).hex(), str(uuid.uuid4())]"
    async with place.engine(containers=1) as engine:
        spec = FnCallSpec(task_type=TaskType.FUNCTION, code=code, function="draw", imports=("random",))
        drawn = [json.loads((await engine.call(spec, project="p")).value or "") for _ in range(5)]
    for column in range(3):
        assert len({row[column] for row in drawn}) == 5


async def test_memory_of_earlier_calls_cannot_be_found(one: One) -> None:
    """A forked process has its parent's memory: the parent must never have seen what calls are about."""
    secret = "correct-horse-battery-staple"
    told = await one.function(f"def f(a):\n    return len({secret!r} + a)", "f", arguments=f'[["{secret}"], {{}}]')
    assert told.status is CallStatus.OK
    code = """
import ctypes

def search(word):
    # how often the word is in this memory, and how often between dashes, as it is nowhere in this code
    word, seen, dashed = word.encode(), 0, 0
    for line in open("/proc/self/maps").read().splitlines():
        begin, end = (int(part, 16) for part in line.split()[0].split("-"))
        if not line.split()[1].startswith("rw"):
            continue
        text = ctypes.string_at(begin, end - begin)
        at = text.find(word)
        while at >= 0:
            seen += 1
            dashed += text[at - 1 : at] == b"-" and text[at + len(word) : at + len(word) + 1] == b"-"
            at = text.find(word, at + 1)
    return [seen, dashed]
"""
    seen, dashed = json.loads((await one.function(code, "search", arguments='[["horse"], {}]')).value or "")
    assert seen > 0
    assert dashed == 0
