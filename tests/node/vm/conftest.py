"""Fixtures: an image, and one guest for all tests of a module that do not harm it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from tests.node.guest.agents import Shell
from tests.node.store.conftest import disk, store  # noqa: F401 (fixtures)
from tests.node.vm.guests import SETUP, Machine, make_image, new_machine

from opendsec.guest.channel import Channel


@pytest.fixture(scope="session")
def guest_images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the drives `base`, `base-data` and `work`."""
    folder = tmp_path_factory.mktemp("guest-images")
    make_image(folder)
    return folder


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory, guest_images: Path) -> Iterator[Machine]:
    """A guest that boots; its first channel sets it up (see `channel`)."""
    made = new_machine(tmp_path_factory.mktemp("guest") / "m", guest_images)
    made.launch()
    yield made
    made.close()


@pytest.fixture
async def channel(machine: Machine) -> AsyncIterator[Channel]:
    """A connection to the guest, which is ready."""
    made = await machine.channel()
    if "ready" not in made.capabilities:
        await made.setup(SETUP)
    yield made
    if machine.process.poll() is not None:
        return
    last = await machine.channel() if made.closed else made
    for command in await last.list_commands():
        await last.kill(command.id, 0)
    await last.aclose()


_ids = iter(range(1000, 1 << 30, 1000))


@pytest.fixture
def shell(channel: Channel) -> Shell:
    """Ids are never reused in the life of a machine."""
    return Shell(channel, next(_ids))
