"""The engine over real containers: what each kind of call answers, what is refused and how, and what is left when
something ends in the middle."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tests.node.fncall.places import CGROUP, Ground, ground

from opendsec.errors import CapacityError, InvalidSpecError, NodeError, NotFoundError, UnsupportedError
from opendsec.fncall import running
from opendsec.fncall.box import Box
from opendsec.fncall.engine import Engine
from opendsec.linux.cgroup import choose_driver, find_mounts
from opendsec.model.fncall import CallStatus, Case, FnCallSpec, GpuRequest, TaskType, Verdict
from opendsec.store.images import ImageStore

pytestmark = [
    pytest.mark.anyio,
    *(getattr(pytest.mark, name) for name in ("root", "userns", "netns", "cgroup", "memcg", "overlay", "native")),
    pytest.mark.erofs,
    pytest.mark.image,
]

ADD = "def add(a, b=1):\n    print('adding')\n    return {'sum': a + b}\n"
HELLO_C = '#include <stdio.h>\nint main(void) { puts("hello"); return 0; }\n'


def function(code: str = ADD, name: str = "add", arguments: str = "[[1], {}]", **more: Any) -> FnCallSpec:
    return FnCallSpec(task_type=TaskType.FUNCTION, code=code, function=name, arguments=arguments, **more)


@pytest.fixture
async def engine(place: Ground) -> AsyncIterator[Engine]:
    async with place.engine() as engine:
        yield engine


def groups(root: str = CGROUP) -> set[str]:
    """Control groups of containers for calls that are there now."""
    driver = choose_driver(find_mounts(), root=root)
    driver.open()
    try:
        return {name for name, _ in driver.names() if name.startswith("fnc-")}
    finally:
        driver.close()


def only_member(engine: Engine) -> Any:
    (line,) = engine._open_pools._lines.values()
    (member,) = line.idle
    return member


# ── answers ─────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_function(engine: Engine) -> None:
    result = await engine.call(function(arguments='[[1], {"b": 2.5}]'), project="p")
    assert result.status is CallStatus.OK
    assert json.loads(result.value or "") == {"sum": 3.5}
    run = result.run
    assert run is not None
    assert (run.stdout, run.stderr, run.exit_code, run.signal) == (b"adding\n", b"", 0, 0)
    assert 0 < run.cpu_s < 5
    assert 0 < run.wall_s < 30
    assert run.memory_bytes is not None


@pytest.mark.parametrize(
    ("code", "status", "words"),
    [
        ("def f():\n    raise KeyError('which')", CallStatus.RUNTIME_ERROR, b'File "code.py", line 2, in f'),
        ("def f(:", CallStatus.RUNTIME_ERROR, b"SyntaxError"),
        ("def g(): pass", CallStatus.RUNTIME_ERROR, b"KeyError: 'f'"),
        ("def f():\n    return object()", CallStatus.RUNTIME_ERROR, b"not JSON serializable"),
        ("def f():\n    return float('nan')", CallStatus.RUNTIME_ERROR, b"not JSON compliant"),
        ("def f():\n    raise SystemExit(0)", CallStatus.RUNTIME_ERROR, b"SystemExit"),
        ("import os\ndef f():\n    os._exit(0)", CallStatus.RUNTIME_ERROR, b""),
        ("def f():\n    import os\n    os.abort()", CallStatus.RUNTIME_ERROR, b""),
        ("def f():\n    while True: pass", CallStatus.TIME_LIMIT, b""),
        ("import time\ndef f():\n    time.sleep(60)", CallStatus.TIME_LIMIT, b""),
        ("def f():\n    return [bytearray(b'x' * 2**20) for _ in range(1000)]", CallStatus.MEMORY_LIMIT, b""),
        ("def f():\n    while True: print('x' * 1000)", CallStatus.OUTPUT_LIMIT, b""),
        ("def f():\n    return 'x' * 100_000", CallStatus.OUTPUT_LIMIT, b""),
        ("async def f():\n    return 1", CallStatus.OK, b""),
    ],
)
async def test_how_functions_end(engine: Engine, code: str, status: CallStatus, words: bytes) -> None:
    spec = function(code, "f", "[[], {}]", cpu_time_s=0.5, wall_time_s=1.5, memory_mb=64, output_kb=64)
    result = await engine.call(spec, project="p")
    assert result.status is status, result
    assert result.run is not None
    assert words in result.run.stderr
    assert (result.value is None) == (status is not CallStatus.OK)
    assert (await engine.call(function(), project="p")).status is CallStatus.OK


async def test_a_child_that_returns_too_adds_nothing_to_the_value(engine: Engine) -> None:
    forks = "import os\ndef f():\n    pid = os.fork()\n    if pid:\n        os.waitpid(pid, 0)\n    return 12\n"
    result = await engine.call(function(forks, "f", "[[], {}]"), project="p")
    assert (result.status, result.value) == (CallStatus.OK, "12")


async def test_code_is_compiled_as_it_stands(engine: Engine) -> None:
    """The fork server's own `from __future__` would make text of annotations."""
    code = "def g(a: int): pass\ndef f():\n    return g.__annotations__['a'] is int\n"
    assert (await engine.call(function(code, "f", "[[], {}]"), project="p")).value == "true"


