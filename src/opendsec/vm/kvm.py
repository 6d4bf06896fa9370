"""Whether KVM of this host runs guests at the processor's speed: tried, never believed from a device node.

A host that is itself a virtual machine may offer /dev/kvm and execute a guest's kernel in an interpreter, a thousand
times too slow and without some instructions; Linux does not start there. So a guest of a few instructions counts in
ring 0 of long mode, where kernels run, and the processor time that takes decides. It refuses to be fooled by a busy
host: what counts is the thread's own time, not the clock's.
"""

from __future__ import annotations

import errno
import fcntl
import json
import mmap
import os
import platform
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

from opendsec.linux.boot import boot_id
from opendsec.linux.libc import address_of

DEVICE: Final = Path("/dev/kvm")
ITERATIONS: Final = 2_000_000
"""Of `dec; jnz`: about 1 ms of a processor with hardware support, 3 s of KVM's interpreter (1.4 M instructions/s)."""
MOST_S: Final = 0.2
"""Processor time all of them may take."""
_PIECES: Final = 40
"""The loop stops after any of these when the time is used up, so asking an interpreter costs little more than it."""

_API_VERSION: Final = 12
_KVM_GET_API_VERSION, _KVM_CREATE_VM, _KVM_GET_VCPU_MMAP_SIZE = 0xAE00, 0xAE01, 0xAE04
_KVM_CREATE_VCPU, _KVM_SET_USER_MEMORY_REGION, _KVM_RUN = 0xAE41, 0x4020AE46, 0xAE80
_KVM_SET_REGS, _KVM_GET_SREGS, _KVM_SET_SREGS = 0x4090AE82, 0x8138AE83, 0x4138AE84
_KVM_EXIT_HLT: Final = 5
"""linux/kvm.h"""

_MEMORY: Final = 64 * 1024
_PML4, _PDPT, _PD, _CODE = 0x1000, 0x2000, 0x3000, 0x4000
_LOOP: Final = bytes.fromhex("48ffc9 75fb f4 ebfd")
"""dec rcx; jnz -5; hlt; jmp -3"""
_CR0: Final = 0x80000001  # PG | PE
_CR4: Final = 0x20  # PAE
_EFER: Final = 0x500  # LMA | LME
_SREGS_BYTES, _SREGS_CR0, _SREGS_CR3, _SREGS_CR4, _SREGS_EFER = 312, 224, 240, 248, 264
"""struct kvm_sregs: eight segments of 24 bytes, two tables of 16, then CR0, CR2, CR3, CR4, CR8, EFER."""
_SEGMENT: Final = struct.Struct("=QIH10B")


class Kvm(StrEnum):
    """What KVM is good for here."""

    NONE = "none"
    """There is none, or it may not be used."""
    INTERPRETED = "interpreted"
    """Its calls work; guests are interpreted, and Linux does not start in them."""
    HARDWARE = "hardware"


@dataclass(frozen=True, slots=True, kw_only=True)
class KvmAnswer:
    """The finding, for people too."""

    kvm: Kvm
    sentence: str
    remedy: str = ""


def usable_kvm(remembered: Path | None = None) -> KvmAnswer:
    """Try it. Blocking, up to about half a second where guests are interpreted, a few milliseconds otherwise.

    `remembered` is a file the answer is kept in until the next boot (a refusal is not kept: rights change).
    """
    known = _recall(remembered) if remembered is not None else None
    if known is not None:
        return known
    answer = _try()
    if remembered is not None and answer.kvm is not Kvm.NONE:
        _remember(remembered, answer)
    return answer


def _try() -> KvmAnswer:
    if platform.machine() != "x86_64":
        return KvmAnswer(
            kvm=Kvm.NONE, sentence=f"machines with KVM are made on x86-64 only, this is {platform.machine()}"
        )
    try:
        spent = _time_loop()
    except OSError as error:
        return _unusable(error)
    if spent is None:
        return KvmAnswer(
            kvm=Kvm.INTERPRETED,
            sentence="KVM gave up on a guest that only counts",
            remedy="use a host with hardware virtualisation (VT-x or AMD-V; for a virtual host: nested)",
        )
    if spent >= MOST_S:
        return KvmAnswer(
            kvm=Kvm.INTERPRETED,
            sentence="KVM opens, and executes guests' kernels in an interpreter; Linux does not start in it",
            remedy="use a host with hardware virtualisation (VT-x or AMD-V; for a virtual host: nested)",
        )
    return KvmAnswer(kvm=Kvm.HARDWARE, sentence="KVM runs guests at the processor's speed")


