"""Commands whose right answer is known beforehand, chosen at random but the same for the same seed.

Every command has an operation id, so it may be asked for again; most of them leave a line with that id in a file of
the sandbox, which later shows how often they ran.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import asdict, dataclass
from typing import Any

LEDGER = "/ledger"
"""The file inside that gets a line for each command that ran."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One command. What is None is not looked at."""

    name: str
    script: str
    timeout_s: float | None = None
    stdin_seed: int | None = None
    stdin_bytes: int = 0
    session: str | None = None
    pty: bool = False
    kill: bool = False
    """It is started, and ended from outside."""
    leave: bool = False
    """It is started, left alone, and found again by its id."""
    marks: bool = False
    """It adds a line to the ledger."""
    exit_code: int | None = 0
    end_reason: str = "exited"
    stdout_sha256: str | None = None
    stdout_total: int | None = None

    def facts(self) -> dict[str, Any]:
        """For the diary."""
        return asdict(self)


def digest(data: bytes) -> str:
    """How outputs are compared."""
    return hashlib.sha256(data).hexdigest()


def stdin_of(task: Task) -> bytes | None:
    """The same bytes for the same task."""
    return None if task.stdin_seed is None else random.Random(task.stdin_seed).randbytes(task.stdin_bytes)


def _mark(op: str) -> str:
    return f"echo {op} >> {LEDGER}"


def _short(rng: random.Random, op: str) -> Task:
    code = rng.choice((0, 0, 0, 1, 3, 42, 255))
    return Task(
        name="short",
        script=f"{_mark(op)}; echo {op}; exit {code}",
        marks=True,
        exit_code=code,
        stdout_sha256=digest(f"{op}\n".encode()),
    )


def _slow(rng: random.Random, op: str) -> Task:
    count = rng.randint(5, 40)
    text = "".join(f"{op} {number}\n" for number in range(1, count + 1))
    return Task(
        name="slow",
        script=f"{_mark(op)}; for i in $(seq 1 {count}); do echo {op} $i; sleep 0.1; done",
        marks=True,
        stdout_sha256=digest(text.encode()),
    )


def _big(rng: random.Random, op: str) -> Task:
    count = rng.randint(20_000, 400_000)
    text = "".join(f"{number}\n" for number in range(1, count + 1))
    script = f"{_mark(op)}; seq 1 {count}"
    return Task(name="big output", script=script, marks=True, stdout_sha256=digest(text.encode()))


def _overflow(rng: random.Random, op: str) -> Task:
    total = rng.randint(70, 90) * 1024 * 1024
    return Task(name="over the cap", script=f"head -c {total} /dev/zero", stdout_total=total)


def _stdin(rng: random.Random, op: str) -> Task:
    seed, size = rng.getrandbits(32), rng.choice((1, 4096, 70_000, 3_000_000))
    data = random.Random(seed).randbytes(size)
    script = f"{_mark(op)}; cat"
    return Task(name="stdin", script=script, marks=True, stdin_seed=seed, stdin_bytes=size, stdout_sha256=digest(data))


def _timeout(rng: random.Random, op: str) -> Task:
    script = f"{_mark(op)}; trap '' TERM; setsid sleep 100 & sleep 100; wait"
    return Task(
        name="timeout", script=script, marks=True, timeout_s=rng.uniform(0.5, 1.5), exit_code=None, end_reason="timeout"
    )


def _signal(rng: random.Random, op: str) -> Task:
    return Task(
        name="killed by itself",
        script=f"{_mark(op)}; kill -9 $$",
        marks=True,
        exit_code=137,
        end_reason="signaled",
    )


def _kill(rng: random.Random, op: str) -> Task:
    return Task(
        name="killed",
        script=f"{_mark(op)}; sleep 100",
        marks=True,
        kill=True,
        exit_code=None,
        end_reason="cancelled",
    )


def _pty(rng: random.Random, op: str) -> Task:
    return Task(name="terminal", script=f"{_mark(op)}; stty size; exit 5", marks=True, pty=True, exit_code=5)


def _left(rng: random.Random, op: str) -> Task:
    text = f"{op} begins\n{op} ends\n"
    script = f"{_mark(op)}; echo {op} begins; sleep {rng.uniform(0.2, 3):.1f}; echo {op} ends; exit 9"
    return Task(
        name="found again", script=script, marks=True, leave=True, exit_code=9, stdout_sha256=digest(text.encode())
    )


def _orphans(rng: random.Random, op: str) -> Task:
    script = f"{_mark(op)}; (sleep 20 &) ; for i in 1 2 3 4 5; do (sh -c 'exit 1' &) ; done; echo {op}; exit 7"
    return Task(name="orphans", script=script, marks=True, exit_code=7, stdout_sha256=digest(f"{op}\n".encode()))


_KINDS = (_short, _short, _short, _short, _slow, _big, _stdin, _timeout, _signal, _kill, _pty, _left, _orphans)


def any_task(rng: random.Random, op: str) -> Task:
    """One of them. Outputs over the cap are rare, because they are large."""
    if rng.random() < 0.01:
        return _overflow(rng, op)
    return rng.choice(_KINDS)(rng, op)


def session_task(op: str, count: int) -> Task:
    """The `count`th command of a shell that counts its commands."""
    return Task(
        name="session",
        script=f"N=$((N+1)); {_mark(op)}; echo $N",
        marks=True,
        session="counter",
        stdout_sha256=digest(f"{count}\n".encode()),
    )