async def test_a_large_output_and_a_large_argument_pass_whole(engine: Engine) -> None:
    code = "def f(text):\n    print(text[::-1])\n    return text"
    text = "ab" * 400_000
    spec = function(code, "f", json.dumps([[text], {}]), output_kb=2048)
    result = await engine.call(spec, project="p")
    assert json.loads(result.value or "") == text
    assert result.run is not None
    assert result.run.stdout.decode() == text[::-1] + "\n"


async def test_files_go_in_and_come_out(engine: Engine) -> None:
    code = """
import os, sys
os.makedirs("out")
open("out/a", "wb").write(open("in/data", "rb").read() * 2)
print(sys.argv[1:])
"""
    spec = FnCallSpec(
        code=code,
        files={"in/data": b"\x00\xff", "in/more": b""},
        args=("one", "two words"),
        fetch=("out/a", "out/none", "in", "link"),
        env={"NAME": "value"},
    )
    result = await engine.call(spec, project="p")
    assert result.files == {"out/a": b"\x00\xff\x00\xff"}
    assert result.run is not None
    assert result.run.stdout == b"['one', 'two words']\n"


async def test_what_is_long_is_read_and_written_in_a_thread(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []
    for name in ("read", "prepare"):
        real = getattr(Box, name)

        def noted(self: Box, *args: Any, real: Any = real, **fields: Any) -> Any:
            threads.append((real.__name__, threading.current_thread() is threading.main_thread()))
            return real(self, *args, **fields)

        monkeypatch.setattr(Box, name, noted)
    spec = FnCallSpec(code="open('y', 'w').write('z')", files={"x": bytes(100_000)}, fetch=("x", "y"))
    result = await engine.call(spec, project="p")
    assert result.files == {"x": bytes(100_000), "y": b"z"}
    assert set(threads) == {("read", False), ("prepare", False)}


async def test_a_fetched_link_leads_nowhere(engine: Engine) -> None:
    code = "import os\nos.symlink('/etc/passwd', 'a')\nos.symlink('/etc', 'd')\nos.mkfifo('f')"
    result = await engine.call(FnCallSpec(code=code, fetch=("a", "d/passwd", "f", "main.py")), project="p")
    assert result.status is CallStatus.OK
    assert result.files == {"main.py": code.encode()}


async def test_compile_once_run_often(engine: Engine) -> None:
    compile_call = FnCallSpec(task_type=TaskType.COMPILE, language="c", code=HELLO_C)
    first = await engine.call(compile_call, project="p")
    assert first.artifact.startswith("art-test-")
    assert first.compile is not None
    again = await engine.call(compile_call, project="p")
    assert (again.artifact, again.compile) == (first.artifact, None)
    ran = await engine.call(FnCallSpec(language="c", artifact=first.artifact), project="p")
    assert ran.run is not None
    assert (ran.run.stdout, ran.compile) == (b"hello\n", None)
    judged = FnCallSpec(task_type=TaskType.JUDGE, artifact=first.artifact, cases=(Case(expected=b"hello"), Case()))
    assert [case.verdict for case in (await engine.call(judged, project="p")).cases] == [Verdict.AC, Verdict.WA]
    with pytest.raises(NotFoundError) as caught:
        await engine.call(FnCallSpec(language="c", artifact=first.artifact), project="another")
    assert caught.value.detail["field"] == "artifact"


async def test_artifacts_outlive_the_engine(place: Ground) -> None:
    spec = FnCallSpec(task_type=TaskType.COMPILE, language="c", code=HELLO_C + "// kept\n")
    async with place.engine() as engine:
        artifact = (await engine.call(spec, project="p")).artifact
    async with place.engine() as engine:
        result = await engine.call(FnCallSpec(artifact=artifact), project="p")
        assert result.run is not None
        assert result.run.stdout == b"hello\n"


async def test_a_fault_in_the_code_is_told(engine: Engine) -> None:
    result = await engine.call(FnCallSpec(language="c", code="int main(void) { return x; }"), project="p")
    assert result.status is CallStatus.COMPILE_ERROR
    assert result.compile is not None
    assert b"main.c" in result.compile.stderr
    assert result.run is None


async def test_a_long_stdin_that_nobody_reads(engine: Engine) -> None:
    big = bytes(3_000_000)
    unread = await engine.call(FnCallSpec(code="print(1)", stdin=big), project="p")
    assert unread.status is CallStatus.OK
    counted = await engine.call(
        FnCallSpec(code="import sys\nprint(len(sys.stdin.buffer.read()))", stdin=big), project="p"
    )
    assert counted.run is not None
    assert counted.run.stdout == b"3000000\n"


# ── refusals ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("spec", "error", "field"),
    [
        (FnCallSpec(language="cobol", code="x"), UnsupportedError, "language"),
        (FnCallSpec(language="java", code="class Main {}"), UnsupportedError, "language"),
        (FnCallSpec(task_type=TaskType.COMPILE, language="bash", code="true"), UnsupportedError, "task_type"),
        (FnCallSpec(code="x", gpu=GpuRequest()), UnsupportedError, "gpu"),
        (FnCallSpec(code="x", files={"main.py": b""}), InvalidSpecError, "files"),
        (function(imports=("no_such_module",)), InvalidSpecError, "imports"),
        (FnCallSpec(artifact="art-test-" + "a" * 32), NotFoundError, "artifact"),
        (FnCallSpec(artifact="art-other-" + "a" * 32), NotFoundError, "artifact"),
        (FnCallSpec(code="open('big', 'wb').write(bytes(8 << 20))", fetch=("big",)), InvalidSpecError, "fetch"),
    ],
)
async def test_refused_by_name(engine: Engine, spec: FnCallSpec, error: type[Exception], field: str) -> None:
    with pytest.raises(error) as caught:
        await engine.call(spec, project="p")
    assert caught.value.detail["field"] == field  # type: ignore[attr-defined]
    assert (await engine.call(FnCallSpec(code="print(1)"), project="p")).status is CallStatus.OK


