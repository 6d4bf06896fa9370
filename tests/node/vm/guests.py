"""A real guest for tests: Linux under QEMU's emulation with a few words of QEMU, the agent as init, and an image.

The image is two EROFS layers, the lower one in two files. Nothing of the VM drivers is used here.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests.capabilities import STATE_DIR

from opendsec.guest.base import GuestLostError
from opendsec.guest.channel import Channel, connect
from opendsec.guest.machine import ExtraDisk, GuestSetup, Identity, RootLayer
from opendsec.linux.launch import GUEST_PATH
from opendsec.linux.libc import tsc_khz
from opendsec.store.programs import find_program, run_program
from opendsec.vm.base import Accelerator
from opendsec.vm.guest_setup import SERIAL_PORT, command_line
from opendsec.vm.initrd import write_initrd
from opendsec.vm.kernels import find_kernel

BOOT_S = 90.0
HELLO_S = 15.0
DISK_MIB = 64
SETX = r"""
#include <sys/xattr.h>
#include <string.h>
int main(int n, char **a) { return n != 4 || lsetxattr(a[1], a[2], a[3], strlen(a[3]), 0) ? 1 : 0; }
"""
HOG = r"""
#include <stdlib.h>
int main(void) { for (char *a; (a = malloc(1 << 20));) for (int i = 0; i < 1 << 20; i += 4096) a[i] = 1; return 9; }
"""
HOLD = r"""
/* Holds the next child of init where it is born, until it ends itself. */
#include <stdio.h>
#include <sys/ptrace.h>
#include <sys/wait.h>
#include <unistd.h>
int main(void) {
    int status = 0;
    if (ptrace(PTRACE_SEIZE, 1, 0, PTRACE_O_TRACEFORK) < 0) return perror("init"), 1;
    puts("traced"), fflush(stdout);
    while (waitpid(1, &status, __WALL) == 1 && status >> 8 != (5 | PTRACE_EVENT_FORK << 8))
        ptrace(PTRACE_CONT, 1, 0, 0);
    ptrace(PTRACE_DETACH, 1, 0, 0);
    puts("held"), fflush(stdout);
    for (;;) pause();
}
"""
IDENTITY = Identity(machine_id="0" * 31 + "1", generation="first", address="10.0.2.15/24", gateway="10.0.2.2")
SETUP = GuestSetup(
    layers=(RootLayer(meta="base", data="base-data"), RootLayer(meta="work")),
    writable="rw",
    disks=(ExtraDisk(drive="docker", mount_point="/var/lib/docker"),),
    identity=IDENTITY,
    pids_limit=64,
)


def run(*argv: str | Path) -> None:
    """A program that must succeed."""
    ended = run_program([find_program(str(argv[0])), *map(str, argv[1:])], timeout_s=120)
    assert ended.status == 0, ended.tail


def make_image(folder: Path) -> None:
    """`base`, `base-data` and `work` in `folder`."""
    base, work = folder / "base.tree", folder / "work.tree"
    for name in ("bin", "etc", "tmp", "root", "var/lib/gone", "opt/old/deep"):
        (base / name).mkdir(parents=True)
    (base / "tmp").chmod(0o1777)
    shutil.copy("/bin/busybox", base / "bin/busybox")
    for name in subprocess.run(["/bin/busybox", "--list"], capture_output=True, text=True, check=True).stdout.split():
        if name != "busybox":
            (base / "bin" / name).symlink_to("busybox")
    for name, source in (("setx", SETX), ("hog", HOG), ("hold", HOLD)):
        (folder / f"{name}.c").write_text(source)
        run("gcc", "-static", "-O0", "-o", base / "bin" / name, folder / f"{name}.c")
    (base / "etc/passwd").write_text("root:x:0:0::/root:/bin/sh\nann:x:1000:1000::/tmp:/bin/sh\n")
    (base / "etc/group").write_text("root:x:0:\nann:x:1000:\n")
    (base / "etc/hosts").write_text("of the image\n")
    (base / "opt/old/deep/file").write_text("old\n")
    (base / "opt/both").write_text("base\n")
    (work / "opt").mkdir(parents=True)
    (work / "opt/both").write_text("work\n")
    (work / "opt/second").write_text("second\n" * 1000)
    run("mkfs.erofs", "--quiet", "--chunksize=4096", f"--blobdev={folder / 'base-data'}", folder / "base", base)
    run("mkfs.erofs", "--quiet", folder / "work", work)


def make_disk(path: Path, mib: int = DISK_MIB) -> Path:
    """An ext4 file system in a file."""
    with path.open("wb") as file:
        file.truncate(mib << 20)
    run("mkfs.ext4", "-q", "-F", "-E", "lazy_itable_init=1", path)
    return path


@dataclass
class Machine:
    """One QEMU process."""

    folder: Path
    images: Path
    memory_mib: int = 192
    arguments: tuple[str, ...] = ()
    drives: tuple[str, ...] = ("base", "base-data", "work")
    process: subprocess.Popen[bytes] = field(init=False)

    @property
    def socket(self) -> Path:
        return self.folder / "agent.sock"

    @property
    def monitor(self) -> Path:
        return self.folder / "qmp.sock"

    def launch(self) -> None:
        kernel = find_kernel(STATE_DIR)
        initrd = write_initrd(self.folder, agent=GUEST_PATH, modules=kernel.modules)
        words = command_line(console="ttyS0", accelerator=Accelerator.TCG, tsc_khz=tsc_khz())
        acpi = "off" if kernel.facts.command_line_devices else "on"
        argv = [find_program("qemu-system-x86_64"), "-accel", "tcg,tb-size=64", "-cpu", "max", "-display", "none"]
        argv += ["-M", f"microvm,x-option-roms=off,rtc=on,isa-serial=on,acpi={acpi},auto-kernel-cmdline=on"]
        argv += ["-m", str(self.memory_mib), "-nodefaults", "-no-user-config", "-no-reboot"]
        argv += ["-kernel", str(kernel.vmlinux), "-initrd", str(initrd), "-append", words]
        argv += ["-serial", f"file:{self.folder / 'console'}", "-qmp", f"unix:{self.monitor},server=on,wait=off"]
        argv += ["-chardev", f"socket,id=agent,path={self.socket},server=on,wait=off"]
        argv += ["-device", "virtio-serial-device", "-device", f"virtserialport,chardev=agent,name={SERIAL_PORT}"]
        argv += ["-netdev", "user,id=net,restrict=on", "-device", "virtio-net-device,netdev=net"]
        for number, (name, path, read_only) in enumerate(self._drives()):
            argv += ["-drive", f"id=d{number},file={path},format=raw,if=none,read-only={read_only}"]
            argv += ["-device", f"virtio-blk-device,drive=d{number},serial={name}"]
        log = (self.folder / "qemu.log").open("wb")
        with log:
            self.process = subprocess.Popen([*argv, *self.arguments], stdout=log, stderr=log)

    def _drives(self) -> Sequence[tuple[str, Path, str]]:
        own = [(name, self.folder / name, "off") for name in ("rw", "docker") if (self.folder / name).exists()]
        return [*((name, self.images / name, "on") for name in self.drives), *own]

    async def channel(self) -> Channel:
        """Connect as soon as QEMU listens and the agent answers. A HELLO that comes before the agent has seen the end
        of what was on the line is lost with it: a host asks once more.
        """
        deadline = time.monotonic() + BOOT_S
        while True:
            assert self.process.poll() is None, self.words()
            with suppress(GuestLostError):
                return await connect(self.socket, timeout_s=max(1.0, min(HELLO_S, deadline - time.monotonic())))
            assert time.monotonic() < deadline, self.words()

    def words(self) -> str:
        """What QEMU and the kernel said."""
        names = ("qemu.log", "console")
        return "\n".join(
            (self.folder / name).read_text(errors="replace") for name in names if (self.folder / name).exists()
        )

    def wait(self, timeout_s: float = 30) -> int:
        return self.process.wait(timeout_s)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


def new_machine(folder: Path, images: Path, *, memory_mib: int = 192, arguments: tuple[str, ...] = ()) -> Machine:
    """With fresh disks in `folder`, which is made; not launched."""
    folder.mkdir()
    make_disk(folder / "rw")
    make_disk(folder / "docker", 16)
    return Machine(folder, images, memory_mib, arguments)


def copy_disks(source: Machine, folder: Path) -> None:
    """The disks of a machine that stands still."""
    folder.mkdir()
    for name in ("rw", "docker"):
        shutil.copyfile(source.folder / name, folder / name)
        os.sync()
