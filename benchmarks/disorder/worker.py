"""One client process: sandboxes, commands, files and ends at random, every request and answer in its diary.

It may be killed at any moment. Started again, it asks again for what was not answered, with the same keys and
operation ids, and goes on with the sandboxes it had.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.disorder import diary, tasks
from benchmarks.disorder.tasks import LEDGER, Task

import opendsec

AGENTS = 4
CREATE_S = 90.0
ANSWER_S = 200.0
"""Longer than any command here, plus the minute for which the SDK waits for a platform that is away."""
TTL_S = 3600.0
MOST_LIVE = 40


@dataclass(slots=True)
class Box:
    """One sandbox as its worker knows it."""

    sandbox: opendsec.Sandbox
    session_count: int | None = 0
    """Commands of its counting session so far; None: not known any more."""
    files: dict[str, str] = field(default_factory=dict)


class Worker:
    """See the module."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.rng = random.Random(f"{options.seed}/{options.worker}/{options.life}")
        self.diary = diary.Diary(options.diary)
        self.boxes: list[Box] = []
        self.number = 0

    def op(self) -> str:
        """A fresh operation id."""
        self.number += 1
        return f"w{self.options.worker}l{self.options.life}n{self.number}"

    def args(self, op: str) -> opendsec.DSecContainerRunArgs:
        """Of a sandbox that bears the operation's id."""
        return opendsec.DSecContainerRunArgs(
            container_image=self.options.image,
            ttl_running_stop=TTL_S,
            pids_limit=256,
            memory_limit_mb=256,
            labels={"op": op},
        )

    async def run(self) -> None:
        """Until the time is over; then everything unanswered has been answered."""
        client = opendsec.DSecClient(timeout=60)
        await opened(client)
        await self.go_on(client)
        async with asyncio.TaskGroup() as group:
            for _ in range(AGENTS):
                group.create_task(self.agent(client))
        await client.close()
        self.diary.close()

    @property
    def over(self) -> bool:
        return bool(time.time() > self.options.until)

    # ── asking ──

    async def asked(self, op: str, work: Callable[[], Awaitable[dict[str, Any]]]) -> dict[str, Any] | None:
        """Do it and write down what came; None when it was an error."""
        begin = time.monotonic()
        try:
            async with asyncio.timeout(ANSWER_S):
                found = await work()
        except opendsec.OpenDSecError as error:
            fields = {"type": type(error).__name__, "code": error.code, "text": str(error), "detail": error.detail}
            self.diary.answer(op, error=fields, took_s=round(time.monotonic() - begin, 3))
            return None
        except TimeoutError:
            self.diary.answer(op, hung=ANSWER_S)
            return None
        except Exception as error:  # noqa: BLE001 the finding itself: an error without a type of ours
            self.diary.answer(op, untyped=f"{type(error).__name__}: {error}")
            return None
        self.diary.answer(op, **found, took_s=round(time.monotonic() - begin, 3))
        return found

    async def go_on(self, client: opendsec.DSecClient) -> None:
        """What an earlier life of this worker left."""
        asks: dict[str, dict[str, Any]] = {}
        answered: set[str] = set()
        ids: dict[str, None] = {}
        for line in diary.read(self.options.diary):
            if line.event == "ask":
                asks[line.op] = line.facts
                if line.facts["kind"] == "stop":
                    ids.pop(line.facts["sandbox"], None)
            else:
                answered.add(line.op)
                ids.update(dict.fromkeys(line.facts.get("started", {}).values()))
        for op, facts in asks.items():
            if op not in answered:
                await self.repeat(client, op, facts, ids)
        for sandbox_id in list(ids)[:MOST_LIVE]:
            await self.find(client, sandbox_id)

    async def repeat(self, client: opendsec.DSecClient, op: str, facts: dict[str, Any], ids: dict[str, None]) -> None:
        if facts["kind"] == "create":
            found = await self.asked(op, lambda: self.create_once(client, op, facts["count"]))
            ids.update(dict.fromkeys((found or {}).get("started", {}).values()))
        elif facts["kind"] == "run":
            task = Task(**facts["task"])
            connected = await self.found(client, facts["sandbox"])
            if connected is not None:
                await self.asked(op, lambda: run_task(connected, op, task))

    async def find(self, client: opendsec.DSecClient, sandbox_id: str) -> None:
        sandbox = await self.found(client, sandbox_id)
        if sandbox is not None:
            self.boxes.append(Box(sandbox, session_count=None))

    async def found(self, client: opendsec.DSecClient, sandbox_id: str) -> opendsec.Sandbox | None:
        found: list[opendsec.Sandbox] = []

        async def connect() -> dict[str, Any]:
            found.append(await client.connect(sandbox_id))
            return {}

        op = self.op()
        self.diary.ask(op, "connect", sandbox=sandbox_id)
        await self.asked(op, connect)
        return found[0] if found else None

    # ── creating ──

    async def create_once(self, client: opendsec.DSecClient, op: str, count: int) -> dict[str, Any]:
        """One sandbox, or a batch; the key is the operation id."""
        if count == 1:
            sandbox = await client.run_container(self.args(op), timeout=CREATE_S, idempotency_key=op)
            return {"started": {"0": sandbox.id}, "failed": {}}
        started: dict[str, str] = {}
        failed: dict[str, str] = {}
        async for item in client.run_many(self.args(op), count, timeout=CREATE_S, idempotency_key=op):
            if isinstance(item, opendsec.Failed):
                failed[str(item.index)] = f"{type(item.error).__name__}: {item.error}"
            elif str(item.index) in started:
                failed[str(item.index)] = "told twice"
            else:
                started[str(item.index)] = item.sandbox.id
        return {"started": started, "failed": failed}

    async def create(self, client: opendsec.DSecClient) -> None:
        """Perhaps twice at the same time, or once more afterwards: it is the same sandboxes."""
        op, count = self.op(), self.rng.choice((1, 1, 1, 2, 5, 12))
        self.diary.ask(op, "create", count=count)

        async def ask() -> dict[str, Any] | None:
            return await self.asked(op, lambda: self.create_once(client, op, count))

        twin = self.rng.random() < 0.2
        answers = await asyncio.gather(*(ask() for _ in range(2 if twin else 1)))
        if self.rng.random() < 0.1:
            answers.append(await ask())
        started: dict[str, str] = next((answer["started"] for answer in answers if answer is not None), {})
        for sandbox_id in started.values():
            await self.find(client, sandbox_id)
            if self.boxes and self.boxes[-1].sandbox.id == sandbox_id:
                self.boxes[-1].session_count = 0

    async def create_and_delete(self, client: opendsec.DSecClient) -> None:
        """The client changes its mind while the sandbox is being made."""
        op = self.op()
        self.diary.ask(op, "abandoned")
        task = asyncio.ensure_future(client.run_container(self.args(op), timeout=CREATE_S, idempotency_key=op))
        await asyncio.sleep(self.rng.uniform(0, 0.1))

        async def delete() -> dict[str, Any]:
            stopped = []
            async for status in client.list(labels={"op": op}):
                await client.stop(status.sandbox_id)
                stopped.append(status.sandbox_id)
            return {"stopped": stopped}

        await self.asked(op, delete)
        try:
            sandbox = await task
        except opendsec.OpenDSecError:
            return
        end = self.op()
        self.diary.ask(end, "stop", sandbox=sandbox.id)
        await self.asked(end, lambda: stop(sandbox))

    # ── one agent ──

    async def agent(self, client: opendsec.DSecClient) -> None:
        """Takes a sandbox, works with it, gives it back or ends it."""
        while not self.over:
            if not self.boxes or (len(self.boxes) < MOST_LIVE and self.rng.random() < 0.15):
                await self.create(client)
                continue
            if self.rng.random() < 0.05:
                await self.create_and_delete(client)
                continue
            box = self.boxes.pop(self.rng.randrange(len(self.boxes)))
            for _ in range(self.rng.randint(1, 6)):
                await self.step(box)
            if self.rng.random() < 0.25:
                await self.end(box)
            else:
                self.boxes.append(box)

    async def step(self, box: Box) -> None:
        roll = self.rng.random()
        if roll < 0.45:
            await self.command(box)
        elif roll < 0.55:
            async with asyncio.TaskGroup() as group:
                for _ in range(self.rng.randint(2, 6)):
                    group.create_task(self.command(box))
        elif roll < 0.7:
            await self.count(box)
        elif roll < 0.85:
            await self.file(box)
        elif roll < 0.93:
            await self.audit(box)
        else:
            await self.pause(box)

    async def command(self, box: Box) -> None:
        op = self.op()
        task = tasks.any_task(self.rng, op)
        self.diary.ask(op, "run", sandbox=box.sandbox.id, task=task.facts())
        await self.asked(op, lambda: run_task(box.sandbox, op, task))
        if self.rng.random() < 0.05:
            await self.asked(op, lambda: run_task(box.sandbox, op, task))  # once more: the same answer

    async def count(self, box: Box) -> None:
        if box.session_count is None:
            return
        op = self.op()
        task = tasks.session_task(op, box.session_count + 1)
        self.diary.ask(op, "run", sandbox=box.sandbox.id, task=task.facts())
        answer = await self.asked(op, lambda: run_task(box.sandbox, op, task))
        box.session_count = None if answer is None else box.session_count + 1

    async def file(self, box: Box) -> None:
        path = self.rng.choice(("/f/one", "/f/two words", "/f/%2F"))
        op = self.op()
        if self.rng.random() < 0.5 or path not in box.files:
            data = self.rng.randbytes(self.rng.choice((0, 10, 100_000, 2_000_000)))

            async def write() -> dict[str, Any]:
                await box.sandbox.files.write(path, data)
                return {}

            self.diary.ask(op, "write", sandbox=box.sandbox.id, path=path)
            done = await self.asked(op, write)
            if done is None:
                box.files.pop(path, None)
            else:
                box.files[path] = tasks.digest(data)
            return

        async def read() -> dict[str, Any]:
            return {"digest": tasks.digest(await box.sandbox.files.read_bytes(path))}

        self.diary.ask(op, "read", sandbox=box.sandbox.id, path=path, want=box.files[path])
        await self.asked(op, read)

    async def audit(self, box: Box) -> None:
        op = self.op()
        self.diary.ask(op, "audit", sandbox=box.sandbox.id)
        await self.asked(op, lambda: ledger(box.sandbox))

    async def pause(self, box: Box) -> None:
        """Pause; what comes next, a resume or any work, wakes it."""
        op = self.op()
        self.diary.ask(op, "pause", sandbox=box.sandbox.id)

        async def pause() -> dict[str, Any]:
            return {"state": str((await box.sandbox.pause()).state)}

        await self.asked(op, pause)
        if self.rng.random() < 0.5:
            again = self.op()
            self.diary.ask(again, "resume", sandbox=box.sandbox.id)

            async def resume() -> dict[str, Any]:
                return {"state": str((await box.sandbox.resume()).state)}

            await self.asked(again, resume)

    async def end(self, box: Box) -> None:
        """Stop it, sometimes under running commands."""
        if self.rng.random() < 0.5:
            await self.audit(box)
        async with asyncio.TaskGroup() as group:
            if self.rng.random() < 0.3:
                for _ in range(2):
                    group.create_task(self.command(box))
                await asyncio.sleep(self.rng.uniform(0, 0.3))
            op = self.op()
            self.diary.ask(op, "stop", sandbox=box.sandbox.id)
            group.create_task(self.asked(op, lambda: stop(box.sandbox)))


