"""One container of a pool: what is prepared before a run, what is proven after it, and what is known about it.

A run happens between `ready_for` and `reset`. `reset` ends everything the run has started, empties every place that
can be written, and asks the kernel whether the container is as it was: processes and files by its own counts. Any doubt
and it says so; the pool then ends the container, and the next call gets another.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from opendsec.backends.base import Handle
from opendsec.fncall.box import FEW_FILES, SHARED_MEMORY, USER_ID, WORK, Box
from opendsec.fncall.zygote import Zygote
from opendsec.guest.base import Guest, GuestError
from opendsec.linux.cgroup_files import GroupFiles
from opendsec.model.fncall import FnCallSpec
from opendsec.model.image import Image

MIB = 1024 * 1024
USER = f"{USER_ID}:{USER_ID}"
DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
RESET_TIMEOUT_S = 5.0
_RETRY_FIRST_S, _RETRY_MOST_S = 0.0003, 0.02


@dataclass(frozen=True, slots=True)
class Group:
    """Whose containers are alike: only calls of the same group may follow each other in one."""

    project: str
    image: str
    """Digest."""
    imports: tuple[str, ...] | None
    """Of a fork server; None: there is none."""
    gpu: str = ""
    source: Image | None = field(default=None, compare=False, repr=False)
    """The image itself; needed to make a container."""


@dataclass(slots=True, eq=False)
class Member:
    """Made by `opendsec.fncall.starting`."""

    name: str
    slot: int
    group: Group
    image: Image
    handle: Handle
    guest: Guest
    files: GroupFiles
    box: Box
    zygote: Zygote | None
    env: Mapping[str, str]
    """Of its GPU."""
    processes: int
    """Without a run, by the kernel's count."""
    memory_bytes: int
    """Charged without a run."""
    calls: int = 0
    idle_since: float = 0.0
    doubt: str = ""
    """Why it must not be used again."""
    _limits: tuple[int, int] = (0, 0)
    _oom_kills: int = 0
    _charged: int = 0
    """When the run began: file pages that earlier ones have read stay until their room is needed."""
    _next_command: int = 2
    languages: dict[str, str] = field(default_factory=dict)

    # Before a run

    def ready_for(self, spec: FnCallSpec) -> None:
        """Set the limits of a run and begin to count."""
        wanted = (spec.memory_mb, spec.processes)
        if wanted != self._limits:
            self.files.limit_memory(self.memory_bytes + spec.memory_mb * MIB)
            self.files.limit_processes(self.processes + spec.processes)
            self._limits = wanted
        self.files.reset_peak()
        self._charged = self.files.charged_bytes() or 0
        self._oom_kills = self.files.oom_kills() or 0

    def command_id(self) -> int:
        """A number no command here has had."""
        self._next_command += 1
        return self._next_command - 1

    def environment(self, own: Mapping[str, str]) -> dict[str, str]:
        """Of a run: the image's, what belongs to the place, the GPU's, and the call's own on top."""
        return {
            "PATH": DEFAULT_PATH,
            "LC_ALL": "C.UTF-8",
            **self.image.config.env,
            "HOME": WORK,
            "PWD": WORK,
            "USER": "nobody",
            "LOGNAME": "nobody",
            "TMPDIR": "/tmp",  # noqa: S108 a path inside
            **self.env,
            **own,
        }

    # After it

    def was_out_of_memory(self) -> bool:
        """Whether a process of the run was killed for its memory limit."""
        return (self.files.oom_kills() or 0) > self._oom_kills

    def most_memory(self) -> int | None:
        """Of the run alone, in bytes."""
        peak = self.files.peak_bytes()
        return None if peak is None else max(0, peak - self._charged)

    async def end_command(self, command_id: int) -> None:
        """Whatever a command has started is gone, or there is a doubt."""
        if self.files.processes() == self.processes:
            return
        self.files.kill_below(f"cmd-{command_id}")
        deadline, pause = time.monotonic() + RESET_TIMEOUT_S, _RETRY_FIRST_S
        while self.files.processes() != self.processes:
            if time.monotonic() > deadline:
                self.doubt = f"{self.files.processes()} processes where {self.processes} belong"
                return
            await asyncio.sleep(pause)
            pause = min(pause * 2, _RETRY_MOST_S)

    async def empty(self) -> None:
        """Every place is as it was, or there is a doubt."""
        try:
            if self.box.left() > FEW_FILES:
                await asyncio.to_thread(self.box.empty)
            else:
                self.box.empty()
        except OSError as error:
            self.doubt = f"what was written could not be removed: {error}"
            return
        if not self.box.is_clean:
            self.doubt = "files are left"
        elif self.files.processes() != self.processes:
            self.doubt = f"{self.files.processes()} processes where {self.processes} belong"

    async def missing(self, programs: tuple[str, ...]) -> str:
        """The first of these that is not in the image's PATH; "": all are."""
        path = self.image.config.env.get("PATH", DEFAULT_PATH)
        for program in programs:
            if program not in self.languages:
                self.languages[program] = await self._find(program, path)
            if not self.languages[program]:
                return program
        return ""

    async def _find(self, program: str, path: str) -> str:
        for directory in path.split(":"):
            full = f"{directory}/{program}"
            try:
                await self.guest.stat(full)
            except GuestError:
                continue
            return full
        return ""


__all__ = ["SHARED_MEMORY", "USER", "WORK", "Group", "Member"]