async def test_a_full_queue_is_told(place: Ground) -> None:
    endless, quick = FnCallSpec(code="import time; time.sleep(600)", wall_time_s=600), FnCallSpec(code="print(1)")
    async with place.engine(containers=1, queue=1) as engine:
        first = asyncio.ensure_future(engine.call(endless, project="p"))
        await _until(lambda: engine._open_pools.busy == 1)
        second = asyncio.ensure_future(engine.call(quick, project="p"))
        await _until(lambda: engine._open_pools.waiting == 1)
        with pytest.raises(CapacityError):
            await engine.call(quick, project="p")
        first.cancel()
        assert (await second).status is CallStatus.OK
        with pytest.raises(asyncio.CancelledError):
            await first


@pytest.mark.parametrize("value", ["[5]", "NaN", "[1, -Infinity]", '{"a": Infinity}'])
async def test_a_value_that_is_not_json_is_none(engine: Engine, value: str) -> None:
    """The code can write into its own answer; Python would read these, and a client in another language could not."""
    code = (
        "import os\ndef f():\n    for fd in range(3, 64):\n        try:\n"
        "            name = os.readlink(f'/proc/self/fd/{fd}')\n        except OSError:\n            continue\n"
        "        if 'memfd:task' in name:\n"
        f"            os.pwrite(fd, {value.encode()!r}, 0)\n            os._exit(0)\n"
    )
    result = await engine.call(function(code, "f", "[[], {}]"), project="p")
    believed = (CallStatus.OK, value) if value == "[5]" else (CallStatus.RUNTIME_ERROR, None)
    assert (result.status, result.value) == believed


