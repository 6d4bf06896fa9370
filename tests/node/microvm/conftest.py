"""One microVM backend for all tests of a module; every test has sandboxes of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from tests.contract.harness import Place, Sandbox, microvm_place


@pytest.fixture(scope="module")
async def place(anyio_backend: str) -> AsyncIterator[Place]:
    async with microvm_place() as made:
        yield made


@pytest.fixture
async def box(place: Place) -> AsyncIterator[Sandbox]:
    async with place.sandbox() as made:
        yield made
