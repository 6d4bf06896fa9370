"""The driver for Firecracker: the VMM for hosts with hardware virtualisation (docs/reference/firecracker.md).

    vmm = FirecrackerVmm(programs=…, run_dir=…)
    await vmm.open()
    vm = await vmm.boot(spec, place)              a new machine
    await vm.pause(); await vm.save(directory)
    other = await vmm.restore(directory, spec, other_place)

Below `Place.directory`: `vm.json` (what `find` needs), the API's and vsock's sockets, the files' names, and for a
machine whose memory comes late `lost`, the reason it was ended for. A start that fails, or is cancelled, leaves no
process and none of these.

Memory of one whole file on this host is mapped, privately, and shared by the page cache; changes over a base, and
files on a network file system, are given page by page by the memory server (`vm.userfault`).
"""

from __future__ import annotations

import asyncio
import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

from opendsec.errors import HostCapabilityError, SnapshotInvalidError, StartError
from opendsec.linux import process
from opendsec.vm import firecracker_saved
from opendsec.vm.base import Binding, Drive, MachineSpec, Place, Rates, Vmm
from opendsec.vm.firecracker_api import ApiError
from opendsec.vm.firecracker_machine import UFFD_SOCKET, VSOCK, FirecrackerVm, Record, clear
from opendsec.vm.firecracker_saved import Saved
from opendsec.vm.firecracker_start import Programs, Reach, find_by_identifier
from opendsec.vm.firecracker_starting import Starting
from opendsec.vm.guest_setup import VSOCK_PORT, command_line, firecracker_serial
from opendsec.vm.remote import is_remote
from opendsec.vm.userfault import READ_S
from opendsec.vm.userfault_client import MemoryServer

OLDEST: Final = (1, 12)
BEFORE: Final = (2, 0)
VERSION_S: Final = 30.0
MAX_DRIVES: Final = 14
"""Of the 19 interrupt lines of its devices; others are for card, vsock, entropy and balloon, and one is spare."""
GUEST_CID: Final = 3
"""Of every machine: each has a vsock of its own, which is a socket file on the host."""
_BALLOON: Final[dict[str, object]] = {"amount_mib": 0, "deflate_on_oom": True, "free_page_reporting": True}
_VERSION = re.compile(r"v(\d+)\.(\d+)\.(\d+)")
_REMEDY: Final = "opendsec firecracker install"


class _AskedError(Exception):
    """Ends a start that was only to ask something."""


