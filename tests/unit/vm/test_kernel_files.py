"""Kernel files are what they say: bzImage, ELF, notes, the wheel's flat kernel; the archive guests start from."""

from __future__ import annotations

import gzip
import lzma
import struct
import zlib
from pathlib import Path

import pytest

from opendsec.errors import HostCapabilityError, ImageInvalidError, InvalidSpecError
from opendsec.vm import kernel_image, kernels_install
from opendsec.vm.base import Accelerator
from opendsec.vm.guest_setup import command_line
from opendsec.vm.initrd import archive, entries_of
from opendsec.vm.kernel_image import FlatKernel, needs_of, pvh_entry, release_of, vmlinux_of, wrapped
from opendsec.vm.kernels import default_name, find_kernel, installed
from opendsec.vm.kernels_source import unmet

NOTE = struct.pack("<III", 4, 8, 18) + b"Xen\0" + struct.pack("<Q", 0x1000000)
FLAT = FlatKernel(content=b"code Linux version 6.1.2-test (x) " + NOTE + b"tail", address=0x1000000, entry=0x1000123)


def no_program(name: str, payload: bytes) -> bytes:
    raise AssertionError(name)


def bzimage(payload: bytes) -> bytes:
    head = bytearray(1024)
    head[0x1F1] = 1
    head[0x202:0x206] = b"HdrS"
    struct.pack_into("<II", head, 0x248, 16, len(payload))
    return bytes(head) + bytes(16) + payload


def test_a_flat_kernel_becomes_an_elf_with_its_note() -> None:
    made = wrapped(FLAT)
    kernel_image.check_vmlinux(made)
    assert pvh_entry(made) == 0x1000000
    assert release_of(made) == "6.1.2-test"
    assert struct.unpack_from("<Q", made, 24)[0] == 0x1000123
    with pytest.raises(ImageInvalidError, match="note"):
        wrapped(FlatKernel(content=b"nothing", address=0, entry=0))


@pytest.mark.parametrize("pack", [gzip.compress, lambda data: lzma.compress(data, check=lzma.CHECK_CRC32)])
def test_the_elf_comes_out_of_a_bzimage(pack) -> None:  # type: ignore[no-untyped-def]
    made = wrapped(FLAT)
    assert vmlinux_of(bzimage(pack(made)), no_program) == made
    assert vmlinux_of(made, no_program) == made


def test_programs_are_asked_for_zstd_and_the_size_is_checked() -> None:
    made = wrapped(FLAT)
    payload = b"\x28\xb5\x2f\xfd...." + len(made).to_bytes(4, "little")
    assert vmlinux_of(bzimage(payload), lambda name, _: made if name == "zstd" else b"") == made
    with pytest.raises(ImageInvalidError, match="cut or damaged"):
        vmlinux_of(bzimage(payload), lambda *_: made[:-1])


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"#!/bin/sh\n", "neither"),
        (bzimage(gzip.compress(wrapped(FLAT)))[:-9], "cut"),
        (bzimage(b"\x1f\x8b\x08\x00" + bytes(50)), "cannot be decompressed"),
        (bzimage(gzip.compress(b"text")), "does not hold"),
        (bzimage(b"ABCD"), "not known"),
    ],
)
def test_what_is_no_kernel_is_refused(content: bytes, words: str) -> None:
    with pytest.raises(ImageInvalidError, match=words):
        vmlinux_of(content, no_program)


def test_a_kernel_that_is_not_all_there_is_refused() -> None:
    """Its head is whole, so it would be installed and start nothing."""
    made = wrapped(FLAT)
    far = made[:32] + b"\xff" * 8 + made[40:]
    for cut in (made[:-1], made[:4096], made[:100], far):
        with pytest.raises(ImageInvalidError, match="is cut"):
            kernel_image.check_vmlinux(cut)
    with pytest.raises(ImageInvalidError, match="neither"):
        vmlinux_of(bzimage(b"")[:0x210], no_program)


def test_a_file_larger_than_any_kernel_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "large").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ImageInvalidError, match="no kernel has more"):
        kernels_install.of_file(tmp_path / "large")


