"""Connections ask the kernel to notice a host that is gone: the client's, and the apiserver's to an edge."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator

import pytest

from opendsec.apiserver.link import EdgeLink
from opendsec.client._async.connection import Lane, Pool
from opendsec.client.settings import parse_endpoint
from opendsec.server.runner import parse_address
from opendsec.wire.keepalive import IDLE_S, UNHEARD_MS, socket_options

pytestmark = pytest.mark.anyio


@pytest.fixture
async def listening() -> AsyncIterator[str]:
    async def until_the_end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async with await asyncio.start_server(until_the_end, "127.0.0.1", 0) as server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"


def asked_of(sock: socket.socket) -> list[tuple[int, int, int]]:
    return [(level, option, sock.getsockopt(level, option)) for level, option, _ in socket_options()]


async def test_the_clients_do(listening: str) -> None:
    pool = Pool(parse_endpoint(f"http://{listening}", "key"))
    connection = await pool.take(Lane.LONG, deadline=time.monotonic() + 10)
    assert asked_of(connection.stream.raw.get_extra_info("socket")) == socket_options()
    await pool.give_back(connection)
    await pool.aclose()


async def test_the_apiservers_do(listening: str) -> None:
    link = EdgeLink("a", parse_address(listening), patience_s=5)
    connection = await link.connection()
    assert connection._transport is not None
    assert asked_of(connection._transport.get_extra_info("socket")) == socket_options()
    connection.abort()
    await asyncio.sleep(0.05)


def test_what_this_kernel_is_asked() -> None:
    assert (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1) in socket_options()
    assert (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, IDLE_S) in socket_options()
    assert (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNHEARD_MS) in socket_options()
