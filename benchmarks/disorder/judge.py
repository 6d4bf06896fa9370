"""Whether what the clients were told is true. Pure: diaries and the platform's last listing in, findings out.

A finding is a sentence. There must be none. What was refused with a type of ours is counted, not a finding, unless the
type is one that a fault of the platform's processes must never cause: a sandbox or a command lost, a start that
failed, a batch with holes.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.disorder.diary import Line

GONE = frozenset({"SandboxExitedError", "NotFoundError", "ConflictError"})
"""What operations on a sandbox may get once somebody has asked for its end."""
AWAY = frozenset({"TransportError", "ConnectError"})
"""The platform was away for longer than the SDK waits; honest, counted."""
FULL = frozenset({"UnschedulableError", "CapacityError"})
AWAKE_OR_PAUSED = frozenset({"running", "pausing", "paused", "resuming"})
CUT = AWAY | {"SandboxLostError"}
"""What may end an operation that nobody can repeat for the caller (files, stdin)."""


@dataclass(frozen=True, slots=True)
class Fate:
    """What the platform says about a sandbox at the end."""

    state: str
    end_reason: str | None
    op: str
    """The create it was made for."""
    live: bool


@dataclass(slots=True)
class _Op:
    asked_at: int
    facts: dict[str, Any]
    answers: list[tuple[int, dict[str, Any]]] = field(default_factory=list)


@dataclass(slots=True)
class Verdict:
    """What was seen."""

    findings: list[str] = field(default_factory=list)
    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(what was asked, what came) → how often."""
    slowest_s: dict[str, float] = field(default_factory=dict)
    sandboxes: int = 0
    live_at_end: int = 0
    ran: int = 0
    """Commands that left a line in a ledger and were checked against it."""


