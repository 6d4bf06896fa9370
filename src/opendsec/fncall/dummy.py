"""An engine of calls from memory, for our tests and for users': no kernel, no root; the same interface and promises.

The only language is `sh`, also called `bash`, which is the small one of `backends.dummy_shell`; "compiling" reads its
words, and a script that has an unclosed quote is a compile error. Results are real (exit codes, output, limits,
verdicts); time on a processor is not measured, so only `wall_time_s` ends a call early. `capacity` calls run at once,
`queue` more wait.

Refuses by name: function calls, GPUs, other languages.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from opendsec.backends.dummy_files import FileTree
from opendsec.backends.dummy_shell import Ended, ForkDeniedError, Killed, ProcessIo, ShellState, Sleep, run_script
from opendsec.errors import CapacityError, NotFoundError, UnsupportedError
from opendsec.fncall.base import FnCalls
from opendsec.model.fncall import (
    CallStatus,
    Case,
    CaseOutcome,
    FnCallResult,
    FnCallSpec,
    RunOutcome,
    TaskType,
    Verdict,
)
from opendsec.model.fncall_check import CASE_OUTPUT_BYTES, new_artifact_name
from opendsec.model.node import BackendReport

KIB, MIB = 1024, 1024 * 1024
_PIDS = 64
_SIGKILL = 9
_HOME = "/call"
_VERDICTS = {
    CallStatus.RUNTIME_ERROR: Verdict.RE,
    CallStatus.TIME_LIMIT: Verdict.TLE,
    CallStatus.MEMORY_LIMIT: Verdict.MLE,
    CallStatus.OUTPUT_LIMIT: Verdict.OLE,
}


class DummyFnCalls(FnCalls):
    """Calls that exist only in this object."""

    def __init__(self, edge: str, *, capacity: int = 8, queue: int = 100_000) -> None:
        self._edge = edge
        self._slots = asyncio.Semaphore(capacity)
        self._most = capacity + queue
        self._live = 0
        self._artifacts: dict[tuple[str, str], str] = {}
        self.begun = 0
        """Calls that were begun so far."""

    async def open(self) -> None:
        """Nothing to prepare."""

    async def close(self) -> None:
        """Nothing to remove."""

    def report(self) -> BackendReport:
        kinds = (TaskType.SCRIPT, TaskType.COMPILE, TaskType.JUDGE)
        return BackendReport(available=True, capabilities=tuple(kind.value for kind in kinds), live=self._live)

    async def call(self, spec: FnCallSpec, *, project: str) -> FnCallResult:
        _check(spec)
        if self._live >= self._most:
            raise CapacityError(f"edge {self._edge} has {self._live} calls under way")
        self._live += 1
        asked = time.monotonic()
        try:
            async with self._slots:
                self.begun += 1
                return await self._carry_out(spec, project, time.monotonic() - asked)
        finally:
            self._live -= 1

    async def _carry_out(self, spec: FnCallSpec, project: str, queued_s: float) -> FnCallResult:
        code = self._code_of(spec, project)
        wrong = _wrong(code)
        if wrong is not None:
            failed = RunOutcome(status=CallStatus.COMPILE_ERROR, exit_code=2, stderr=wrong)
            cases = tuple(CaseOutcome(name=case.name, verdict=Verdict.CE, run=None) for case in spec.cases)
            return FnCallResult(status=CallStatus.COMPILE_ERROR, compile=failed, cases=cases, queued_s=queued_s)
        if spec.task_type is TaskType.COMPILE:
            name = new_artifact_name(self._edge)
            self._artifacts[project, name] = code
            return FnCallResult(status=CallStatus.OK, artifact=name, compile=RunOutcome(status=CallStatus.OK))
        if spec.task_type is TaskType.JUDGE:
            outcomes = [await _judged(spec, code, case) for case in spec.cases]
            return FnCallResult(status=CallStatus.OK, cases=tuple(outcomes), queued_s=queued_s)
        run, files = await _run(spec, code, spec.stdin)
        found = dict(_fetched(files, spec.fetch))
        return FnCallResult(status=run.status, run=run, files=found, queued_s=queued_s)

    def _code_of(self, spec: FnCallSpec, project: str) -> str:
        if not spec.artifact:
            return spec.code
        code = self._artifacts.get((project, spec.artifact))
        if code is None:
            raise NotFoundError(f"no artifact {spec.artifact}", detail={"field": "artifact"})
        return code


def _check(spec: FnCallSpec) -> None:
    if spec.gpu is not None:
        raise UnsupportedError("gpu: the dummy engine has none", detail={"field": "gpu"})
    if spec.task_type is TaskType.FUNCTION:
        raise UnsupportedError("task_type: the dummy engine calls no functions", detail={"field": "task_type"})
    if spec.language not in ("sh", "bash"):
        raise UnsupportedError(
            f"language: the dummy engine has no {spec.language}", detail={"field": "language"}, remedy="it has sh"
        )


def _wrong(code: str) -> bytes | None:
    return b"unclosed quote\n" if code.count('"') % 2 or code.count("'") % 2 else None


@dataclass(slots=True)
class _Streams:
    """Input and output of one run."""

    stdin: bytes
    limit: int
    written: dict[int, bytearray] = field(default_factory=lambda: {1: bytearray(), 2: bytearray()})
    full: bool = False

    def write(self, stream: int, data: bytes) -> int:
        room = self.limit - len(self.written[stream])
        self.full = self.full or len(data) > room
        self.written[stream] += data[:room]
        return min(room, len(data))

    def read(self) -> bytes | None:
        data, self.stdin = self.stdin, b""
        return data or None


async def _run(spec: FnCallSpec, code: str, stdin: bytes) -> tuple[RunOutcome, FileTree]:
    streams = _Streams(stdin, spec.output_kb * KIB)
    files = _files_of(spec)
    state = ShellState(cwd=_HOME, env=dict(spec.env))
    io = ProcessIo(files, state, streams.write, streams.read, _Memory(spec.memory_mb * MIB).allocate, _forked)
    started = time.monotonic()
    status, exit_code, signal = CallStatus.OK, None, 0
    try:
        async with asyncio.timeout(spec.wall_time_s):
            exit_code = await _to_the_end(io, code, streams)
        status = CallStatus.OK if exit_code == 0 else CallStatus.RUNTIME_ERROR
        if streams.full:
            status, exit_code, signal = CallStatus.OUTPUT_LIMIT, None, _SIGKILL
    except TimeoutError:
        status, signal = CallStatus.TIME_LIMIT, _SIGKILL
    except Killed:
        status, signal = CallStatus.MEMORY_LIMIT, _SIGKILL
    return (
        RunOutcome(
            status=status,
            exit_code=exit_code,
            signal=signal,
            stdout=bytes(streams.written[1]),
            stderr=bytes(streams.written[2]),
            truncated=streams.full,
            wall_s=time.monotonic() - started,
        ),
        files,
    )


async def _to_the_end(io: ProcessIo, code: str, streams: _Streams) -> int:
    program = run_script(io, code)
    while True:
        try:
            wait = next(program)
        except StopIteration as stop:
            return int(stop.value or 0)
        except Ended as ended:
            return ended.code
        if streams.full:
            program.close()
            return 0
        await asyncio.sleep(wait.seconds if isinstance(wait, Sleep) else 0)


class _Memory:
    """`allocate MIB` within a limit."""

    def __init__(self, limit: int) -> None:
        self._left = limit

    def allocate(self, size: int) -> None:
        self._left -= size
        if self._left < 0:
            raise Killed


def _forked(count: int) -> None:
    if count > _PIDS:
        raise ForkDeniedError


def _files_of(spec: FnCallSpec) -> FileTree:
    files = FileTree(None)
    files.mkdir(_HOME, mode=0o755, parents=True)
    for name, content in spec.files.items():
        files.write(f"{_HOME}/{name}", content, mode=None, parents=True)
    return files


def _fetched(files: FileTree, wanted: Iterable[str]) -> Iterable[tuple[str, bytes]]:
    for name in wanted:
        try:
            yield name, bytes(files.node(f"{_HOME}/{name}").data)
        except OSError:
            continue


async def _judged(spec: FnCallSpec, code: str, case: Case) -> CaseOutcome:
    run, _ = await _run(spec, code, case.stdin)
    verdict = _VERDICTS.get(run.status)
    if verdict is None:
        verdict = Verdict.AC if run.stdout.split() == case.expected.split() else Verdict.WA
    cut = RunOutcome(
        status=run.status,
        exit_code=run.exit_code,
        signal=run.signal,
        stdout=run.stdout[:CASE_OUTPUT_BYTES],
        stderr=run.stderr[:CASE_OUTPUT_BYTES],
        truncated=run.truncated or max(len(run.stdout), len(run.stderr)) > CASE_OUTPUT_BYTES,
        wall_s=run.wall_s,
    )
    return CaseOutcome(name=case.name, verdict=verdict, run=cut)
