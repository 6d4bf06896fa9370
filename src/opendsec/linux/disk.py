"""A disk of limited size for one sandbox: a sparse ext4 image on a loop device, mounted in a directory.

    <directory>/disk.img   sparse, as large as the limit
    <directory>/disk/      the mount, owned by host root

Made only when a limit is asked for (about 20 ms); bytes and inodes end exactly there, the file system's own tables
included. The loop device frees itself with the last mount, so nothing survives a crash but what `remove_disk` finds by
the file's name. It knows nothing of overlays or sandboxes.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
from pathlib import Path

from opendsec.linux import libc
from opendsec.linux.process import run

IMAGE, MOUNT = "disk.img", "disk"
MIN_BYTES = 4 * 1024 * 1024
MKFS_TIMEOUT_S = 60.0
_LOOP_CTL_GET_FREE, _LOOP_CONFIGURE = 0x4C82, 0x4C0A
_LO_FLAGS_AUTOCLEAR, _LO_FLAGS_DIRECT_IO = 4, 16
"""linux/loop.h"""
_LOOP_CONFIG = struct.Struct("=II 5Q 4I 64s 64s 32s 2Q 8Q")
_TRIES = 32


async def make_disk(directory: Path, *, size_bytes: int) -> Path:
    """Make and mount it; the mount point. Raises OSError (ProgramError from mkfs); nothing stays after an error."""
    if size_bytes < MIN_BYTES:
        raise ValueError(f"size_bytes: {size_bytes} is less than {MIN_BYTES}")
    image, mount = directory / IMAGE, directory / MOUNT
    file = image.open("xb")
    try:
        with file:
            file.truncate(size_bytes)
        features = "^has_journal,^resize_inode"
        options = "lazy_itable_init=1,nodiscard,root_owner=0:0"
        argv = ["mkfs.ext4", "-q", "-F", "-m", "0", "-b", "4096", "-O", features, "-E", options, str(image)]
        await run(argv, timeout_s=MKFS_TIMEOUT_S)
        mount.mkdir(mode=0o755)
        _mount(image, mount)
    except BaseException:
        remove_disk(directory)
        raise
    return mount


def remove_disk(directory: Path) -> None:
    """Unmount and delete. Idempotent; no disk there is no error. Its space is free when its last user is gone."""
    image, mount = directory / IMAGE, directory / MOUNT
    if not image.exists():
        return
    try:
        libc.umount2(str(mount), libc.MNT_DETACH | libc.UMOUNT_NOFOLLOW)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOENT):
            raise
    with contextlib.suppress(FileNotFoundError):
        mount.rmdir()
    image.unlink()


def _mount(image: Path, mount: Path) -> None:
    with image.open("r+b") as file:
        device, fd = _attach_loop(file.fileno())
    try:
        libc.mount(device, str(mount), "ext4", libc.MS_NOSUID | libc.MS_NODEV, "discard")
    finally:
        os.close(fd)  # with the mount as its only user left, the device ends with it


def _attach_loop(file: int) -> tuple[str, int]:
    """(path of a loop device on that file, its descriptor). Others may take the free one first: then the next."""
    flags = _LO_FLAGS_AUTOCLEAR | _LO_FLAGS_DIRECT_IO
    config = _LOOP_CONFIG.pack(file, 0, 0, 0, 0, 0, 0, 0, 0, 0, flags, b"", b"", b"", *([0] * 10))
    with Path("/dev/loop-control").open("rb") as control:
        for _ in range(_TRIES):
            device = f"/dev/loop{fcntl.ioctl(control.fileno(), _LOOP_CTL_GET_FREE)}"
            fd = os.open(device, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.ioctl(fd, _LOOP_CONFIGURE, config)
            except OSError as error:
                os.close(fd)
                if error.errno != errno.EBUSY:
                    raise
                continue
            return device, fd
    raise OSError(errno.EBUSY, "no loop device stayed free")
