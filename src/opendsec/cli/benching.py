"""`opendsec bench`: how fast the running platform is, seen from a client. Every sandbox it starts, it stops."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Annotated

import anyio
import typer

from opendsec import DSecClient, DSecContainerRunArgs, Failed, Sandbox
from opendsec.cli import exits, options
from opendsec.cli.figures import COLUMNS, Latency, latency
from opendsec.cli.output import Advance, Json, note, print_json, print_line, print_table, progress
from opendsec.cli.session import with_client
from opendsec.model.spec import BackendKind

LABEL = "opendsec-bench"
PARALLEL_STOPS = 32


@dataclass(slots=True)
class Figures:
    """Everything measured; seconds."""

    create: list[float] = field(default_factory=list)
    first_result: list[float] = field(default_factory=list)
    round_trip: list[float] = field(default_factory=list)
    stop: list[float] = field(default_factory=list)
    batch_ready: list[float] = field(default_factory=list)
    batch_failed: int = 0

    def rows(self) -> list[Latency]:
        """Table rows, for what was measured."""
        named = (
            ("create → ready", self.create),
            ("create → first result", self.first_result),
            ("command round trip", self.round_trip),
            ("stop", self.stop),
            ("batch: request → ready", self.batch_ready),
        )
        return [latency(what, seconds) for what, seconds in named if seconds]

    @property
    def batch_per_s(self) -> float:
        """Sandboxes ready per second in the batch."""
        return len(self.batch_ready) / max(self.batch_ready) if self.batch_ready else 0.0


def bench(
    image: Annotated[str, typer.Option(help="Image to start from.")] = "debian",
    creates: Annotated[int, typer.Option(min=1, help="Sandboxes started one after the other.")] = 30,
    commands: Annotated[int, typer.Option(min=1, help="Commands run one after the other in one sandbox.")] = 200,
    batch: Annotated[int, typer.Option(min=0, help="Sandboxes of one batch request; 0: none.")] = 200,
    backend: options.Backend = BackendKind.CONTAINER,
    as_json: Json = False,
) -> None:
    """Measure create, command and batch latencies against the running platform."""
    args = DSecContainerRunArgs(container_image=image, backend=backend, labels={LABEL: "1"})

    async def main(client: DSecClient) -> int:
        figures = Figures()
        with progress("creating one by one", creates) as advance:
            for _ in range(creates):
                await _one(client, args, figures)
                advance(1)
        async with client.container(args) as sandbox:
            with progress("running commands", commands) as advance:
                for _ in range(commands):
                    figures.round_trip.append(await _timed_true(sandbox))
                    advance(1)
        if batch:
            with progress("creating a batch", batch) as advance:
                await _many(client, args, batch, figures, advance)
        _show(figures, as_json=as_json)
        return exits.PLATFORM if figures.batch_failed else 0

    with_client(main)


async def _one(client: DSecClient, args: DSecContainerRunArgs, figures: Figures) -> None:
    begin = time.perf_counter()
    sandbox = await client.run_container(args)
    async with sandbox.stopping():
        figures.create.append(time.perf_counter() - begin)
        await _timed_true(sandbox)
        figures.first_result.append(time.perf_counter() - begin)
        begin = time.perf_counter()
        await sandbox.stop()
        figures.stop.append(time.perf_counter() - begin)


async def _timed_true(sandbox: Sandbox) -> float:
    begin = time.perf_counter()
    await sandbox.run_shell("true", check=True)
    return time.perf_counter() - begin


async def _many(client: DSecClient, args: DSecContainerRunArgs, count: int, figures: Figures, advance: Advance) -> None:
    started: list[Sandbox] = []
    begin = time.perf_counter()
    try:
        async for outcome in client.run_many(args, count):
            advance(1)
            if isinstance(outcome, Failed):
                figures.batch_failed += 1
                note(f"opendsec: sandbox {outcome.index} of the batch failed: {outcome.error}")
            else:
                figures.batch_ready.append(time.perf_counter() - begin)
                started.append(outcome.sandbox)
    finally:
        with anyio.move_on_after(60, shield=True):
            await stop_all(started)


async def stop_all(sandboxes: list[Sandbox]) -> None:
    """Stop them, a few at a time. Raises the first failure after having tried all."""
    limit = anyio.CapacityLimiter(PARALLEL_STOPS)

    async def one(sandbox: Sandbox) -> None:
        async with limit:
            await sandbox.stop()

    async with anyio.create_task_group() as group:
        for sandbox in sandboxes:
            group.start_soon(one, sandbox)


def _show(figures: Figures, *, as_json: bool) -> None:
    rows = figures.rows()
    if as_json:
        print_json({"latencies": rows, "batch_per_s": figures.batch_per_s, "batch_failed": figures.batch_failed})
        return
    print_table(COLUMNS, [row.cells() for row in rows])
    if figures.batch_ready:
        print_line(f"batch: {figures.batch_per_s:.0f} sandboxes/s, {figures.batch_failed} failed")
