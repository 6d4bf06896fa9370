"""What all container sandboxes of a node share, made once: a /dev, a /sys, and a layer with the files about the host.

    <root>/dev/          a tmpfs with the usual nodes and links; attached read-only, with /dev/pts and /dev/shm on top
    <root>/sys/          a sysfs that shows no network interface; /sys/firmware and the power meters are hidden
    <root>/offline/      a layer above the image's: /etc/hosts, /etc/hostname, /etc/resolv.conf and the mount points
    <root>/online/       the same with the node's name servers

As a layer, these files are ordinary ones inside: changeable, and never part of what the sandbox itself has written.
The mounts are found again after a crash, and given back by `close`; running sandboxes keep their own.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from opendsec.linux import libc
from opendsec.linux.mount import mountinfo
from opendsec.linux.process import run_sync

_NODES = {"null": (1, 3), "zero": (1, 5), "full": (1, 7), "random": (1, 8), "urandom": (1, 9), "tty": (5, 0)}
_NO_NODES: Mapping[str, int] = MappingProxyType({})
_LINKS = {
    "fd": "/proc/self/fd",
    "stdin": "/proc/self/fd/0",
    "stdout": "/proc/self/fd/1",
    "stderr": "/proc/self/fd/2",
    "ptmx": "pts/ptmx",
}
_HIDDEN = ("firmware", "devices/virtual/powercap")
_MOUNT_POINTS = ("proc", "sys", "dev", "etc")
HOSTS = "127.0.0.1\tlocalhost sandbox\n::1\tlocalhost ip6-localhost ip6-loopback\n"
OFFLINE_RESOLV = "# This sandbox has no network.\n"


def usable_resolvers(resolv_conf: str) -> tuple[list[str], list[str]]:
    """(IPv4 name servers a sandbox can reach, those it cannot): a loopback address means the host's own loopback."""
    usable: list[str] = []
    refused: list[str] = []
    for line in resolv_conf.splitlines():
        words = line.split()
        if len(words) < 2 or words[0] != "nameserver":
            continue
        try:
            address = ipaddress.ip_address(words[1].partition("%")[0])
        except ValueError:
            refused.append(words[1])
            continue
        fits = address.version == 4 and not address.is_loopback and not address.is_link_local
        (usable if fits else refused).append(words[1])
    return usable, refused


def find_resolvers() -> tuple[list[str], list[str]]:
    """This host's name servers, as `usable_resolvers`; behind systemd-resolved's stub, the ones it asks."""
    usable, refused = usable_resolvers(_read_or_empty(Path("/etc/resolv.conf")))
    if not usable:
        usable, _ = usable_resolvers(_read_or_empty(Path("/run/systemd/resolve/resolv.conf")))
        refused = [] if usable else refused
    return usable, refused


def _read_or_empty(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return ""


class Templates:
    """Made by `open`, given back by `close`. Descriptors are of directories."""

    def __init__(self, root: Path, *, hostname: str) -> None:
        self._root = root
        self._hostname = hostname
        self._fds: dict[str, int] = {}

    @property
    def dev(self) -> int:
        return self._fds["dev"]

    @property
    def sys(self) -> int:
        return self._fds["sys"]

    def layer(self, *, online: bool) -> int:
        """The layer to put above the image's."""
        return self._fds["online" if online else "offline"]

    def open(self, *, resolvers: Sequence[str]) -> None:
        """Make or find everything. Raises OSError."""
        self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._make_layer("offline", OFFLINE_RESOLV)
        self._make_layer("online", "".join(f"nameserver {address}\n" for address in resolvers))
        mounted = {entry.target for entry in mountinfo()}
        for name, make in (("dev", make_dev), ("sys", _make_sys)):
            target = self._root.resolve() / name
            target.mkdir(mode=0o755, exist_ok=True)
            if str(target) not in mounted:
                make(target)
        for name in ("offline", "online", "dev", "sys"):
            self._fds[name] = os.open(self._root / name, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)

    def close(self) -> None:
        """Unmount; running sandboxes are not affected."""
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()
        root = self._root.resolve()
        below = [entry.target for entry in mountinfo() if Path(entry.target).is_relative_to(root)]
        for target in reversed(below):
            libc.umount2(target, libc.MNT_DETACH)

    def _make_layer(self, name: str, resolv_conf: str) -> None:
        layer = self._root / name
        for directory in (layer, *(layer / each for each in _MOUNT_POINTS)):
            directory.mkdir(mode=0o755, exist_ok=True)
            directory.chmod(0o755)
        for file, text in (("hosts", HOSTS), ("hostname", f"{self._hostname}\n"), ("resolv.conf", resolv_conf)):
            path = layer / "etc" / file
            path.write_text(text, encoding="ascii")
            path.chmod(0o644)


def make_dev(target: Path, more: Mapping[str, int] = _NO_NODES) -> None:
    """Mount a /dev there. `more`: further character devices, by their paths below it, with their numbers."""
    libc.mount("tmpfs", str(target), "tmpfs", libc.MS_NOSUID | libc.MS_NOEXEC, "size=64k,mode=755")
    with _unmounted_on_error(target):
        for name, (major, minor) in _NODES.items():
            os.mknod(target / name, stat.S_IFCHR | 0o666, os.makedev(major, minor))
            (target / name).chmod(0o666)
        for name, number in more.items():
            (target / name).parent.mkdir(mode=0o755, parents=True, exist_ok=True)
            os.mknod(target / name, stat.S_IFCHR | 0o666, number)
            (target / name).chmod(0o666)
        for name, link in _LINKS.items():
            (target / name).symlink_to(link)
        for name in ("pts", "shm"):
            (target / name).mkdir(mode=0o755)
        _remount_read_only(target, "tmpfs")


def _make_sys(target: Path) -> None:
    # Mounted by a process in a network namespace of its own: sysfs shows the interfaces of its mounter's namespace.
    options = "ro,nosuid,nodev,noexec"
    run_sync(["unshare", "--net", "mount", "-t", "sysfs", "-o", options, "sysfs", str(target)], timeout_s=10)
    with _unmounted_on_error(target):
        for name in _HIDDEN:
            if (target / name).is_dir():
                libc.mount("tmpfs", str(target / name), "tmpfs", libc.MS_RDONLY, "size=4k,mode=555")


def _remount_read_only(target: Path, fstype: str) -> None:
    libc.mount(
        fstype, str(target), "", libc.MS_REMOUNT | libc.MS_BIND | libc.MS_RDONLY | libc.MS_NOSUID | libc.MS_NOEXEC
    )


@contextlib.contextmanager
def _unmounted_on_error(target: Path) -> Iterator[None]:
    try:
        yield
    except BaseException:
        libc.umount2(str(target), libc.MNT_DETACH)
        raise
