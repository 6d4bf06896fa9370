"""The supervisor on a machine that is full for a moment: it tries again, and never gives the platform up."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Mapping
from pathlib import Path

import pytest

from opendsec.host import processes, supervisor
from opendsec.host.local import EDGE, Local
from opendsec.host.supervisor import NotReadyError, Supervisor
from opendsec.linux.process import spawn

pytestmark = pytest.mark.anyio


@pytest.fixture
def attempts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every other start finds no room for a process; the others end at once."""
    monkeypatch.setattr(supervisor, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(supervisor, "LONGEST_PAUSE_S", 0.001)
    names: list[str] = []

    def start(_local: Local, name: str, _environment: Mapping[str, str]) -> tuple[int, int]:
        names.append(name)
        if len(names) % 2:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        return spawn(Path("/bin/true"))

    monkeypatch.setattr(processes, "spawn", start)
    return names


async def test_a_start_without_room_is_tried_again(tmp_path: Path, attempts: list[str]) -> None:
    one = Supervisor(Local(state_dir=tmp_path, run_dir=tmp_path), {}, ready=True)
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        keeping = group.create_task(one.keep(EDGE))
        while len(attempts) < 5:
            await asyncio.sleep(0.001)
        keeping.cancel()


async def test_before_anything_is_ready_it_is_a_reason_not_to_start(tmp_path: Path, attempts: list[str]) -> None:
    with pytest.raises(NotReadyError, match="temporarily unavailable"):
        await Supervisor(Local(state_dir=tmp_path, run_dir=tmp_path), {}).keep(EDGE)
    assert attempts == [EDGE]
