"""Many sandboxes of one client: fill, stop, and do something with a bounded number at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from typing import TypeVar

import opendsec

T = TypeVar("T")

STOPS_AT_ONCE = 32


async def each(items: Iterable[T], work: Callable[[T], Awaitable[object]], *, at_once: int) -> None:
    """Do it with every item; the first failure ends all."""
    todo = iter(items)

    async def worker() -> None:
        for item in todo:
            await work(item)

    async with asyncio.TaskGroup() as group:
        for _ in range(at_once):
            group.create_task(worker())


async def stop_all(sandboxes: Iterable[opendsec.Sandbox]) -> None:
    """Stop them."""
    await each(sandboxes, lambda sandbox: sandbox.stop(), at_once=STOPS_AT_ONCE)


async def fill(
    client: opendsec.DSecClient, args: opendsec.DSecContainerRunArgs, count: int, *, batch: int = 500
) -> list[opendsec.Sandbox]:
    """So many live ones, started in batches. Raises the first failure."""
    found: list[opendsec.Sandbox] = []
    while len(found) < count:
        async for outcome in client.run_many(args, min(batch, count - len(found))):
            if isinstance(outcome, opendsec.Failed):
                raise outcome.error
            found.append(outcome.sandbox)
    return found


@asynccontextmanager
async def living(
    client: opendsec.DSecClient, args: opendsec.DSecContainerRunArgs, count: int
) -> AsyncIterator[list[opendsec.Sandbox]]:
    """`count` idle sandboxes for the length of the block."""
    sandboxes = await fill(client, args, count)
    try:
        yield sandboxes
    finally:
        await stop_all(sandboxes)
