"""What a call in a thread of its own raises comes back to who waits for it, whatever it is."""

from __future__ import annotations

import asyncio

import pytest

from opendsec.vm.firecracker_start import in_own_thread

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("error", [OSError(5, "no"), ValueError("embedded null byte"), RuntimeError("no thread")])
async def test_every_error_is_passed_on(error: Exception) -> None:
    def call() -> None:
        raise error

    with pytest.raises(type(error)):
        async with asyncio.timeout(60):
            await in_own_thread(call)


async def test_the_result_is_passed_on() -> None:
    assert await in_own_thread(lambda: 7) == 7
