"""The programs, the guest, and a yard for each test."""

from __future__ import annotations

import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.capabilities import STATE_DIR
from tests.node.vm import tiny_guest
from tests.node.vm.firecracker.yard import Yard

from opendsec.vm.firecracker_install import find_programs
from opendsec.vm.firecracker_start import Programs


@pytest.fixture(scope="session")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_guest.build(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def programs() -> Programs:
    return find_programs(STATE_DIR)


@pytest.fixture(scope="module")
async def template(programs: Programs, kernel: Path) -> AsyncIterator[Path]:
    """A saved machine with `yard.PAGES` pages filled, in a directory of its own."""
    async with Yard(programs, kernel) as made:
        yield await made.template(whole=True)


@pytest.fixture
def saved(yard: Yard, template: Path) -> Path:
    """A copy of `template` a test may spoil."""
    target = yard.folder()
    subprocess.run(["cp", "--archive", "--sparse=always", f"{template}/.", target], check=True, timeout=120)
    return target


@pytest.fixture
async def yard(programs: Programs, kernel: Path) -> AsyncIterator[Yard]:
    async with Yard(programs, kernel) as made:
        yield made
