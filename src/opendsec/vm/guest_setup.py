"""What a guest boots with: the kernel's command line, and how its agent finds the host. Pure.

Nothing secret is ever on a command line: every program of the guest can read it (/proc/cmdline).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from opendsec.vm.base import Accelerator

VSOCK_PORT = 5000
SERIAL_PORT = "agent.0"
"""Name of the virtio-serial port."""
SERIAL_BYTES = 20
"""What a virtio disk's serial number can hold."""

_ALWAYS = ("panic=-1", "reboot=t", "quiet", "random.trust_cpu=on", "cgroup_no_v1=all")


def command_line(
    *,
    vsock_port: int | None = None,
    console: str | None = None,
    accelerator: Accelerator = Accelerator.KVM,
    tsc_khz: int | None = None,
    more: Sequence[str] = (),
) -> str:
    """For a guest whose agent waits on `vsock_port`, or on the virtio-serial port when that is None.

    `console`: where the kernel talks, such as `ttyS0`; None: nowhere. `tsc_khz`: the host's time stamp counter; under
    emulation the guest's own measuring fails under load and the kernel hangs then.
    """
    words = [f"console={console}" if console else "console=hvc9", *_ALWAYS]
    if accelerator is Accelerator.TCG and tsc_khz:
        words.append(f"tsc_early_khz={tsc_khz}")
    transport = "serial" if vsock_port is None else f"vsock:{vsock_port}"
    return " ".join([*words, f"opendsec.transport={transport}", *more])


def firecracker_serial(path: Path) -> str:
    """The serial number Firecracker gives a drive: of its file, not of its name (it has no setting for it)."""
    status = path.stat()
    return f"{status.st_dev}{status.st_rdev}{status.st_ino}"[:SERIAL_BYTES]
