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
FULLVM = pytest.param(
    BackendKind.FULLVM,
    marks=[*(getattr(pytest.mark, name) for name in FULLVM_NEEDS), pytest.mark.timeout(600)],  # one boots for many
    id="fullvm",
)
ALL = [pytest.param(BackendKind.DUMMY, id="dummy"), CONTAINER, MICROVM, FULLVM]
PLACES_OF = {
    "REAL_ONLY": [CONTAINER, MICROVM, FULLVM],
    "CONTAINER_ONLY": [CONTAINER],
    "MACHINES_ONLY": [MICROVM, FULLVM],
}
"""What a module may say of itself, and what its tests run on then."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Modules with REAL_ONLY are about what only a real kernel has, those with CONTAINER_ONLY about the host's, those
    with MACHINES_ONLY about guests with a kernel of their own."""
    if "place" in metafunc.fixturenames:
        module = metafunc.module.__dict__
        places = next((those for flag, those in PLACES_OF.items() if module.get(flag)), ALL)
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
