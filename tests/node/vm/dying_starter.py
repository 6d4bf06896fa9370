"""A process that starts a QEMU and is killed just before it puts it into its control group.

python dying_starter.py DIRECTORY
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

from opendsec.vm.base import MachineSpec, Place
from opendsec.vm.qemu import QemuVmm


async def main(directory: Path) -> None:
    memory = directory / "memory"
    memory.touch()
    os.truncate(memory, 128 << 20)
    procs, write = os.open(os.devnull, os.O_WRONLY), os.write

    def write_or_die(fd: int, content: bytes) -> int:
        if fd == procs:
            write(1, content + b"\n")
            os.kill(os.getpid(), signal.SIGKILL)
        return write(fd, content)

    os.write = write_or_die  # type: ignore[assignment]
    vmm = QemuVmm(state_dir=directory)
    await vmm.open()
    spec = MachineSpec(kernel=Path(), initrd=Path(), command_line="", memory_mib=128)
    # One that is to be restored waits for its devices, and needs no kernel.
    await vmm._start(spec, Place(directory=directory, cgroup_procs=(procs,)), memory=memory, restored=True)


asyncio.run(main(Path(sys.argv[1])))