def test_modules_say_what_they_need() -> None:
    assert needs_of(b"x\0license=GPL\0depends=virtio,virtio-ring\0y") == ("virtio", "virtio_ring")
    assert needs_of(b"x\0depends=\0y") == ()


def test_options_a_source_does_not_know_are_named() -> None:
    assert unmet("# no\nCONFIG_A=y\nCONFIG_B=y\n", "CONFIG_A=y\n# CONFIG_B is not set\n") == ["CONFIG_B=y"]


def test_the_archive_is_what_the_kernel_reads_and_always_the_same() -> None:
    entries = entries_of(b"agent", [("virtio", b"one"), ("erofs", b"two")])
    made = b"".join(archive(entries))
    assert made == b"".join(archive(entries))
    assert len(made) % 512 == 0
    found, at = {}, 0
    while True:
        assert made[at : at + 6] == b"070701"
        numbers = [int(made[at + 6 + 8 * i : at + 14 + 8 * i], 16) for i in range(13)]
        name = made[at + 110 : at + 110 + numbers[11] - 1].decode()
        start = at + (110 + numbers[11] + 3) // 4 * 4
        if name == "TRAILER!!!":
            break
        found[name] = (oct(numbers[1]), made[start : start + numbers[6]], (numbers[9], numbers[10]))
        at = start + (numbers[6] + 3) // 4 * 4
    assert found["init"] == ("0o100755", b"agent", (0, 0))
    assert found["dev/console"][2] == (5, 1)
    assert [name for name in found if name.endswith(".ko")] == ["modules/000-virtio.ko", "modules/001-erofs.ko"]


def test_a_command_line_says_how_the_host_is_met() -> None:
    assert "opendsec.transport=serial" in command_line().split()
    words = command_line(vsock_port=5000, accelerator=Accelerator.TCG, tsc_khz=2_000_000).split()
    assert {"opendsec.transport=vsock:5000", "tsc_early_khz=2000000"} <= set(words)
    assert not any(word.startswith("tsc") for word in command_line(tsc_khz=1).split())


def test_a_kernel_is_installed_whole_found_and_believed_by_its_hash(tmp_path: Path) -> None:
    with pytest.raises(HostCapabilityError, match="no guest kernel is installed"):
        find_kernel(tmp_path)
    source = tmp_path / "vmlinux"
    source.write_bytes(wrapped(FLAT))
    (tmp_path / "kernels/.new-left/by").mkdir(parents=True)  # of an installation that was killed
    facts = kernels_install.install(tmp_path, str(source), say=lambda _: None)
    assert sorted(path.name for path in (tmp_path / "kernels").iterdir()) == ["default", facts.name]
    assert (facts.name, facts.pvh, default_name(tmp_path)) == ("file-6.1.2-test", True, facts.name)
    assert find_kernel(tmp_path).vmlinux.read_bytes() == source.read_bytes()
    kernels_install.install(tmp_path, str(source), say=lambda _: None)
    assert [one.name for one in installed(tmp_path)] == [facts.name]
    with pytest.raises(HostCapabilityError, match="installed: file-6"):
        find_kernel(tmp_path, "other")
    vmlinux = tmp_path / "kernels" / facts.name / "vmlinux"
    vmlinux.chmod(0o644)
    vmlinux.write_bytes(vmlinux.read_bytes()[:-1] + b"x")
    with pytest.raises(HostCapabilityError, match="is not the file"):
        find_kernel(tmp_path)
    kernels_install.remove(tmp_path, facts.name)
    assert list((tmp_path / "kernels").iterdir()) == []


@pytest.mark.parametrize("origin", ["text", "wheel.whl", "missing"])
def test_what_cannot_be_installed_leaves_nothing(tmp_path: Path, origin: str) -> None:
    (tmp_path / "text").write_text("no kernel")
    (tmp_path / "wheel.whl").write_bytes(zlib.compress(b"another wheel"))
    with pytest.raises((ImageInvalidError, InvalidSpecError)):
        kernels_install.install(tmp_path, str(tmp_path / origin), say=lambda _: None)
    assert list((tmp_path / "kernels").iterdir()) == []