class Judge:
    """Takes the diaries one by one."""

    def __init__(self, fates: Mapping[str, Fate], *, killed: frozenset[str]) -> None:
        """`killed`: prefixes of the ids of client processes that were killed, whose last asks have no answer."""
        self.fates = fates
        self.killed = killed
        self.verdict = Verdict(sandboxes=len(fates), live_at_end=sum(fate.live for fate in fates.values()))
        self.acknowledged: dict[str, set[str]] = defaultdict(set)
        """Create → the sandboxes anybody was told of."""
        self.creates: dict[str, _Op] = {}

    def read(self, lines: Iterable[Line]) -> None:
        """One worker's diary."""
        ops: dict[str, _Op] = {}
        for position, line in enumerate(lines):
            if line.event == "ask":
                ops[line.op] = _Op(position, line.facts)
            else:
                ops[line.op].answers.append((position, line.facts))
        stops: dict[str, int] = {}
        for op in ops.values():
            if op.facts["kind"] == "stop":
                sandbox = op.facts["sandbox"]
                stops[sandbox] = min(op.asked_at, stops.get(sandbox, op.asked_at))
        for name, op in ops.items():
            self._one(name, op, stops)
        self._ledgers(ops)

    def finish(self) -> Verdict:
        """What can be said when all diaries are read."""
        told = {sandbox for ids in self.acknowledged.values() for sandbox in ids}
        for sandbox in sorted(told - set(self.fates)):
            self._find(f"sandbox {sandbox} was acknowledged and is not known any more")
        for sandbox, fate in self.fates.items():
            if sandbox not in told and fate.live and not self._may_be_untold(fate.op):
                self._find(f"sandbox {sandbox} lives, and nobody was told of it (create {fate.op or 'unknown'})")
            if not fate.live and fate.end_reason not in {"stopped", "start_failed"}:
                self._find(f"sandbox {sandbox} ended: {fate.end_reason}")
        return self.verdict

    # ── one operation ──

    def _find(self, text: str) -> None:
        self.verdict.findings.append(text)

    def _one(self, name: str, op: _Op, stops: Mapping[str, int]) -> None:
        kind = op.facts["kind"]
        what = op.facts["task"]["name"] if kind == "run" else kind
        if not op.answers and not self._was_killed(name):
            self._find(f"{name} ({what}) was never answered")
        for position, answer in op.answers:
            stopped_at = stops.get(op.facts.get("sandbox", ""))
            raced = stopped_at is not None and stopped_at < position
            self.verdict.outcomes[what, _outcome(answer)] += 1
            self.verdict.slowest_s[what] = max(self.verdict.slowest_s.get(what, 0.0), answer.get("took_s", 0.0))
            self._answer(name, kind, what, op, answer, raced=raced)
        if kind == "create":
            self._create(name, op)

    def _answer(self, name: str, kind: str, what: str, op: _Op, answer: dict[str, Any], *, raced: bool) -> None:
        where = f"{name} ({what}) on {op.facts.get('sandbox', 'the platform')}"
        if "hung" in answer:
            self._find(f"{where}: no answer within {answer['hung']} s")
        elif "untyped" in answer:
            self._find(f"{where}: {answer['untyped']}")
        elif "error" in answer:
            if not self._allowed(kind, answer["error"], raced=raced):
                error = answer["error"]
                self._find(f"{where}: {error['type']}: {error['text']} {error['detail']}")
        elif kind == "run":
            self._result(where, op.facts["task"], answer, raced=raced)
        elif kind == "read" and answer["digest"] != op.facts["want"]:
            self._find(f"{where}: {op.facts['path']} holds something else than was written")
        elif kind == "stop" and (answer["state"], answer["end_reason"]) != ("stopped", "stopped"):
            self._find(f"{where}: ended {answer['state']}, {answer['end_reason']}")
        elif kind in ("pause", "resume") and not raced and answer["state"] not in AWAKE_OR_PAUSED:
            self._find(f"{where}: is {answer['state']}")

    def _allowed(self, kind: str, error: dict[str, Any], *, raced: bool) -> bool:
        if error["type"] in AWAY or (raced and error["type"] in GONE):
            return True
        if kind in ("create", "abandoned"):
            return error["type"] in FULL
        if kind in ("read", "write", "audit", "connect"):
            return error["type"] in CUT
        # A pause does not wait for a pause or a resume under way.
        return kind in ("pause", "resume") and error["type"] in ("ConflictError", "SandboxError")

    def _result(self, where: str, task: dict[str, Any], answer: dict[str, Any], *, raced: bool) -> None:
        if raced and answer["end_reason"] == "sandbox_ended":
            if answer["exit_code"] is not None:
                self._find(f"{where}: the sandbox ended first, and yet there is an exit code")
            return
        for key in ("exit_code", "end_reason", "stdout_sha256", "stdout_total"):
            wanted, got = task[key], answer[key]
            if wanted is not None and wanted != got and not (key == "exit_code" and answer["end_reason"] != "exited"):
                self._find(f"{where}: {key} is {got}, not {wanted} ({answer})")
        if answer["truncated"] != (answer["stdout_got"] < answer["stdout_total"]):
            self._find(f"{where}: truncated={answer['truncated']}, {answer['stdout_got']} of {answer['stdout_total']}")

    def _create(self, name: str, op: _Op) -> None:
        self.creates[name] = op
        first: dict[str, str] = {}
        for _, answer in op.answers:
            for index, why in answer.get("failed", {}).items():
                self._find(f"create {name}: index {index} failed: {why}")
            for index, sandbox in answer.get("started", {}).items():
                if first.setdefault(index, sandbox) != sandbox:
                    self._find(f"create {name}: index {index} is {first[index]}, and {sandbox} later")
                self.acknowledged[name].add(sandbox)
            if "started" in answer and len(set(answer["started"].values())) != op.facts["count"]:
                self._find(f"create {name}: {len(answer['started'])} of {op.facts['count']} sandboxes")

    def _may_be_untold(self, name: str) -> bool:
        """Its client was killed before it could be told, or heard of its trouble only."""
        op = self.creates.get(name)
        return self._was_killed(name) or (op is not None and not any("started" in one for _, one in op.answers))

    def _was_killed(self, name: str) -> bool:
        return name.partition("n")[0] in self.killed

    # ── how often commands ran ──

    def _ledgers(self, ops: Mapping[str, _Op]) -> None:
        marks: dict[str, list[tuple[str, _Op]]] = defaultdict(list)
        for name, op in ops.items():
            if op.facts["kind"] == "run" and op.facts["task"]["marks"]:
                marks[op.facts["sandbox"]].append((name, op))
        checked: set[str] = set()
        for audit in ops.values():
            if audit.facts["kind"] != "audit":
                continue
            for _, answer in audit.answers:
                if "lines" in answer:
                    checked |= self._ledger(audit, Counter(answer["lines"]), marks[audit.facts["sandbox"]])
        self.verdict.ran += len(checked)

    def _ledger(self, audit: _Op, lines: Counter[str], marks: list[tuple[str, _Op]]) -> set[str]:
        sandbox = audit.facts["sandbox"]
        for line, count in lines.items():
            if count != 1:
                self._find(f"command {line} ran {count} times in {sandbox}")
        known = {name for name, _ in marks}
        for line in sorted(set(lines) - known):
            self._find(f"the ledger of {sandbox} holds {line}, which nobody asked of it")
        done = {
            name
            for name, op in marks
            if any(at < audit.asked_at and one.get("end_reason") in ("exited", "signaled") for at, one in op.answers)
        }
        for name in sorted(done - set(lines)):
            self._find(f"command {name} had ended by itself, and did not run in {sandbox}")
        return done & set(lines)


def _outcome(answer: Mapping[str, Any]) -> str:
    if "error" in answer:
        return str(answer["error"]["type"])
    if "untyped" in answer:
        return "UNTYPED"
    if "hung" in answer:
        return "HUNG"
    return str(answer.get("end_reason") or answer.get("state") or "ok")
