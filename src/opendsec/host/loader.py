"""`python -m opendsec.host.loader`: the process that serves layers on demand, and a guardian that keeps it going.

    OPENDSEC_STATE_DIR, OPENDSEC_RUN_DIR, OPENDSEC_STORE, OPENDSEC_LOG_LEVEL     as for the edge
    OPENDSEC_CACHE_MB, OPENDSEC_STORE_TIMEOUT                                    see `opendsec.store.loading.settings`

The guardian opens /dev/fuse, mounts <run>/data and does nothing else but start the server, again and again. It holds
the descriptor meanwhile, so reads of running sandboxes wait for the next server and get their bytes. When the server
cannot be started any more, or the guardian is killed, both end: reads fail with I/O errors, and the next guardian
mounts <run>/data anew. An edge that is started again finds the loader as it was.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import secrets
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from opendsec import errors
from opendsec.host import fanotify_loader
from opendsec.host.guardian import alone, stop_signals
from opendsec.linux import fuse
from opendsec.linux.mount import mountinfo, unmount
from opendsec.linux.process import has_ended, identify, reap, send_signal, spawn
from opendsec.server.logs import configure
from opendsec.store.loading.base import LoaderKind
from opendsec.store.loading.cache import ChunkCache
from opendsec.store.loading.control import ControlServer, ask
from opendsec.store.loading.daemon import Daemon
from opendsec.store.loading.fetch import ChunkSource
from opendsec.store.loading.fuse import DATA, SERVING, SOCKET
from opendsec.store.loading.settings import LoadingSettings, default_cache_bytes, read_loading
from opendsec.store.loading.sources import open_files

log = logging.getLogger("opendsec.loader")

SERVING_THREADS = 8
STEADY_S = 5.0
MOST_DEATHS = 5
"""Deaths of a server one after the other, each before it was STEADY_S old: then it is no use to go on."""
FIRST_PAUSE_S = 0.05
LOOK_EVERY_S = 5.0
ANSWERS_S = 5.0
MOST_SILENT = 4
"""Times a server may be asked in vain before it is killed: reads would wait for it for ever."""
GRACE_S = 5.0
_SERVE_FD, _GUARDIAN_FD = 100, 101
_OUT_OF_MEMORY_SCORE = "-900"
"""Killing the loader would stop every sandbox of the node."""


def main(arguments: list[str] | None = None) -> int:
    """The guardian; with --serve-fd, the server."""
    parser = argparse.ArgumentParser(prog="python -m opendsec.host.loader")
    parser.add_argument("--serve-fd", type=int)
    parser.add_argument("--guardian-fd", type=int)
    parser.add_argument("--again", action="store_true")
    options = parser.parse_args(arguments)
    configure(os.environ.get("OPENDSEC_LOG_LEVEL") or "info")
    state = Path(os.environ.get("OPENDSEC_STATE_DIR") or "/var/lib/opendsec")
    run_dir = Path(os.environ.get("OPENDSEC_RUN_DIR") or "/run/opendsec")
    try:
        settings = read_loading(os.environ, state_dir=state)
        if settings.kind is LoaderKind.FANOTIFY:
            return fanotify_loader.guard(settings, state, run_dir)
        if options.serve_fd is None:
            return guard(run_dir)
        for descriptor in (options.serve_fd, options.guardian_fd):
            os.set_inheritable(descriptor, False)
        return serve(settings, state, run_dir, options.serve_fd, options.guardian_fd, again=options.again)
    except errors.OpenDSecError as error:
        sys.stderr.write(f"opendsec.host.loader: {error}\n")
        return 1


# the guardian


def guard(run_dir: Path) -> int:
    """Until SIGTERM, or a server that dies and dies. Raises ConflictError when there is another guardian."""
    serving = run_dir / SERVING
    with alone(run_dir), stop_signals() as stop_fd, _device() as device:
        with contextlib.suppress(PermissionError):
            Path("/proc/self/oom_score_adj").write_text(_OUT_OF_MEMORY_SCORE, encoding="ascii")
        data = run_dir / DATA
        unmount_data(run_dir)
        data.mkdir(mode=0o700, exist_ok=True)
        fuse.mount(device, data)
        try:
            serving.write_text(f"{_own_identity()} {secrets.token_hex(8)}", encoding="ascii")
            return _keep_serving(run_dir, device, stop_fd)
        finally:
            serving.unlink(missing_ok=True)
            unmount_data(run_dir)


def unmount_data(run_dir: Path) -> None:
    """What this guardian, or one that was killed, has mounted. Layers that are in use keep it until they go."""
    target = run_dir.resolve() / DATA
    while any(entry.target == str(target) for entry in mountinfo()):
        unmount(target, detach=True)


def _keep_serving(run_dir: Path, device: int, stop_fd: int) -> int:
    deaths = 0
    while True:
        begun = time.monotonic()
        status = _serve_once(run_dir, device, stop_fd, again=deaths > 0)
        if status is None:
            return 0
        deaths = deaths + 1 if time.monotonic() - begun < STEADY_S else 1
        log.warning("server_ended", extra={"fields": {"status": status, "deaths": deaths}})
        if deaths >= MOST_DEATHS:
            return 1
        if select.select([stop_fd], [], [], FIRST_PAUSE_S * 2**deaths)[0]:
            return 0


def _serve_once(run_dir: Path, device: int, stop_fd: int, *, again: bool) -> int | None:
    """How the server ended; None when it was told to."""
    read_end, write_end = os.pipe()
    words = ["-m", "opendsec.host.loader", "--serve-fd", str(_SERVE_FD), "--guardian-fd", str(_GUARDIAN_FD)]
    words += ["--again"] if again else []
    fds = {_SERVE_FD: device, _GUARDIAN_FD: read_end}
    try:
        pid, pidfd = spawn(Path(sys.executable), argv=words, fds=fds, env=os.environ)
        try:
            if _stopped(run_dir, pidfd, stop_fd):
                _end(pid, pidfd)
                return None
            return reap(pid) or 0
        finally:
            os.close(pidfd)
    finally:
        os.close(read_end)
        os.close(write_end)


def _stopped(run_dir: Path, pidfd: int, stop_fd: int) -> bool:
    """Wait until the guardian is to stop (True), or the server has ended; one that says nothing any more is ended."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    poll.register(stop_fd, select.POLLIN)
    silent = 0
    while True:
        something = poll.poll(LOOK_EVERY_S * 1000)
        if has_ended(pidfd):
            return False
        if something:
            return True
        silent = 0 if _answers(run_dir) else silent + 1
        if silent >= MOST_SILENT:
            log.error("server_silent", extra={"fields": {"asked": silent}})
            send_signal(pidfd, signal.SIGKILL)


