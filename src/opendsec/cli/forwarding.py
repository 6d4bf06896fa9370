"""`opendsec forward SANDBOX LOCAL:REMOTE`: a port of this machine leads to one inside a sandbox."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Annotated

import typer

from opendsec import DSecClient, PortStream, Sandbox
from opendsec.cli.output import note
from opendsec.cli.session import with_client
from opendsec.errors import ConflictError, OpenDSecError

READ_BYTES = 64 * 1024
LOOPBACK = "127.0.0.1"


def forward(
    sandbox_id: Annotated[str, typer.Argument(metavar="SANDBOX", help="Id of a sandbox.")],
    ports: Annotated[
        list[str],
        typer.Argument(metavar="LOCAL:REMOTE", help="Port here and port inside; one number is both; 0 here: any free."),
    ],
    listen: Annotated[str, typer.Option("--listen", metavar="ADDRESS", help="Address of this machine.")] = LOOPBACK,
) -> None:
    """Let ports of this machine lead to ports inside a sandbox, until interrupted: `opendsec forward sbx-… 8080:80`.

    While a connection is open the sandbox is not idle.
    """
    pairs = [parse_ports(word) for word in ports]

    async def main(client: DSecClient) -> int:
        sandbox = await client.connect(sandbox_id)
        async with contextlib.AsyncExitStack() as stack:
            for local, remote in pairs:
                server = await stack.enter_async_context(await _listening(sandbox, listen, local, remote))
                taken = server.sockets[0].getsockname()[1]
                note(f"{listen}:{taken} leads to port {remote} of {sandbox_id}")
            await asyncio.Event().wait()
        return 0

    with_client(main)


def parse_ports(word: str) -> tuple[int, int]:
    """`8080:80` or `80`. Raises typer.BadParameter."""
    left, colon, right = word.rpartition(":")
    numbers = [left if colon else right, right]
    if not all(text.isascii() and text.isdigit() and int(text) < 65536 for text in numbers) or int(right) == 0:
        raise typer.BadParameter(f"{word!r} is not LOCAL:REMOTE, numbers up to 65535", param_hint="LOCAL:REMOTE")
    return int(numbers[0]), int(numbers[1])


async def _listening(sandbox: Sandbox, address: str, local: int, remote: int) -> asyncio.Server:
    async def one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with await sandbox.ports.connect(remote) as stream:
                await carry(reader, writer, stream)
        except ConflictError as error:
            note(f"opendsec: {error.message}")
        except OpenDSecError as error:
            note(f"opendsec: the connection to port {remote} ended: {error.message}")
        finally:
            writer.close()

    try:
        return await asyncio.start_server(one, address, local)
    except OSError as error:
        raise ConflictError(
            f"{address}:{local} cannot be listened on: {error.strerror or error}",
            detail={"field": "LOCAL"},
            remedy="choose another port; 0 is any that is free",
        ) from error


async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, stream: PortStream) -> None:
    """Both directions, each no faster than the other side takes it, until both have ended."""

    async def into() -> None:
        while data := await reader.read(READ_BYTES):
            await stream.write(data)
        await stream.write_eof()

    async def out() -> None:
        while data := await stream.read():
            writer.write(data)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()

    with contextlib.suppress(ConnectionError):  # of the program on this machine, which has had enough
        async with _both() as group:
            group.create_task(into())
            group.create_task(out())


@contextlib.asynccontextmanager
async def _both() -> AsyncIterator[asyncio.TaskGroup]:
    try:
        async with asyncio.TaskGroup() as group:
            yield group
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
