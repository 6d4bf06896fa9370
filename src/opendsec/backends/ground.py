"""What the backends of one edge share on their kernel: the number all of them take ids, addresses and groups from.

The first to open claims it, the last to close gives it up, and only if no sandbox of any of them is left. Slots are the
edge's, so what follows from a slot is never another backend's. It knows nothing of sandboxes.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from opendsec.linux.cgroup import CgroupDriver, choose_driver, find_mounts
from opendsec.linux.network import SandboxNetwork
from opendsec.linux.node_number import NodeNumber, claim

FORWARDING = Path("/run/opendsec.ip_forward")
"""Of all edges of this kernel: what net.ipv4.ip_forward was before the first of them needed it."""


class Ground:
    """`owner` is the edge's state directory, `cgroup_root` another top directory for its control groups."""

    def __init__(self, owner: Path, *, cgroup_root: str | None = None) -> None:
        self._owner = owner
        self._root = cgroup_root
        self._number: NodeNumber | None = None
        self._users = 0
        self._turn = asyncio.Lock()

    async def enter(self) -> tuple[NodeNumber, CgroupDriver]:
        """The number, and an open driver of control groups below its top directory. Raises OSError as `claim` does.

        Call `leave` afterwards.
        """
        async with self._turn:
            mounts = find_mounts()
            if self._number is None:
                self._number = await claim(mounts.unified, owner=str(self._owner.resolve()), root=self._root)
            self._users += 1
            driver = choose_driver(mounts, root=self._number.root)
            try:
                driver.open()
            except OSError:
                self.leave(driver)
                raise
            return self._number, driver

    def leave(self, driver: CgroupDriver) -> None:
        """Close the driver. Control groups and the claim stay while a sandbox lives, or another backend is open."""
        assert self._number is not None
        self._users -= 1
        if not self._users:
            number, self._number = self._number, None
            if driver.names():
                number.close()
            else:
                driver.remove_root()
                number.release()
        driver.close()


def network_of(number: NodeNumber) -> SandboxNetwork:
    """The network of the sandboxes of that number."""
    return SandboxNetwork(state_file=FORWARDING, prefix=number.prefix, links=number.links, table=number.table)
