"""Starting the VMM's process: its files within reach under names of its own, its console bounded, and, unless it runs
as root, in a jail.

Without a jail its working directory is `Place.directory`, and the files are symbolic links there. In a jail (the
`jailer` that comes with Firecracker) they are mounts in a mount namespace made for this start: the host never sees
them, and they end with the process, however that ends. Both ways every machine has the same relative names for its
files, so a restored one finds its own under the names the saved one used.

The console is a sealed memory file: it takes the first 64 KiB and refuses the rest, whatever the guest prints.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

from opendsec.linux import libc, process

T = TypeVar("T")

CONSOLE_BYTES: Final = 64 * 1024
JAIL: Final = "jail"
API_SOCKET: Final = "api.sock"
_PROGRAM: Final = "firecracker"
"""The jailer makes a directory of this name, and refuses programs whose name does not hold it."""
_JAIL_FILES: Final = 2048
"""Most open files of a jailed VMM: about 20, and one for each vsock connection."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """One file of the host and the relative name the VMM opens it by."""

    name: str
    path: Path
    read_only: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Programs:
    """The two binaries."""

    firecracker: Path
    jailer: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """One process to start."""

    programs: Programs
    identifier: str
    """Letters, digits and `-`, unlike any other's: a VMM whose start was cut short is found by it."""
    directory: Path
    host_id: int
    reaches: tuple[Reach, ...]

    @property
    def root(self) -> Path:
        """What the VMM's relative names are relative to, on the host."""
        return root_of(self.directory, self.identifier, jailed=self.host_id != 0)


def root_of(directory: Path, identifier: str, *, jailed: bool) -> Path:
    """Where a VMM's relative names begin, on the host."""
    return directory / JAIL / _PROGRAM / identifier / "root" if jailed else directory


def spawn(start: Start, console: int) -> tuple[int, int, int]:
    """(pid, pidfd, gate) of the VMM, which waits at its gate (`process.spawn_at_gate`). Blocking; from a thread of its
    own, whose directory and mounts it changes. Raises OSError.
    """
    fds = {1: console, 2: console}
    options = ["--api-sock", API_SOCKET, "--level", "Error"]
    if start.host_id == 0:
        _link(start)
        libc.unshare(libc.CLONE_FS)
        os.chdir(start.directory)
        argv = ["--id", start.identifier, *options]
        return process.spawn_at_gate(start.programs.firecracker, argv=argv, fds=fds)
    _mount_into_jail(start)
    argv = [
        *("--id", start.identifier, "--exec-file", str(start.programs.firecracker)),
        *("--uid", str(start.host_id), "--gid", str(start.host_id)),
        *("--chroot-base-dir", str(start.directory / JAIL), "--resource-limit", f"no-file={_JAIL_FILES}"),
        *("--", *options),
    ]
    return process.spawn_at_gate(start.programs.jailer, argv=argv, fds=fds)


def _link(start: Start) -> None:
    for reach in start.reaches:
        link = start.directory / reach.name
        link.parent.mkdir(exist_ok=True)
        link.symlink_to(reach.path)


def _mount_into_jail(start: Start) -> None:
    root = start.root
    root.mkdir(mode=0o755, parents=True)
    for above in (start.directory / JAIL, start.directory / JAIL / _PROGRAM, root.parent):
        above.chmod(0o755)
    libc.unshare(libc.CLONE_NEWNS)
    libc.mount("none", "/", flags=libc.MS_REC | libc.MS_PRIVATE)
    for name in ("dev", "save"):
        (root / name).mkdir(mode=0o755)
    libc.mount("tmpfs", root / "dev", "tmpfs", libc.MS_NOSUID | libc.MS_NOEXEC, "mode=755,size=64k")
    for reach in start.reaches:
        target = root / reach.name
        target.parent.mkdir(exist_ok=True)
        target.touch()
        libc.mount(reach.path, target, flags=libc.MS_BIND)
        safe = libc.MS_NOSUID | libc.MS_NODEV | libc.MS_NOEXEC | (libc.MS_RDONLY if reach.read_only else 0)
        libc.mount("none", target, flags=libc.MS_REMOUNT | libc.MS_BIND | safe)
        if not reach.read_only:
            os.chown(reach.path, start.host_id, start.host_id)


@contextlib.contextmanager
def open_console() -> Iterator[int]:
    """A memory file of fixed size for the console; read it by /proc/PID/fd/1."""
    fd = os.memfd_create("console", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, CONSOLE_BYTES)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
        yield fd
    finally:
        os.close(fd)


def read_console(fd: int) -> str:
    """What has been printed so far."""
    return os.pread(fd, CONSOLE_BYTES, 0).rstrip(b"\0").decode("utf-8", "replace")


def mount_for_saving(pid: int, target: Path) -> None:
    """Show a directory of the host to a jailed VMM as `save`. Blocking; from a thread of its own. Raises OSError."""
    tree = libc.open_tree(libc.AT_FDCWD, target, libc.OPEN_TREE_CLONE | libc.OPEN_TREE_CLOEXEC)
    try:
        _enter_mounts(pid)
        libc.move_mount(tree, "", libc.AT_FDCWD, "/save", libc.MOVE_MOUNT_F_EMPTY_PATH)
    finally:
        os.close(tree)


def unmount_after_saving(pid: int) -> None:
    """Undo `mount_for_saving`; no mount there is no error. Blocking; from a thread of its own. Raises OSError."""
    _enter_mounts(pid)
    with contextlib.suppress(FileNotFoundError):
        libc.umount2("/save", libc.MNT_DETACH | libc.UMOUNT_NOFOLLOW)


def _enter_mounts(pid: int) -> None:
    libc.unshare(libc.CLONE_FS)
    with Path(f"/proc/{pid}/ns/mnt").open("rb") as namespace:
        libc.setns(namespace.fileno(), libc.CLONE_NEWNS)


def in_own_thread(call: Callable[[], T]) -> asyncio.Future[T]:
    """Run it in a thread that ends afterwards, so that what it changes of itself (directory, mounts) ends too.

    Cancelling the future does not stop the call; whoever must clean up after it waits (`asyncio.wait`).
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def failed(error: BaseException) -> None:
        if not done.done():
            done.set_exception(error)

    def succeeded(result: T) -> None:
        if not done.done():
            done.set_result(result)

    def run() -> None:
        try:
            result = call()
        except BaseException as error:  # noqa: BLE001 - it is raised where the call is waited for
            loop.call_soon_threadsafe(failed, error)
        else:
            loop.call_soon_threadsafe(succeeded, result)

    threading.Thread(target=run, name="opendsec-vmm", daemon=True).start()
    return done


def find_by_identifier(identifier: str) -> int | None:
    """The VMM of this identifier, by a walk over /proc: for starts that were cut short before its pid was noted."""
    wanted = (b"--id=" + identifier.encode("ascii"), identifier.encode("ascii"))
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            words: Sequence[bytes] = (entry / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue  # it has ended
        if any(word in words for word in wanted) and any(name in words[0] for name in (b"firecracker", b"jailer")):
            return int(entry.name)
    return None
