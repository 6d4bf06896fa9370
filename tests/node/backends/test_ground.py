"""Backends of one edge share its number: the first claims it, the last gives it up, and not before nothing is left."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from opendsec.backends.ground import Ground
from opendsec.linux.cgroup import CgroupLimits, find_mounts
from opendsec.linux.node_number import claim

pytestmark = [pytest.mark.anyio, pytest.mark.root, pytest.mark.cgroup]


async def test_the_last_backend_gives_the_number_up(tmp_path: Path) -> None:
    root = f"opendsec-ground-{os.getpid()}"
    unified = find_mounts().unified
    assert unified is not None
    ground = Ground(tmp_path, cgroup_root=root)
    number, one = await ground.enter()
    again, other = await ground.enter()
    assert again is number
    ground.leave(one)
    with other.create("sbx", CgroupLimits(), owner=0):
        assert (unified / root / "latency/sbx").is_dir()
    ground.leave(other)  # as when an edge ends and a sandbox lives on
    assert (unified / root).is_dir()
    second, third = await ground.enter()
    assert second.number == number.number
    await third.remove("sbx", timeout_s=10)
    ground.leave(third)
    assert not (unified / root).exists()
    fresh = await claim(unified, owner=str(tmp_path), root=root)
    fresh.release()
