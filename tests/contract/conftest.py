"""`place` is a backend: the dummy and, as root, real containers. `box` is a fresh sandbox on it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from tests.contract.harness import CONTAINER_NEEDS, PLACES, Place, Sandbox

from opendsec.model.spec import BackendKind

CONTAINER = pytest.param(
    BackendKind.CONTAINER, marks=[getattr(pytest.mark, name) for name in CONTAINER_NEEDS], id="container"
)
BOTH = [pytest.param(BackendKind.DUMMY, id="dummy"), CONTAINER]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Modules with CONTAINER_ONLY are about what only a real kernel has."""
    if "place" in metafunc.fixturenames:
        only = metafunc.module.__dict__.get("CONTAINER_ONLY", False)
        metafunc.parametrize("place", [CONTAINER] if only else BOTH, indirect=True, scope="module")


@pytest.fixture(scope="module")
async def place(request: pytest.FixtureRequest, anyio_backend: str) -> AsyncIterator[Place]:
    """One backend for all tests of a module."""
    async with PLACES[request.param]() as made:
        yield made


@pytest.fixture
async def box(place: Place) -> AsyncIterator[Sandbox]:
    """A sandbox of the busybox image with the default limits."""
    async with place.sandbox() as made:
        yield made
