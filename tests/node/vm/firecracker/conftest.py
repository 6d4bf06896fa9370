"""The programs, the guest, and a yard for each test."""

from __future__ import annotations

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


@pytest.fixture
async def yard(programs: Programs, kernel: Path) -> AsyncIterator[Yard]:
    async with Yard(programs, kernel) as made:
        yield made
