"""A fake platform for each test, and clients of both kinds."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
from tests.cluster.client import fake_server
from tests.cluster.client.fake_server import FakeServer

import opendsec
import opendsec.sync


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with fake_server.running() as running:
        yield running


@pytest.fixture
async def client(server: FakeServer) -> AsyncIterator[opendsec.DSecClient]:
    async with opendsec.DSecClient(server.url, fake_server.KEY, timeout=10) as opened:
        yield opened


@pytest.fixture
async def sandbox(client: opendsec.DSecClient) -> opendsec.Sandbox:
    return await client.run_container(opendsec.DSecContainerRunArgs(container_image="debian"))


@pytest.fixture
def sync_client(server: FakeServer) -> Iterator[opendsec.sync.DSecClient]:
    with opendsec.sync.DSecClient(server.url, fake_server.KEY, timeout=10) as opened:
        yield opened


@pytest.fixture
def sync_sandbox(sync_client: opendsec.sync.DSecClient) -> opendsec.sync.Sandbox:
    return sync_client.run_container(opendsec.sync.DSecContainerRunArgs(container_image="debian"))
