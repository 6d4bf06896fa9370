"""FnCalls: short, stateless calls into warm, locked-down containers. What is asked, and what is answered.

A call's answer is always about the call. Whatever goes wrong on the platform's side is an error of `opendsec.errors`,
never a status: a verdict that is not true of the program is worse than none.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

MAX_CALLS = 32_768
"""In one request."""


class TaskType(StrEnum):
    """What is done with the code."""

    SCRIPT = "script"
    """Run it once, with `stdin`; a compiled language is compiled first."""
    COMPILE = "compile"
    """Only compile; the answer names the artifact, which later calls run without compiling again."""
    JUDGE = "judge"
    """Compile once, run against every case, give a verdict for each."""
    FUNCTION = "function"
    """Call a Python function in a process forked from one that has imported `imports` already."""


class CallStatus(StrEnum):
    """How a call, or one step of it, ended."""

    OK = "ok"
    COMPILE_ERROR = "compile_error"
    RUNTIME_ERROR = "runtime_error"
    """A non-zero exit status, a signal, or an exception that left the function."""
    TIME_LIMIT = "time_limit"
    MEMORY_LIMIT = "memory_limit"
    OUTPUT_LIMIT = "output_limit"


class Verdict(StrEnum):
    """Of one case, in the words of online judges."""

    AC = "AC"
    WA = "WA"
    TLE = "TLE"
    MLE = "MLE"
    OLE = "OLE"
    RE = "RE"
    CE = "CE"


class GpuMode(StrEnum):
    """How a call has a GPU."""

    SHARED = "shared"
    EXCLUSIVE = "exclusive"
    """A whole device or MIG slice for as long as the container lives; for measurements."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuRequest:
    """A GPU for a call."""

    mode: GpuMode = GpuMode.SHARED
    profile: str = ""
    """MIG profile (`1g.10gb`); "": whatever there is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One test case of a judge call. The program never sees `expected`."""

    stdin: bytes = b""
    expected: bytes = b""
    name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FnCallSpec:
    """One call, as asked for."""

    task_type: TaskType = TaskType.SCRIPT
    language: str = "python"
    """python, c, cpp, go, java, node, bash, …: what the image has (docs/reference/fncall.md)."""
    code: str = ""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Relative path → content, beside the code in the call's directory."""
    stdin: bytes = b""
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    cases: tuple[Case, ...] = ()
    """Of a judge call."""
    function: str = ""
    """Of a function call: its name in `code`."""
    arguments: str = ""
    """Of a function call: JSON, `[[positional…], {keyword…}]`; "": none."""
    imports: tuple[str, ...] = ()
    """Of a function call: modules that are imported before the fork."""
    artifact: str = ""
    """Run this result of an earlier compile call instead of compiling."""
    fetch: tuple[str, ...] = ()
    """Paths in the call's directory whose content is answered."""
    image: str = ""
    """"": the node's default image for FnCalls."""
    cpu_time_s: float = 10.0
    """Of each run (of each case)."""
    wall_time_s: float = 20.0
    compile_time_s: float = 30.0
    memory_mb: int = 256
    """MiB, of all processes of a run together; what it writes is memory too."""
    processes: int = 128
    """Processes and threads of a run at once, the first among them; another fork is refused."""
    output_kb: int = 1024
    """KiB of stdout and stderr each."""
    gpu: GpuRequest | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOutcome:
    """One run of one program."""

    status: CallStatus
    exit_code: int | None = None
    """None when a signal ended it, or a limit."""
    signal: int = 0
    stdout: bytes = b""
    stderr: bytes = b""
    truncated: bool = False
    cpu_s: float = 0.0
    wall_s: float = 0.0
    memory_bytes: int | None = None
    """Most that was charged at once; None where this host cannot tell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseOutcome:
    """One case of a judge call."""

    name: str
    verdict: Verdict
    run: RunOutcome | None
    """None when nothing was run (CE)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FnCallResult:
    """How a call went."""

    status: CallStatus
    """Of a judge call: OK when every case could be judged, whatever the verdicts."""
    compile: RunOutcome | None = None
    """None when nothing was compiled for this call."""
    run: RunOutcome | None = None
    cases: tuple[CaseOutcome, ...] = ()
    value: str | None = None
    """Of a function call: what it returned, as JSON."""
    artifact: str = ""
    """Of a compile call."""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """What `fetch` named and was there."""
    queued_s: float = 0.0
    """Before a container was free."""

    @property
    def ok(self) -> bool:
        """It ended well, and every case of a judge call was accepted."""
        return self.status is CallStatus.OK and all(case.verdict is Verdict.AC for case in self.cases)

    @property
    def verdict(self) -> Verdict | None:
        """Of a judge call: AC, or the first other one; None when there were no cases."""
        verdicts = [case.verdict for case in self.cases]
        return next((verdict for verdict in verdicts if verdict is not Verdict.AC), verdicts[0] if verdicts else None)

    @property
    def stdout(self) -> str:
        """Of the run, as UTF-8; bytes that are none become U+FFFD. "" when nothing was run."""
        return "" if self.run is None else self.run.stdout.decode("utf-8", "replace")

    @property
    def stderr(self) -> str:
        """Of what went wrong, the compiler or the run."""
        failed = self.compile if self.run is None else self.run
        return "" if failed is None else failed.stderr.decode("utf-8", "replace")

    @property
    def returned(self) -> object:
        """`value` as Python has it. Raises ValueError when the call returned nothing: look at `status` first."""
        if self.value is None:
            raise ValueError(f"the call returned no value: {self.status.value}")
        return json.loads(self.value)
