"""What every test shares: capability markers, the leak check, the asyncio backend, no blocking on the event loop."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from blockbuster import BlockBuster
from hypothesis import HealthCheck, settings

pytest_plugins = ["tests.capabilities", "tests.leaks"]

_BLOCKING = ("socket.", "ssl.", "time.sleep", "builtins.input")
"""Small file operations on the loop are meant: they cost microseconds, a thread hop costs more."""

# An example may take long on a busy machine: that says nothing of what is tested.
settings.register_profile("opendsec", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("opendsec")


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    """All servers of ours run on asyncio."""
    return "asyncio"


@pytest.fixture(autouse=True)
def no_blocking(request: pytest.FixtureRequest) -> Iterator[None]:
    """A call from our code that waits for a peer or a clock while the event loop stands still is an error."""
    tier = request.path.relative_to(request.config.rootpath).parts[1]
    if tier not in {"unit", "cluster"}:
        yield
        return
    guard = BlockBuster(["opendsec"])
    guard.functions = {name: f for name, f in guard.functions.items() if name.startswith(_BLOCKING)}
    guard.activate()
    try:
        yield
    finally:
        guard.deactivate()
