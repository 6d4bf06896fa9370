"""Stopping the platform of one machine: sandboxes first, through the edge; then processes, layer mounts, run files.

It works from any state: when the edge is gone but sandboxes of it may be left, an edge is started once more, finds
them, and ends them.
Nothing is signalled that is not, by pid and start time, a process of this platform.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from opendsec import errors
from opendsec.apiserver.link import EdgeLink
from opendsec.host import processes
from opendsec.host.local import APISERVER, EDGE, LOADER, SUPERVISOR, Local
from opendsec.linux.mount import mountinfo, unmount
from opendsec.model.node import SandboxStatus
from opendsec.server.runner import Address
from opendsec.store.layout import Layout
from opendsec.store.leases import Leases
from opendsec.store.loading.fuse import DATA, SOCKET
from opendsec.store.loading.sources import is_remote
from opendsec.store.location import store_directory
from opendsec.store.mounts import unmount_layers
from opendsec.wire import codec
from opendsec.wire.contracts import SandboxPage

EDGE_RETURNS_S = 60.0
_AT_ONCE = 64

OnProgress = Callable[[int, int], None]
"""Called with how many sandboxes are stopped, of how many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopped:
    """What was there and is gone now; `failed`: sandboxes that would not go, with the reason."""

    sandboxes: int = 0
    processes: int = 0
    layers: int = 0
    failed: tuple[str, ...] = ()


def no_progress(_done: int, _total: int) -> None:
    """Tell nobody."""


async def stop_platform(
    local: Local, environment: Mapping[str, str], *, on_progress: OnProgress = no_progress
) -> Stopped:
    """The lock must be held.

    What is not there is no error; when a sandbox would not go, its edge stays to be asked again.
    """
    stopping = _Stopping(local, on_progress)
    await stopping.stop_sandboxes(environment)
    ended = await processes.end(local, APISERVER)
    local.local_json.unlink(missing_ok=True)
    if stopping.failed:
        return Stopped(sandboxes=stopping.ended, processes=ended, failed=tuple(stopping.failed))
    ended += await processes.end(local, EDGE)
    layers = await asyncio.to_thread(_unmount_layers, local)
    edge_files = local.run_dir / "edge" / local.edge
    if edge_files.is_dir():
        await asyncio.to_thread(_remove_edge_files, edge_files)
    ended += await processes.end(local, LOADER)
    clear_run_files(local)
    return Stopped(sandboxes=stopping.ended, processes=ended, layers=layers)


@dataclass(slots=True)
class _Stopping:
    """Ends all sandboxes of the edge."""

    local: Local
    on_progress: OnProgress
    ended: int = 0
    total: int = 0
    failed: list[str] = field(default_factory=list)

    async def stop_sandboxes(self, environment: Mapping[str, str]) -> None:
        """Starts the edge for it when it does not run and may have left some."""
        runs = processes.pid_of(self.local, EDGE) is not None
        if runs and not self.local.edge_socket.exists():  # its run directory was removed: nobody can talk to it
            await processes.end(self.local, EDGE)
            self._start_edge(environment)
        elif not runs:
            if not may_have_sandboxes(self.local):
                return
            self._start_edge(environment)
        link = EdgeLink(self.local.edge, Address(path=self.local.edge_socket), patience_s=EDGE_RETURNS_S)
        with contextlib.closing(link):
            try:
                found = await _live_in_time(link)
            except TimeoutError:  # it runs and says nothing: another one takes over
                await processes.end(self.local, EDGE)
                self._start_edge(environment)
                found = await _live_in_time(link)
            self.total = len(found)
            self.on_progress(0, self.total)
            turns = asyncio.Semaphore(_AT_ONCE)
            async with asyncio.TaskGroup() as group:
                for status in found:
                    group.create_task(self._stop(link, turns, status))

    def _start_edge(self, environment: Mapping[str, str]) -> None:
        quiet = {**environment, "OPENDSEC_LOG_LEVEL": "error"}
        _, pidfd = processes.spawn(self.local, EDGE, quiet)
        os.close(pidfd)

    async def _stop(self, link: EdgeLink, turns: asyncio.Semaphore, status: SandboxStatus) -> None:
        async with turns:
            try:
                await link.call("DELETE", f"/v1/sandboxes/{status.sandbox_id}", repeatable=True)
                self.ended += 1
            except errors.NotFoundError:
                self.ended += 1  # it ended by itself meanwhile
            except errors.OpenDSecError as exc:
                self.failed.append(f"{status.sandbox_id}: {exc}")
        self.on_progress(self.ended + len(self.failed), self.total)


async def _live_in_time(link: EdgeLink) -> list[SandboxStatus]:
    """Raises TimeoutError when an edge that runs does not answer."""
    async with asyncio.timeout(EDGE_RETURNS_S):
        return await _live(link)


async def _live(link: EdgeLink) -> list[SandboxStatus]:
    found: list[SandboxStatus] = []
    cursor = ""
    while True:
        target = "/v1/sandboxes?limit=1000" + (f"&cursor={cursor}" if cursor else "")
        _, body = await link.call("GET", target, repeatable=True)
        page = codec.decode_answer(body, SandboxPage)
        found += page.items
        if not page.cursor:
            return found
        cursor = page.cursor


def may_have_sandboxes(local: Local) -> bool:
    """A clean stop removes these, and a reboot, which leaves no process, empties the run directory."""
    boxes = local.run_dir / "sbx"
    begun = (local.run_dir / "up.json").exists() and (local.edge_state / "sandboxes").is_dir()
    return begun or (boxes.is_dir() and any(boxes.iterdir()))


def _unmount_layers(local: Local) -> int:
    root = local.run_dir / "layers"
    if not root.is_dir():
        return 0
    count = unmount_layers(root)
    address = local.settings.get("OPENDSEC_STORE", "")
    if not is_remote(address):
        with contextlib.suppress(OSError):  # the store cannot be reached: the lease ends by itself
            Leases(Layout(store_directory(address, local.state_dir)), root).drop_all()
    for left in root.iterdir():
        left.unlink()  # its lock file
    root.rmdir()
    return count


def _remove_edge_files(folder: Path) -> None:
    """What an edge that was killed left mounted goes first."""
    for entry in reversed([entry for entry in mountinfo() if Path(entry.target).is_relative_to(folder)]):
        unmount(Path(entry.target), detach=True)
    shutil.rmtree(folder)


def clear_run_files(local: Local) -> None:
    """Remove what a start made in the run directory, and the directory itself when nothing else is in it.

    The lock must be held.
    """
    ours = [local.local_json, local.edge_socket, local.run_dir / "up.json", local.run_dir / "up.lock"]
    ours += [local.pid_file(name) for name in (SUPERVISOR, APISERVER, EDGE, LOADER)]
    ours += [local.run_dir / SOCKET, *(local.run_dir / "loader").glob("*")]
    if local.address.path is not None:
        ours.append(local.address.path)
    for path in ours:
        path.unlink(missing_ok=True)
    for folder in (*(local.run_dir / name for name in ("sbx", "edge", "loader", DATA)), local.run_dir):
        with contextlib.suppress(OSError):
            folder.rmdir()  # not empty: somebody else's things are in it
