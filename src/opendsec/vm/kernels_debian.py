"""The distribution's own cloud kernel as a guest kernel: its vmlinux, and the modules a guest needs.

Debian builds almost everything a microVM needs as modules, and leaves VIRTIO_MMIO_CMDLINE_DEVICES out: its devices are
found by ACPI tables only (QEMU: `acpi=on`; Firecracker writes them from version 1.8 on).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from opendsec.errors import ImageInvalidError, NodeError
from opendsec.store.programs import find_program
from opendsec.vm import kernel_image
from opendsec.vm.kernels_found import DOWNLOAD_S, Found, Say, run, uncompressed, vmlinux_of

DEFAULT_PACKAGE: Final = "linux-image-cloud-amd64"
_UPDATE = "apt-get update, and look for linux-image packages with `apt-cache search linux-image`"

WANTED: Final = (
    *("virtio_mmio", "virtio_pci", "virtio_blk", "virtio_console", "virtio_net", "virtio_rng", "virtio_balloon"),
    *("vmw_vsock_virtio_transport", "erofs", "overlay", "ext4", "crc32c_generic", "libcrc32c", "fuse", "loop"),
    *("virtio_pmem", "nd_pmem", "bridge", "br_netfilter", "veth", "nf_tables", "nft_compat", "nft_chain_nat", "xt_nat"),
    *("xt_MASQUERADE", "xt_REDIRECT", "xt_conntrack", "xt_addrtype", "xt_tcpudp", "xt_mark", "xt_comment"),
    *(
        "ipt_REJECT",
        "ip_tables",
        "iptable_nat",
        "iptable_filter",
        "ip6_tables",
        "ip6table_nat",
        "ip6table_filter",
        "tun",
    ),
    *("nft_ct", "nft_nat", "nft_masq", "nft_fib_inet", "nft_reject_inet"),
)
"""Modules a guest may need; what is built in, or not there, is not loaded. The network ones are for Docker: its rules
are of iptables, and of nftables from version 29 on.
"""
NEEDED: Final = frozenset({"virtio_mmio", "virtio_blk", "erofs", "overlay", "ext4"})


def of_package(work: Path, package: str, environment: Mapping[str, str], say: Say) -> Found:
    """Download, unpack, and take what is needed. Raises NodeError, ImageInvalidError."""
    name = real_package(package or DEFAULT_PACKAGE, environment)
    archive = download(work, name, environment, say)
    tree = work / "tree"
    unpack(archive, tree, environment)
    archive.unlink()
    say("taking kernel and modules out of it")
    return Found(
        vmlinux=vmlinux_of(image_in(tree, name).read_bytes()),
        source=f"the Debian package {name} (GPL-2.0)",
        prefix="debian",
        modules=modules_of(tree),
        command_line_devices=False,
    )


def download(work: Path, name: str, environment: Mapping[str, str], say: Say) -> Path:
    """The package's archive, below `work`; apt-get has verified it. Raises NodeError."""
    say(f"downloading {name}")
    apt = [find_program("apt-get"), "download", "-q", "-o", "APT::Sandbox::User=root", name]
    run(apt, what="apt-get download", timeout_s=DOWNLOAD_S, remedy=_UPDATE, environment=environment, cwd=work)
    return next(work.glob("*.deb"))


def unpack(archive: Path, tree: Path, environment: Mapping[str, str]) -> None:
    """All files of a package; nothing of it is run. Raises NodeError."""
    argv = [find_program("dpkg-deb"), "--extract", str(archive), str(tree)]
    run(argv, what="dpkg-deb", timeout_s=300, remedy="the package is damaged", environment=environment)


def image_in(tree: Path, name: str) -> Path:
    """The kernel in an unpacked package. Raises ImageInvalidError."""
    images = sorted((tree / "boot").glob("vmlinuz-*"))
    if not images:
        raise ImageInvalidError(f"the package {name} holds no kernel", remedy=_UPDATE)
    return images[0]


def real_package(package: str, environment: Mapping[str, str]) -> str:
    """A meta-package depends on the real one. Raises NodeError."""
    ask = [find_program("apt-cache"), "depends", "--no-recommends", "--no-suggests", package]
    lines = run(ask, what=f"apt-cache depends {package}", timeout_s=60, remedy=_UPDATE, environment=environment)
    depends = [line.split()[-1] for line in lines if line.startswith("Depends: linux-image-")]
    if depends:
        return depends[0]
    if not any(line == package for line in lines):
        raise NodeError(f"no package {package}", remedy=_UPDATE)
    return package


def modules_of(
    tree: Path, wanted: Sequence[str] = WANTED, needed: frozenset[str] = NEEDED
) -> tuple[tuple[str, bytes], ...]:
    """Those wanted below an unpacked package, each after those it needs. ImageInvalidError: a needed one is missing."""
    roots = [path for place in ("lib/modules", "usr/lib/modules") for path in (tree / place).glob("*")]
    files = {_name(path): path for root in roots for path in root.rglob("*.ko*")}
    builtin = {_name(Path(line)) for root in roots for line in _lines(root / "modules.builtin")}
    lacking = sorted(needed - files.keys() - builtin)
    if lacking:
        raise ImageInvalidError(f"the kernel has neither built in nor as a module: {', '.join(lacking)}")
    ordered: dict[str, bytes] = {}
    for name in wanted:
        _add(name, files, ordered, ())
    return tuple((f"{number:03}-{name}.ko", content) for number, (name, content) in enumerate(ordered.items()))


def _add(name: str, files: Mapping[str, Path], ordered: dict[str, bytes], above: tuple[str, ...]) -> None:
    path = files.get(name)
    if path is None or name in ordered or name in above:
        return
    content = uncompressed(path.name, path.read_bytes())
    for needed in kernel_image.needs_of(content):
        _add(needed, files, ordered, (*above, name))
    ordered[name] = content


def _name(path: Path) -> str:
    """The kernel takes `-` and `_` for the same."""
    return path.name.partition(".ko")[0].replace("-", "_")


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.is_file() else []