async def test_streams_the_code_has_replaced(engine: Engine) -> None:
    code = "import sys\ndef f(what):\n    sys.stdout = what\n    return 7\n"
    nothing = await engine.call(function(code, "f", "[[null], {}]"), project="p")
    assert (nothing.status, nothing.value) == (CallStatus.OK, "7")
    other = await engine.call(function(code, "f", "[[5], {}]"), project="p")
    assert other.status is CallStatus.RUNTIME_ERROR
    assert other.run is not None
    assert b"AttributeError: 'int' object has no attribute 'flush'" in other.run.stderr


# ── lives of containers ─────────────────────────────────────────────────────────────────────────────────────────────


async def test_projects_never_share_a_container(place: Ground) -> None:
    code = "import os\ndef f():\n    return os.stat('/call').st_dev"
    async with place.engine(containers=2) as engine:
        for project in ("one", "two", "one", "two"):
            assert (await engine.call(function(code, "f", ""), project=project)).status is CallStatus.OK
        members = {group.project: line.idle[0].name for group, line in engine._open_pools._lines.items()}
        assert len(set(members.values())) == 2
        assert (await engine.call(function(code, "f", ""), project="three")).status is CallStatus.OK
        assert engine._open_pools.live <= 2


async def test_a_container_is_replaced_after_its_calls(place: Ground) -> None:
    async with place.engine(containers=1, calls_per_container=3) as engine:
        for _ in range(7):
            assert (await engine.call(function(), project="p")).status is CallStatus.OK
        assert only_member(engine).calls == 1


async def test_idle_containers_end(place: Ground) -> None:
    async with place.engine(idle_s=0.2) as engine:
        await engine.call(FnCallSpec(code="print(1)"), project="p")
        await _until(lambda: engine._open_pools.live == 0)
        assert groups() == set()
        assert (await engine.call(FnCallSpec(code="print(1)"), project="p")).status is CallStatus.OK


async def test_a_container_lost_under_a_call_is_no_verdict(place: Ground) -> None:
    """Killed from outside in the middle: the call is carried out again, in another one."""
    async with place.engine(containers=1) as engine:
        await engine.call(function(), project="p")
        member = only_member(engine)
        calling = asyncio.ensure_future(
            engine.call(function("import time\ndef f():\n    time.sleep(1)\n    return 5", "f", ""), project="p")
        )
        await _until(lambda: engine._open_pools.busy == 1)
        os.kill(int(member.handle.data["pid"]), signal.SIGKILL)
        result = await calling
        assert result.value == "5"
        assert only_member(engine).name != member.name


