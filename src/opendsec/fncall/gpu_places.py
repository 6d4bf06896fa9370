"""What a container that holds a GPU sees of it: a /dev of its own with the instance's nodes, and the driver's files.

The /dev of an instance is a small read-only tmpfs, made when a container first holds the instance and unmounted at the
end. It lies over the /dev all containers share, so nobody else has these nodes. A made-up instance has none of this.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path, PurePosixPath

from opendsec.backends.container_templates import make_dev
from opendsec.errors import NodeError
from opendsec.fncall.gpu import GpuInstance, GpuLease
from opendsec.linux import libc
from opendsec.linux.launch import Bind
from opendsec.linux.mount import mountinfo

DEV = PurePosixPath("/dev")


class GpuPlaces:
    """Below `root`, a directory of its own."""

    def __init__(self, root: Path) -> None:
        self._root = root

    @contextmanager
    def attached(self, lease: GpuLease) -> Iterator[tuple[Bind, ...]]:
        """What the launcher attaches; its descriptors are open inside the block. Raises NodeError."""
        instance = lease.instance
        with ExitStack() as stack:
            try:
                binds = [self._dev(instance, stack)] if instance.devices else []
                binds += [Bind(fd=_opened(Path(here), stack), target=inside) for here, inside in instance.mounts]
            except (OSError, ValueError) as exc:
                raise NodeError(
                    f"GPU {instance.uuid} cannot be given to a container: {exc}",
                    remedy="has the driver been changed? make its CDI file anew and restart the edge",
                ) from exc
            yield tuple(binds)

    def close(self) -> None:
        """Unmount; containers that run are not affected."""
        if not self._root.is_dir():
            return
        root = self._root.resolve()
        for entry in reversed(mountinfo()):
            if Path(entry.target).is_relative_to(root):
                libc.umount2(entry.target, libc.MNT_DETACH)
        for place in root.iterdir():
            place.rmdir()
        root.rmdir()

    def _dev(self, instance: GpuInstance, stack: ExitStack) -> Bind:
        target = self._root.resolve() / instance.uuid.replace("/", "_")
        target.mkdir(mode=0o755, parents=True, exist_ok=True)
        if str(target) not in {entry.target for entry in mountinfo()}:
            nodes = {str(PurePosixPath(path).relative_to(DEV)): Path(path).stat().st_rdev for path in instance.devices}
            make_dev(target, nodes)
        return Bind(fd=_opened(target, stack), target=str(DEV), devices=True)


def _opened(path: Path, stack: ExitStack) -> int:
    fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    stack.callback(os.close, fd)
    return fd
