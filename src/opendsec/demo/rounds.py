"""The road of one sandbox, and of all of them at once: upload, test, break every second one, test again, stop.

Nothing here is told which sandboxes should fail; `verdict` compares what came back with what must have come back.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import anyio

from opendsec import DSecClient, DSecContainerRunArgs, Failed, Sandbox
from opendsec.demo import project
from opendsec.errors import OpenDSecError

LABEL = "opendsec-demo"
WORKDIR = "/workspace"
TEST_TIMEOUT_S = 120.0
PARALLEL_STOPS = 32
STEPS = 5
"""Steps each sandbox reports: ready, uploaded, tested, tested again, stopped."""

OnStep = Callable[[int], None]

_RAN = re.compile(r"^Ran (\d+) tests? in", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteRun:
    """One run of the project's tests."""

    exit_code: int | None
    end_reason: str
    tests: int
    seconds: float
    tail: str
    """The last lines of what it said."""

    @property
    def passed(self) -> bool:
        """All tests ran and passed."""
        return self.exit_code == 0 and self.tests > 0

    @property
    def failed(self) -> bool:
        """The tests ran and some failed; anything else (not started, timed out, lost) is neither passed nor failed."""
        return self.exit_code == 1 and self.tests > 0


@dataclass(slots=True, kw_only=True)
class Attempt:
    """What one sandbox did."""

    index: int
    sandbox_id: str
    patched: bool
    create_s: float
    upload_s: float = 0.0
    before: SuiteRun | None = None
    after: SuiteRun | None = None
    error: str = ""

    @property
    def as_expected(self) -> bool:
        """Passed before; failed after exactly when it was patched."""
        if self.error or self.before is None or self.after is None or not self.before.passed:
            return False
        return self.after.failed if self.patched else self.after.passed


@dataclass(slots=True, kw_only=True)
class Report:
    """What all of them did."""

    attempts: list[Attempt] = field(default_factory=list)
    not_started: list[str] = field(default_factory=list)
    stop_s: list[float] = field(default_factory=list)
    left_over: list[str] = field(default_factory=list)
    wall_s: float = 0.0


def verdict(report: Report, count: int) -> list[str]:
    """Everything that is not as it must be, one sentence each; empty when all is well."""
    wrong = [f"a sandbox did not start: {text}" for text in report.not_started]
    if len(report.attempts) + len(report.not_started) != count:
        wrong.append(f"{len(report.attempts)} sandboxes answered, not {count}")
    wrong += [_complaint(attempt) for attempt in report.attempts if not attempt.as_expected]
    wrong += [f"sandbox {name} is still there" for name in report.left_over]
    return wrong


def _complaint(attempt: Attempt) -> str:
    if attempt.error:
        return f"sandbox {attempt.sandbox_id}: {attempt.error}"
    kind = "patched" if attempt.patched else "unpatched"
    runs = " then ".join(
        "no run" if run is None else f"exit {run.exit_code} ({run.end_reason}, {run.tests} tests)"
        for run in (attempt.before, attempt.after)
    )
    return f"sandbox {attempt.sandbox_id} ({kind}): {runs}"


async def run(client: DSecClient, *, image: str, count: int, source: Path, on_step: OnStep) -> Report:
    """All sandboxes at once. `source`: the project's unpacked tree. All of them are stopped, whatever happens."""
    report = Report()
    started: list[Sandbox] = []
    begin = time.perf_counter()
    args = DSecContainerRunArgs(container_image=image, labels={LABEL: "1"}, ttl_running_stop=120.0)
    try:
        async with anyio.create_task_group() as group:
            async for outcome in client.run_many(args, count):
                if isinstance(outcome, Failed):
                    report.not_started.append(str(outcome.error))
                    continue
                started.append(outcome.sandbox)
                attempt = Attempt(
                    index=outcome.index,
                    sandbox_id=outcome.sandbox.id,
                    patched=outcome.index % 2 == 1,
                    create_s=time.perf_counter() - begin,
                )
                report.attempts.append(attempt)
                on_step(1)
                group.start_soon(_attempt, outcome.sandbox, attempt, source, on_step)
    finally:
        with anyio.move_on_after(60, shield=True):
            await _stop(started, report, on_step)
    names = {sandbox.id for sandbox in started}
    left = [status async for status in client.list(labels={LABEL: "1"}, state="running")]
    report.left_over = [status.sandbox_id for status in left if status.sandbox_id in names]
    report.wall_s = time.perf_counter() - begin
    return report


async def _attempt(sandbox: Sandbox, attempt: Attempt, source: Path, on_step: OnStep) -> None:
    try:
        begin = time.perf_counter()
        await sandbox.files.upload(str(source), WORKDIR)
        attempt.upload_s = time.perf_counter() - begin
        on_step(1)
        attempt.before = await _test(sandbox)
        on_step(1)
        if attempt.patched:
            await sandbox.run_shell(project.PATCH_COMMAND, cwd=WORKDIR, stdin=project.BREAKING_PATCH, check=True)
        attempt.after = await _test(sandbox)
        on_step(1)
    except OpenDSecError as error:
        attempt.error = f"{type(error).__name__}: {error}"


async def _test(sandbox: Sandbox) -> SuiteRun:
    begin = time.perf_counter()
    result = await sandbox.run_shell(project.TEST_COMMAND, cwd=WORKDIR, timeout=TEST_TIMEOUT_S)
    found = _RAN.search(result.stderr)
    return SuiteRun(
        exit_code=result.exit_code,
        end_reason=str(result.end_reason),
        tests=int(found.group(1)) if found else 0,
        seconds=time.perf_counter() - begin,
        tail=result.stderr[-2000:],
    )


async def _stop(sandboxes: Sequence[Sandbox], report: Report, on_step: OnStep) -> None:
    limit = anyio.CapacityLimiter(PARALLEL_STOPS)

    async def one(sandbox: Sandbox) -> None:
        async with limit:
            begin = time.perf_counter()
            await sandbox.stop()
            report.stop_s.append(time.perf_counter() - begin)
            on_step(1)

    async with anyio.create_task_group() as group:
        for sandbox in sandboxes:
            group.start_soon(one, sandbox)