class FirecrackerVmm(Vmm):
    """`programs` are the two binaries, `run_dir` the edge's own. `rates` hold for every machine, whatever it was saved
    with; `remote` says which saved ones lie on a file system whose reads may fail or hang: those get their memory page
    by page, each read within `read_s` seconds.
    """

    def __init__(
        self,
        *,
        programs: Programs,
        run_dir: Path,
        rates: Rates | None = None,
        remote: Callable[[Path], bool] = is_remote,
        read_s: float = READ_S,
    ) -> None:
        self.most_drives = MAX_DRIVES
        self._programs = programs
        self._rates = rates or Rates()
        self._run_dir = run_dir
        self._remote = remote
        self._memory = MemoryServer(run_dir, read_s=read_s)
        self._binding: Binding | None = None
        self._reports_free_pages = False

    @property
    def binding(self) -> Binding:
        if self._binding is None:
            raise HostCapabilityError("Firecracker was not opened", detail={"probe": "firecracker"})
        return self._binding

    @property
    def reports_free_pages(self) -> bool:
        """Whether this version can give pages the guest freed back to the host; asked of it by `open`."""
        return self._reports_free_pages

    async def open(self) -> None:
        for path in (self._programs.firecracker, self._programs.jailer):
            if not os.access(path, os.X_OK):
                raise _unusable(f"there is no program {path}")
        if not os.access("/dev/userfaultfd", os.R_OK | os.W_OK):
            raise _unusable("there is no /dev/userfaultfd", "boot a kernel with CONFIG_USERFAULTFD")
        version = await self._version()
        self._binding = firecracker_saved.binding_of(version)
        self._reports_free_pages = await self._asks_for_free_pages()

    async def _asks_for_free_pages(self) -> bool:
        """Whether its balloon takes the option; a VMM without a guest is asked."""
        nothing = MachineSpec(kernel=Path(os.devnull), initrd=Path(os.devnull), command_line="", memory_mib=128)
        self._run_dir.mkdir(mode=0o711, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=self._run_dir, prefix="probe-") as directory:
            try:
                async with self._starting(nothing, Place(directory=Path(directory)), []) as starting:
                    await starting.api.put("balloon", _BALLOON)
                    raise _AskedError  # noqa: TRY301
            except _AskedError:
                return True
            except StartError as error:
                if isinstance(error.__cause__, ApiError):
                    return False
                raise _unusable(f"Firecracker does not start: {error.message}") from error

    async def close(self) -> None:
        """Let go of the memory server. Machines stay."""
        await self._memory.close()

    async def _version(self) -> str:
        try:
            answer = await process.run([str(self._programs.firecracker), "--version"], timeout_s=VERSION_S)
        except OSError as error:
            raise _unusable(f"{self._programs.firecracker} does not run: {error}") from error
        version = version_in(answer.stdout)
        if version is None:
            raise _unusable(f"{self._programs.firecracker} does not say which version it is")
        if not is_supported(version):
            raise _unusable(f"Firecracker {version} is not supported: 1.12 and later versions of 1 are")
        return version

    def command_line(self) -> str:
        return command_line(vsock_port=VSOCK_PORT, console="ttyS0", accelerator=self.binding.accelerator)

    def serial_of(self, drive: Drive) -> str:
        return firecracker_serial(drive.path)

    async def boot(self, spec: MachineSpec, place: Place) -> FirecrackerVm:
        reaches = [
            Reach(name="kernel", path=spec.kernel),
            Reach(name="initrd", path=spec.initrd),
            *_drive_reaches(spec),
        ]
        async with self._starting(spec, place, reaches) as starting:
            for path, body in self._boot_calls(spec):
                await starting.api.put(path, body)
            return starting.finished()

    def _starting(self, spec: MachineSpec, place: Place, reaches: list[Reach]) -> Starting:
        return Starting(
            programs=self._programs,
            spec=spec,
            place=place,
            reaches=tuple(reaches),
            binding=self.binding,
            memory=self._memory,
        )

    def _boot_calls(self, spec: MachineSpec) -> list[tuple[str, dict[str, object]]]:
        source = {"kernel_image_path": "kernel", "initrd_path": "initrd", "boot_args": spec.command_line}
        machine = {"vcpu_count": spec.cpus, "mem_size_mib": spec.memory_mib, "track_dirty_pages": True}
        calls: list[tuple[str, dict[str, object]]] = [("boot-source", dict(source)), ("machine-config", dict(machine))]
        for drive in spec.drives:
            identifier = _drive_id(drive)
            body = {"drive_id": identifier, "path_on_host": f"drives/{drive.name}", "is_root_device": False}
            calls.append((f"drives/{identifier}", {**body, "is_read_only": drive.read_only, **self._disk_limits()}))
        if spec.balloon and self._reports_free_pages:
            calls.append(("balloon", _BALLOON))
        if spec.card is not None:
            card = {"iface_id": "eth0", "guest_mac": spec.card.mac, "host_dev_name": spec.card.tap}
            calls.append(("network-interfaces/eth0", {**card, **self._network_limits()}))
        calls.append(("vsock", {"guest_cid": GUEST_CID, "uds_path": VSOCK}))
        calls.append(("entropy", {}))
        calls.append(("actions", {"action_type": "InstanceStart"}))
        return calls

    def _disk_limits(self) -> dict[str, object]:
        return limiter(self._rates.disk_bytes, self._rates.disk_operations)

    def _network_limits(self) -> dict[str, object]:
        limits = limiter(self._rates.network_bytes, None)
        return {f"{way}_{name}": value for way in ("rx", "tx") for name, value in limits.items()}

    def _limit_calls(self, spec: MachineSpec) -> list[tuple[str, dict[str, object]]]:
        """What a restored machine is told before it runs: it was saved with the limits of that time."""
        calls: list[tuple[str, dict[str, object]]] = []
        disk, network = self._disk_limits(), self._network_limits()
        if disk:
            calls += [(f"drives/{_drive_id(one)}", {"drive_id": _drive_id(one), **disk}) for one in spec.drives]
        if network and spec.card is not None:
            calls.append(("network-interfaces/eth0", {"iface_id": "eth0", **network}))
        return calls

    async def restore(self, saved: Path, spec: MachineSpec, place: Place, *, paused: bool = False) -> FirecrackerVm:
        found, late = await asyncio.to_thread(self._check, saved, spec)
        reaches = [Reach(name="snapshot/state", path=found.state), *_drive_reaches(spec)]
        if not late:
            reaches.append(Reach(name="snapshot/mem", path=found.layers[0]))
        async with self._starting(spec, place, reaches) as starting:
            starting.record.memory = [firecracker_saved.FileIdentity.of(path) for path in found.layers]
            backend = {"backend_type": "File", "backend_path": "snapshot/mem"}
            if late:
                await starting.serve_memory(found)
                backend = {"backend_type": "Uffd", "backend_path": UFFD_SOCKET}
            body: dict[str, object] = {"snapshot_path": "snapshot/state", "mem_backend": backend}
            limits = self._limit_calls(spec)
            body |= {"enable_diff_snapshots": True, "resume_vm": not paused and not limits}
            if spec.card is not None:
                body["network_overrides"] = [{"iface_id": "eth0", "host_dev_name": spec.card.tap}]
            try:
                await starting.api.put("snapshot/load", body)
            except ApiError as error:
                raise _load_error(saved, error) from error
            for path, fields in limits:
                await starting.api.patch(path, fields)
            if limits and not paused:
                await starting.api.patch("vm", {"state": "Resumed"})
            return starting.finished()

    def _check(self, saved: Path, spec: MachineSpec) -> tuple[Saved, bool]:
        """The saved files, and whether memory comes page by page. Blocking."""
        found = firecracker_saved.check(saved, self.binding, spec)
        return found, len(found.layers) > 1 or self._remote(saved)

    async def find(self, place: Place) -> FirecrackerVm | None:
        record = Record.read(place.directory)
        if record is None:
            return None
        if record.pid:
            identity: process.ProcessIdentity | None = process.ProcessIdentity(record.pid, record.start_ticks)
        else:  # it was being started when its starter died
            pid: int | None = await asyncio.to_thread(find_by_identifier, record.identifier)
            identity = process.identify(pid) if pid is not None else None
            record.pid = pid or 0
        pidfd = process.open_process(identity) if identity is not None else None
        if pidfd is None:
            clear(place.directory)
            return None
        vm = FirecrackerVm(record, place.directory, pidfd, self.binding, self._memory)
        if not record.running:  # whoever started it never learnt whether it came up
            await vm.kill()
            return None
        return vm


