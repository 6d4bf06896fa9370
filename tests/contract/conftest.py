"""`place` is a backend: the dummy and, as root, real containers, microVMs and full VMs. `box` is a fresh sandbox."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from tests.contract.harness import CONTAINER_NEEDS, FULLVM_NEEDS, MICROVM_NEEDS, PLACES, Place, Sandbox

from opendsec.model.spec import BackendKind

CONTAINER = pytest.param(
    BackendKind.CONTAINER, marks=[getattr(pytest.mark, name) for name in CONTAINER_NEEDS], id="container"
)
MICROVM = pytest.param(BackendKind.MICROVM, marks=[getattr(pytest.mark, name) for name in MICROVM_NEEDS], id="microvm")
FULLVM = pytest.param(BackendKind.FULLVM, marks=[getattr(pytest.mark, name) for name in FULLVM_NEEDS], id="fullvm")
ALL = [pytest.param(BackendKind.DUMMY, id="dummy"), CONTAINER, MICROVM, FULLVM]
REAL = [CONTAINER, MICROVM, FULLVM]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Modules with REAL_ONLY are about what only a real kernel has, those with CONTAINER_ONLY about the host's."""
    if "place" in metafunc.fixturenames:
        module = metafunc.module.__dict__
        places = [CONTAINER] if module.get("CONTAINER_ONLY") else REAL if module.get("REAL_ONLY") else ALL
        metafunc.parametrize("place", places, indirect=True, scope="module")


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