def _answers(run_dir: Path) -> bool:
    try:
        ask(run_dir / SOCKET, "status", timeout_s=ANSWERS_S)
    except errors.NodeError:
        return False
    return True


def _end(pid: int, pidfd: int) -> None:
    send_signal(pidfd, signal.SIGTERM)
    if not select.select([pidfd], [], [], GRACE_S)[0]:
        send_signal(pidfd, signal.SIGKILL)
    os.waitpid(pid, 0)


@contextlib.contextmanager
def _device() -> Iterator[int]:
    try:
        fd = fuse.open_device()
    except OSError as error:
        raise errors.HostCapabilityError(
            f"/dev/fuse cannot be opened: {error.strerror}",
            detail={"probe": "fuse"},
            remedy="modprobe fuse; run it as root",
        ) from error
    try:
        yield fd
    finally:
        os.close(fd)


def _own_identity() -> str:
    own = identify(os.getpid())
    assert own is not None
    return f"{own.pid} {own.start_ticks}"


# the server


def serve(settings: LoadingSettings, state: Path, run_dir: Path, device: int, guardian: int, *, again: bool) -> int:
    """Serve until SIGTERM, the end of the guardian, or an unmount."""
    kept = state / "cache"
    kept.mkdir(mode=0o700, parents=True, exist_ok=True)
    limit = settings.cache_mb * (1 << 20) if settings.cache_mb else default_cache_bytes(kept)
    source = ChunkSource(
        open_files(settings.address, attempt_s=settings.attempt_s), patience_s=settings.patience_s * 0.9
    )
    with stop_signals() as stop_fd, ChunkCache(kept / "data", limit_bytes=limit) as cache:
        daemon = Daemon(source, cache, local=kept, attached=run_dir / "loader", patience_s=settings.patience_s)
        control = ControlServer(run_dir / SOCKET, daemon.answer)
        if again:
            daemon.attach_again()
            with contextlib.suppress(OSError):  # before Linux 6.9 what the last server owed is not asked again
                fuse.resend(device)
        threads = [
            threading.Thread(target=fuse.serve, args=(device, daemon), name="serve", daemon=True)
            for _ in range(SERVING_THREADS)
        ]
        for thread in threads:
            thread.start()
        control.start()
        log.info("loader_ready", extra={"fields": {"store": settings.address, "cache_mb": limit >> 20}})
        while not select.select([stop_fd, guardian], [], [], 1.0)[0]:
            if not any(thread.is_alive() for thread in threads):
                break
        control.close()
        daemon.close()
        sys.stderr.flush()
        os._exit(0)  # threads may hang in a store that will never answer


if __name__ == "__main__":
    raise SystemExit(main())