def version_in(output: bytes) -> str | None:
    """`1.12.1` of what `--version` prints."""
    found = _VERSION.search(output.decode("utf-8", "replace"))
    return ".".join(found.groups()) if found else None


def is_supported(version: str) -> bool:
    """Whether machines are run under that version, as `version_in` gives it."""
    return OLDEST <= tuple(int(part) for part in version.split("."))[:2] < BEFORE


def _drive_id(drive: Drive) -> str:
    return drive.name.replace("-", "_")  # Firecracker takes no other sign


def _drive_reaches(spec: MachineSpec) -> list[Reach]:
    return [Reach(name=f"drives/{one.name}", path=one.path, read_only=one.read_only) for one in spec.drives]


def limiter(a_second: int | None, operations: int | None) -> dict[str, object]:
    """A rate limiter's fields, empty without a limit: buckets that are refilled once a second."""
    buckets = {
        name: {"size": size, "refill_time": 1000}
        for name, size in (("bandwidth", a_second), ("ops", operations))
        if size is not None
    }
    return {"rate_limiter": buckets} if buckets else {}


def _load_error(saved: Path, error: ApiError) -> SnapshotInvalidError | StartError:
    if re.search(r"deserialize|CRC|[Cc]hecksum|snapshot (version|data)|magic|CPU", error.fault):
        return SnapshotInvalidError(
            f"the saved machine {saved.name} is damaged: Firecracker says: {error.fault}",
            detail={"path": str(saved)},
            remedy="start from the image, or from another snapshot",
        )
    return StartError(f"Firecracker does not restore {saved.name}: {error.fault}")


def _unusable(sentence: str, remedy: str = _REMEDY) -> HostCapabilityError:
    return HostCapabilityError(sentence, detail={"probe": "firecracker"}, remedy=remedy)
