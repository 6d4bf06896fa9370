"""A run directory, a disk and a driver of a test's own; at the end every machine is ended, and nothing may be left."""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.node.vm.tiny_guest import run

from opendsec.guest.channel import Channel
from opendsec.vm.base import Drive, MachineSpec, Place
from opendsec.vm.firecracker import FirecrackerVmm
from opendsec.vm.firecracker_machine import FirecrackerVm
from opendsec.vm.firecracker_start import Programs

MIB = 1024 * 1024
JAILED = 70_001
PAGES = 2048
SEED = 7
CONNECT_S = 40.0


class Yard:
    """`options` are FirecrackerVmm's."""

    def __init__(self, programs: Programs, kernel: Path, **options: Any) -> None:
        self.programs = programs
        self.run_dir = Path(tempfile.mkdtemp(prefix="ods-fc-", dir="/run"))
        self.disk = Path(tempfile.mkdtemp(prefix="opendsec-test-", dir="/var/tmp"))
        self.vmm = FirecrackerVmm(programs=programs, run_dir=self.run_dir, **options)
        (self.disk / "initrd").write_bytes(bytes(512))
        (self.disk / "base").write_bytes(b"what is on the base".ljust(4096, b"\0"))
        self.spec = MachineSpec(
            kernel=kernel,
            initrd=self.disk / "initrd",
            command_line="console=ttyS0",
            memory_mib=64,
            drives=(Drive(name="base", path=self.disk / "base"), self.scratch("scratch")),
        )
        self._numbers = itertools.count(1)
        self._vms: list[FirecrackerVm] = []
        self.channels: list[Channel] = []

    async def __aenter__(self) -> Self:
        await self.vmm.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for channel in self.channels:
            await channel.aclose()
        for vm in self._vms:
            await vm.kill()
        left = [str(path) for path in self.run_dir.glob("m*/*")]
        processes = self.processes()
        await self.vmm.close()
        left += [str(path) for path in self.run_dir.glob("userfault*")]
        shutil.rmtree(self.run_dir)
        shutil.rmtree(self.disk)
        if value is None:
            assert left == []
            assert processes == []

    def processes(self) -> list[int]:
        """VMMs that run out of this yard, however they were started."""
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                words = (entry / "cmdline").read_text()
                # a jail's own path is nowhere but in its mounts
                places = (os.readlink(entry / "cwd"), (entry / "mountinfo").read_text(), words)
            except OSError:
                continue
            if "firecracker" in words and any(f"{self.run_dir}/" in place for place in places):
                found.append(int(entry.name))
        return found

    def scratch(self, name: str) -> Drive:
        """A writable drive called `scratch`."""
        path = self.disk / name
        path.write_bytes(bytes(4096))
        return Drive(name="scratch", path=path, read_only=False)

    def with_scratch(self, name: str) -> MachineSpec:
        """The machine with a writable disk of its own."""
        return replace(self.spec, drives=(self.spec.drives[0], self.scratch(name)))

    def place(self, *, host_id: int = 0, **options: Any) -> Place:
        """A fresh one."""
        directory = self.run_dir / f"m{next(self._numbers)}"
        directory.mkdir()
        return Place(directory=directory, host_id=host_id, **options)

    def folder(self) -> Path:
        """An empty directory to save in."""
        directory = self.disk / f"saved{next(self._numbers)}"
        directory.mkdir()
        return directory

    def living(self) -> list[FirecrackerVm]:
        """Machines that have not been ended."""
        return [vm for vm in self._vms if Path(f"/proc/{vm.pid}").exists()]

    def keep(self, vm: FirecrackerVm) -> FirecrackerVm:
        """End it with the yard."""
        self._vms.append(vm)
        return vm

    async def boot(self, *, host_id: int = 0) -> FirecrackerVm:
        return self.keep(await self.vmm.boot(self.spec, self.place(host_id=host_id)))

    async def restore(self, saved: Path, *, host_id: int = 0, spec: MachineSpec | None = None) -> FirecrackerVm:
        place = self.place(host_id=host_id)
        return self.keep(await self.vmm.restore(saved, spec or self.spec, place))

    async def guest(self, vm: FirecrackerVm) -> Channel:
        channel = await vm.connect(timeout_s=CONNECT_S)
        self.channels.append(channel)
        return channel

    async def template(self, *, host_id: int = 0, whole: bool = False) -> Path:
        """Saved with `PAGES` pages filled; the machine itself is gone."""
        vm = await self.boot(host_id=host_id)
        guest = await self.guest(vm)
        assert await run(guest, 1, f"fill {PAGES} {SEED}") == (0, b"%d" % PAGES)
        saved = self.folder()
        await vm.pause()
        await vm.save(saved, whole=whole)
        await vm.kill()
        return saved

    async def wrong_pages(self, vm: FirecrackerVm, *, pages: int = PAGES, seed: int = SEED) -> int:
        """How many of the filled pages do not hold what was filled in."""
        guest = await self.guest(vm)
        status, output = await run(guest, 1000, f"check {pages} {seed}")
        assert status == 0
        return int(output)