def _unusable(error: OSError) -> KvmAnswer:
    if error.errno in (errno.ENOENT, errno.ENODEV, errno.ENXIO):
        remedy = "load kvm_intel or kvm_amd; in a virtual machine switch nested virtualisation on"
        return KvmAnswer(kvm=Kvm.NONE, sentence=f"there is no KVM: {DEVICE}: {error.strerror}", remedy=remedy)
    if error.errno in (errno.EACCES, errno.EPERM):
        remedy = f"run as root, or as a member of the group that owns {DEVICE}; in a container pass the device in"
        return KvmAnswer(kvm=Kvm.NONE, sentence=f"{DEVICE} may not be used: {error.strerror}", remedy=remedy)
    remedy = "another program may hold the processor's virtualisation (VirtualBox, VMware)"
    return KvmAnswer(kvm=Kvm.NONE, sentence=f"KVM does not make a machine: {error.strerror}", remedy=remedy)


def _time_loop() -> float | None:
    """Processor seconds of the loop, or what was spent when it was given up; None: the guest did not get through."""
    with _closing(os.open(DEVICE, os.O_RDWR | os.O_CLOEXEC)) as kvm:
        if fcntl.ioctl(kvm, _KVM_GET_API_VERSION) != _API_VERSION:
            raise OSError(errno.ENOTSUP, "it has another API version")
        size = fcntl.ioctl(kvm, _KVM_GET_VCPU_MMAP_SIZE)
        with _closing(fcntl.ioctl(kvm, _KVM_CREATE_VM)) as machine, mmap.mmap(-1, _MEMORY) as memory:
            _fill(memory)
            region = struct.pack("=IIQQQ", 0, 0, 0, _MEMORY, address_of(memory))
            fcntl.ioctl(machine, _KVM_SET_USER_MEMORY_REGION, region)
            with _closing(fcntl.ioctl(machine, _KVM_CREATE_VCPU, 0)) as cpu:
                _set_long_mode(cpu)
                with mmap.mmap(cpu, size) as state:
                    return _count(cpu, state)


@contextmanager
def _closing(fd: int) -> Iterator[int]:
    try:
        yield fd
    finally:
        os.close(fd)


def _fill(memory: mmap.mmap) -> None:
    """Page tables that map the first 2 MiB to themselves, and the loop."""
    struct.pack_into("=Q", memory, _PML4, _PDPT | 3)
    struct.pack_into("=Q", memory, _PDPT, _PD | 3)
    struct.pack_into("=Q", memory, _PD, 0x83)
    memory[_CODE : _CODE + len(_LOOP)] = _LOOP


def _set_long_mode(cpu: int) -> None:
    sregs = bytearray(_SREGS_BYTES)
    fcntl.ioctl(cpu, _KVM_GET_SREGS, sregs)
    code = _SEGMENT.pack(0, 0xFFFFFFFF, 8, 11, 1, 0, 0, 1, 1, 1, 0, 0, 0)
    data = _SEGMENT.pack(0, 0xFFFFFFFF, 16, 3, 1, 0, 1, 1, 0, 1, 0, 0, 0)
    sregs[: 6 * _SEGMENT.size] = code + 5 * data
    for offset, value in ((_SREGS_CR0, _CR0), (_SREGS_CR3, _PML4), (_SREGS_CR4, _CR4), (_SREGS_EFER, _EFER)):
        struct.pack_into("=Q", sregs, offset, value)
    fcntl.ioctl(cpu, _KVM_SET_SREGS, bytes(sregs))


def _count(cpu: int, state: mmap.mmap) -> float | None:
    begin = time.thread_time()
    for _ in range(_PIECES):
        registers = [0] * 18
        registers[2], registers[16], registers[17] = ITERATIONS // _PIECES, _CODE, 2  # rcx, rip, rflags
        fcntl.ioctl(cpu, _KVM_SET_REGS, struct.pack("=18Q", *registers))
        _run(cpu)
        if struct.unpack_from("=I", state, 8)[0] != _KVM_EXIT_HLT:
            return None
        if time.thread_time() - begin >= MOST_S:
            break
    return time.thread_time() - begin


def _run(cpu: int) -> None:
    while True:
        try:
            fcntl.ioctl(cpu, _KVM_RUN, 0)
        except InterruptedError:
            continue  # a signal for this process
        return


def _recall(path: Path) -> KvmAnswer | None:
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        if kept.pop("boot_id") != boot_id():
            return None
        return KvmAnswer(kvm=Kvm(kept["kvm"]), sentence=str(kept["sentence"]), remedy=str(kept["remedy"]))
    except (FileNotFoundError, ValueError, KeyError, AttributeError, TypeError):
        return None  # never asked, or cut short by a power cut: ask again


def _remember(path: Path, answer: KvmAnswer) -> None:
    kept = {
        "boot_id": boot_id(),
        "kvm": answer.kvm.value,
        "sentence": answer.sentence,
        "remedy": answer.remedy,
    }
    fresh = path.with_name(f"{path.name}.{os.getpid()}")
    fresh.write_text(json.dumps(kept), encoding="utf-8")
    fresh.replace(path)
