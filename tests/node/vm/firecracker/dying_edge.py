"""A process that starts a machine and is killed at one step of it.

    python dying_edge.py STEP SAVED RUN_DIR PLACE STATE HOST_ID

STEP counts the times the record of the machine is written: it dies just before that one, or after the last for `done`.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import sys
from pathlib import Path

from opendsec.vm.base import MachineSpec, Place
from opendsec.vm.firecracker import FirecrackerVmm
from opendsec.vm.firecracker_install import find_programs
from opendsec.vm.firecracker_machine import Record


async def main(step: str, saved: str, run_dir: str, place: str, state: str, host_id: str) -> None:
    spec: MachineSpec = pickle.loads(sys.stdin.buffer.read())
    write, written = Record.write, 0

    def write_or_die(record: Record, directory: Path) -> None:
        nonlocal written
        written += 1
        if str(written) == step:
            os.kill(os.getpid(), signal.SIGKILL)
        write(record, directory)

    vmm = FirecrackerVmm(programs=find_programs(Path(state)), run_dir=Path(run_dir))
    await vmm.open()
    Record.write = write_or_die  # type: ignore[assignment,method-assign]
    await vmm.restore(Path(saved), spec, Place(directory=Path(place), host_id=int(host_id)))
    assert step == "done", f"it was written {written} times"
    os.kill(os.getpid(), signal.SIGKILL)


asyncio.run(main(*sys.argv[1:]))