async def opened(client: opendsec.DSecClient) -> None:
    """A client that begins while the platform is away is told so after a second: it tries again."""
    async with asyncio.timeout(CREATE_S):
        while True:
            try:
                await client.open()
                return
            except opendsec.ConnectError:
                await asyncio.sleep(0.1)


async def stop(sandbox: opendsec.Sandbox) -> dict[str, Any]:
    """End it."""
    status = await sandbox.stop(timeout=120)
    return {"state": str(status.state), "end_reason": str(status.end_reason)}


async def ledger(sandbox: opendsec.Sandbox) -> dict[str, Any]:
    """Which commands have run, by the sandbox's own account."""
    if not await sandbox.files.exists(LEDGER):
        return {"lines": []}
    return {"lines": (await sandbox.files.read(LEDGER)).split()}


async def run_task(sandbox: opendsec.Sandbox, op: str, task: Task) -> dict[str, Any]:
    """Run it in the way it wants and say what came."""
    if task.pty or task.kill or task.leave:
        return await _run_process(sandbox, op, task)
    result = await sandbox.run_shell(
        task.script, timeout=task.timeout_s, stdin=tasks.stdin_of(task), session=task.session, operation_id=op
    )
    return _seen(result.details, result.stdout_bytes)


async def _run_process(sandbox: opendsec.Sandbox, op: str, task: Task) -> dict[str, Any]:
    size = opendsec.PtySize(rows=24, cols=80) if task.pty else None
    process = await sandbox.commands.start(task.script, operation_id=op, pty=size)
    if task.kill:
        await asyncio.sleep(0.05)
        await process.kill(grace=0.2)
    if task.leave:
        await process.aclose()
        process = await sandbox.commands.attach(process.id)
    output = await process.stdout.read()
    return _seen(await process.wait(), output)


def _seen(result: opendsec.CommandResult, output: bytes) -> dict[str, Any]:
    return {
        "exit_code": result.exit_code,
        "end_reason": str(result.end_reason),
        "stdout_sha256": tasks.digest(output),
        "stdout_got": len(output),
        "stdout_total": result.stdout_bytes_total,
        "truncated": result.truncated,
        "session_started": result.session_started,
    }


def main() -> None:
    """One life of one worker."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--diary", type=Path, required=True)
    parser.add_argument("--image", required=True)
    parser.add_argument("--until", type=float, required=True)
    for name in ("--worker", "--life", "--seed"):
        parser.add_argument(name, type=int, required=True)
    asyncio.run(Worker(parser.parse_args()).run())


if __name__ == "__main__":
    main()
