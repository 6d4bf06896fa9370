"""A new edge process finds machines of the one before, and what went on in them.

`test_adoption` says the same of containers, and more.
"""

from __future__ import annotations

import pytest
from tests.contract.harness import Place

from opendsec.backends.base import Running

pytestmark = pytest.mark.anyio
MACHINES_ONLY = True


async def test_commands_sessions_and_output_outlive_it(place: Place) -> None:
    async with place.sandbox() as box:
        await box.run("cd /etc; A=kept", session="s")
        command = await box.start("echo before; cat; echo after", stdin=True)
        await box.guest.aclose()
        await place.restart()
        found = await place.backend.recover(box.running.handle)
        assert isinstance(found, Running)
        box.running, box.backend = found, place.backend
        await box.guest.attach(command, 0, 0)
        await box.guest.write_stdin(command, 0, b"between\n", eof=True)
        assert (await box.finish(command)).stdout == b"before\nbetween\nafter\n"
        assert (await box.run("pwd; echo $A", session="s")).stdout == b"/etc\nkept\n"
        async with place.sandbox() as another:
            assert (await another.run("echo new")).stdout == b"new\n"


async def test_a_paused_one_is_found_and_goes_on(place: Place) -> None:
    async with place.sandbox() as box:
        await box.run("echo kept > /tmp/f")
        await place.backend.pause(box.running.handle)
        await box.guest.aclose()
        await place.restart()
        found = await place.backend.recover(box.running.handle)
        assert found is not None
        await place.backend.resume(found.handle)
        guest = await place.backend.reconnect(found.handle)
        assert guest is not None
        box.running, box.backend = Running(handle=found.handle, guest=guest), place.backend
        assert (await box.run("cat /tmp/f")).stdout == b"kept\n"
