"""The processes of the fanotify loader: the guardian, and what it starts: a filling process and two keepers.

    guard(settings, state, run)     the guardian, until SIGTERM; `opendsec.host.loader` calls it
    python -m opendsec.host.fanotify_loader --fill      the filling process, started by the guardian

The guardian replaces a filling process that died, or was silent for longer than reads may wait; and keepers. While
there is no filling process to be had it refuses reads itself, with EIO, once they have waited for as long as reads may
wait. A guardian that comes after another takes the group from any other holder, and the filling process's place by
starting one of its own. Told to end, it leaves a filling process and the keepers behind when somebody still has an
incomplete layer open, since reads of it would be zeros without them.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import logging
import os
import select
import shutil
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from opendsec import errors
from opendsec.host.guardian import alone, stop_signals
from opendsec.linux import fanotify
from opendsec.linux.process import has_ended, identify, reap, send_signal, spawn
from opendsec.server.logs import configure
from opendsec.store.loading.cache import ChunkCache
from opendsec.store.loading.control import ControlServer
from opendsec.store.loading.fanotify_filling import FillingDaemon, Front
from opendsec.store.loading.fanotify_group import (
    FILLER,
    GROUP_FD,
    GUARDIAN,
    KEEPERS,
    Place,
    check_fanotify,
    drop_unused,
    find_holder,
    in_use,
    is_kept,
    keep,
    place_of,
    take_group,
    write_holder,
)
from opendsec.store.loading.fanotify_journal import SLOTS, Journal
from opendsec.store.loading.fetch import ChunkSource
from opendsec.store.loading.fuse import SOCKET
from opendsec.store.loading.settings import LoadingSettings, default_cache_bytes, read_loading
from opendsec.store.loading.sources import open_files

log = logging.getLogger("opendsec.loader")

STEADY_S = 5.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 5.0
GRACE_S = 5.0
_TICK_S = 0.5


@dataclass(slots=True)
class Guardian:
    """What it holds and watches."""

    place: Place
    group: int
    journal: Journal
    patience_s: float
    keepers: dict[str, int] = field(default_factory=dict)
    """Pidfds."""
    pid: int = -1
    pidfd: int = -1
    begun: float = 0.0
    pause_s: float = FIRST_PAUSE_S

    def keep_all(self) -> None:
        for name in KEEPERS:
            if not is_kept(self.keepers.get(name)):
                self._forget(name)
                found = find_holder(self.place, name)
                self.keepers[name] = keep(self.place, name, self.group) if found is None else found

    def _forget(self, name: str) -> None:
        """A keeper that has ended, if there was one."""
        pidfd = self.keepers.pop(name, None)
        if pidfd is not None:
            with contextlib.suppress(ChildProcessError):  # another guardian's
                os.waitid(os.P_PIDFD, pidfd, os.WEXITED)
            os.close(pidfd)

    def start_filling(self) -> None:
        """In place of whoever filled before us."""
        other = find_holder(self.place, FILLER)
        if other is not None:
            send_signal(other, signal.SIGKILL)
            select.select([other], [], [])
            os.close(other)
        words = ["-m", "opendsec.host.fanotify_loader", "--fill"]
        self.pid, self.pidfd = spawn(Path(sys.executable), argv=words, fds={GROUP_FD: self.group}, env=os.environ)
        self.begun = time.monotonic()

    def look_after(self) -> None:
        """Once in a while: whoever died is replaced, whoever is silent killed, whoever waits too long refused."""
        self.keep_all()
        now = time.monotonic()
        is_new = now - self.begun < self.patience_s
        if self.pidfd >= 0 and not is_new and self.journal.silent_s() > self.patience_s:
            log.warning("loader_silent", extra={"fields": {"pid": self.pid}})
            send_signal(self.pidfd, signal.SIGKILL)
        if self.pidfd >= 0 and has_ended(self.pidfd):
            self._bury(now)
        if self.pidfd < 0:
            if self.journal.silent_s() > 2 * self.patience_s:
                self.refuse_all()
            if now - self.begun > self.pause_s:
                self.start_filling()
        elif now - self.begun > STEADY_S:
            self.pause_s = FIRST_PAUSE_S

    def _bury(self, now: float) -> None:
        select.select([self.pidfd], [], [])
        log.warning("loader_ended", extra={"fields": {"status": reap(self.pid), "lived_s": round(now - self.begun, 1)}})
        os.close(self.pidfd)
        self.pidfd = -1
        if now - self.begun < STEADY_S:
            self.pause_s = min(self.pause_s * 2, LONGEST_PAUSE_S)

    def refuse_all(self) -> None:
        """Every read that waits now."""
        for number in range(SLOTS):
            fanotify.answer(self.group, fanotify.deny(number))
        self.journal.forget()
        with contextlib.suppress(BlockingIOError):
            while True:
                for request in fanotify.parse(os.read(self.group, fanotify.READ_BYTES)):
                    if request.fd >= 0:
                        fanotify.answer(self.group, fanotify.deny(request.fd))
                        os.close(request.fd)

    def end(self) -> None:
        """Everything, unless somebody needs it."""
        if self.pidfd >= 0:
            send_signal(self.pidfd, signal.SIGTERM)
            if not select.select([self.pidfd], [], [], GRACE_S)[0]:
                send_signal(self.pidfd, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            os.close(self.pidfd)
        drop_unused(self.place)
        used = [name for name in in_use(self.place) if not self.place.whole(name).exists()]
        if used:
            log.warning("loader_stays", extra={"fields": {"layers": len(used), "why": "they are in use"}})
            self.start_filling()
            return
        for pidfd in self.keepers.values():
            send_signal(pidfd, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitid(os.P_PIDFD, pidfd, os.WEXITED)
        shutil.rmtree(self.place.run)


def guard(settings: LoadingSettings, state: Path, run_dir: Path) -> int:
    """Until SIGTERM. Raises ConflictError when there is another guardian, HostCapabilityError."""
    place = place_of(run_dir, state)
    with alone(run_dir), stop_signals() as stop_fd:
        check_fanotify(state)
        place.make()
        group, is_new = take_group(place)
        own = identify(os.getpid())
        assert own is not None
        write_holder(place, GUARDIAN, own, group)
        journal = Journal(place.run / "journal")
        if is_new:
            journal.forget()
        journal.beat()
        guardian = Guardian(place, group, journal, settings.patience_s)
        guardian.keep_all()
        guardian.start_filling()
        while True:
            watched = [guardian.pidfd] if guardian.pidfd >= 0 else []
            ready, _, _ = select.select([stop_fd, *watched], [], [], _TICK_S if watched else FIRST_PAUSE_S)
            if stop_fd in ready:
                guardian.end()
                return 0
            guardian.look_after()


def fill(settings: LoadingSettings, state: Path, run_dir: Path) -> int:
    """Serve until SIGTERM; a SIGKILL costs nobody anything."""
    place = place_of(run_dir, state)
    os.set_inheritable(GROUP_FD, False)
    own = identify(os.getpid())
    assert own is not None
    lock = os.open(place.run / "filling", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)  # numbers of events are one process's: never two at once
    write_holder(place, FILLER, own, GROUP_FD)
    front = Front(GROUP_FD, place, Journal(place.run / "journal"))
    front.begin()
    limit = settings.cache_mb * (1 << 20) if settings.cache_mb else default_cache_bytes(place.files)
    files = open_files(settings.address, attempt_s=settings.attempt_s)
    source = ChunkSource(files, patience_s=settings.patience_s * 0.9)
    with stop_signals() as stop_fd, ChunkCache(place.files, limit_bytes=limit) as cache:
        daemon = FillingDaemon(
            source,
            cache,
            local=state / "cache",
            attached=place.attached,
            patience_s=settings.patience_s,
            kernel_reads_cache=True,
        )
        daemon.front = front
        for path in place.attached.glob("*.json"):
            cache.keep(path.stem)  # somebody may have it mounted, also when it cannot be attached again
        daemon.attach_again()
        front.ready()
        control = ControlServer(run_dir / SOCKET, daemon.answer)
        control.start()
        log.info("loader_ready", extra={"fields": {"store": settings.address, "cache_mb": limit >> 20}})
        select.select([stop_fd], [], [])
        control.close()
        daemon.close()  # it may read our files, so somebody must still answer
        front.close()
        sys.stderr.flush()
        os._exit(0)  # threads may hang in a store that will never answer


def main() -> int:
    """The filling process: `--fill`."""
    parser = argparse.ArgumentParser(prog="python -m opendsec.host.fanotify_loader")
    parser.add_argument("--fill", action="store_true", required=True)
    parser.parse_args()
    configure(os.environ.get("OPENDSEC_LOG_LEVEL") or "info")
    state = Path(os.environ.get("OPENDSEC_STATE_DIR") or "/var/lib/opendsec")
    run_dir = Path(os.environ.get("OPENDSEC_RUN_DIR") or "/run/opendsec")
    try:
        return fill(read_loading(os.environ, state_dir=state), state, run_dir)
    except errors.OpenDSecError as error:
        sys.stderr.write(f"opendsec.host.fanotify_loader: {error}\n")
        return 1


if __name__ == "__main__":
    raise SystemExit(main())