@pytest.mark.parametrize("what", ["memfd_create", "fchown"])
async def test_a_host_short_of_something_gives_no_verdict(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    def none_left(*_: object) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patched:
        patched.setattr(os, what, none_left)
        with pytest.raises(NodeError) as caught:
            await engine.call(function(), project="p")
        assert caught.value.retryable
    assert (await engine.call(function(), project="p")).status is CallStatus.OK


async def test_a_process_that_fails_before_the_code_runs_gives_no_verdict(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(running, "_task", lambda _: b'{"env": {}')
        with pytest.raises(NodeError, match=r"before the call began: .*Error") as caught:
            await engine.call(function(), project="p")
        assert caught.value.retryable
    told = await engine.call(function("import os\ndef f():\n    os._exit(122)", "f", ""), project="p")
    assert told.run is not None
    assert (told.status, told.run.exit_code) == (CallStatus.RUNTIME_ERROR, 122)


@pytest.mark.parametrize(("number", "error"), [(errno.ENOSPC, InvalidSpecError), (errno.EMFILE, NodeError)])
async def test_files_that_cannot_be_put_there_are_the_callers_fault_only_when_they_do_not_fit(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, number: int, error: type[Exception]
) -> None:
    def fails(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patched:
        patched.setattr(os, "fchown", fails)
        with pytest.raises(error):
            await engine.call(FnCallSpec(code="print(1)"), project="p")
    assert (await engine.call(FnCallSpec(code="print(1)"), project="p")).status is CallStatus.OK


async def test_a_program_too_large_to_keep_is_refused_and_not_cut(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("opendsec.fncall.engine.MAX_ARTIFACT_BYTES", 1000)
    with pytest.raises(InvalidSpecError) as caught:
        await engine.call(FnCallSpec(language="c", code=HELLO_C), project="too-large")
    assert caught.value.detail["field"] == "code"


async def test_a_cancelled_call_ends_what_runs(place: Ground) -> None:
    async with place.engine(containers=1) as engine:
        for spec in (
            FnCallSpec(code="import time; time.sleep(60)"),
            function("def f():\n    while True: pass", "f", ""),
        ):
            calling = asyncio.ensure_future(engine.call(spec, project="p"))
            await _until(lambda: engine._open_pools.busy == 1)
            await asyncio.sleep(0.05)
            calling.cancel()
            with pytest.raises(asyncio.CancelledError):
                await calling
            await _until(lambda: engine._open_pools.live == 0)
            assert groups() == set()


async def test_closing_leaves_nothing(place: Ground) -> None:
    async with place.engine() as engine:
        await engine.call(FnCallSpec(code="print(1)"), project="p")
        assert groups()
    assert groups() == set()
    assert list((place.state / "fncall" / "containers").iterdir()) == []


_KILLED = """
import asyncio, os, sys
from pathlib import Path
sys.path[:0] = {path!r}
from tests.node.fncall import places
from opendsec.store.images import ImageStore
from opendsec.model.fncall import FnCallSpec

async def main():
    store = ImageStore(Path({store!r}))
    state, run = Path({state!r}), Path({run!r})
    layers = places.LayerMounts(places.DirectLoader(store, state / "metadata"), run / "layers")
    containers = places.ContainerBackend(layers=layers, state_dir=state, run_dir=run / "edge", cgroup_root={cgroup!r})
    await containers.open()
    async with places.Ground(store, containers, state, run, {cgroup!r}).engine() as engine:
        await engine.call(FnCallSpec(code="print(1)"), project="p")
        print("ready", flush=True)
        await engine.call(FnCallSpec(code="import time; time.sleep(600)", wall_time_s=600), project="p")

asyncio.run(main())
"""


async def test_what_a_killed_engine_left_is_removed(store: ImageStore) -> None:
    """An edge that dies by kill -9 leaves a container with a program in it; the next engine ends it before its first
    call."""
    cgroup = f"{CGROUP}-killed"
    async with ground(store, [store.get("debian")], cgroup=cgroup) as place:
        text = _KILLED.format(
            path=[str(Path(__file__).parents[3]), str(Path(__file__).parents[3] / "src")],
            cgroup=cgroup,
            store=str(store.layout.root),
            state=str(place.state),
            run=str(place.run),
        )
        await place.containers.close()
        try:
            with subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE) as edge:
                assert edge.stdout is not None
                assert await asyncio.to_thread(edge.stdout.readline) == b"ready\n"
                await asyncio.sleep(0.2)
                edge.kill()
        finally:
            await place.begin_again()
        assert len(groups(cgroup)) == 1
        async with place.engine() as engine:
            assert engine.removed == 1
            assert groups(cgroup) == set()
            assert (await engine.call(FnCallSpec(code="print(1)"), project="p")).status is CallStatus.OK


async def _until(condition: Any, within_s: float = 60.0) -> None:
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.005)
