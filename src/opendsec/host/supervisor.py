"""Runs apiserver, edge and, where layers are read through one, the loader on this machine; starts again what dies.
`python -m opendsec.host.supervisor` is what `up -d` leaves behind.

It holds no state: killed with -9, its children go on, and the next `up` or `down` finds them by their pid files.
SIGTERM and SIGINT stop the whole platform as `opendsec down` does; SIGUSR1 makes it let go of its children and end,
which is how `down` takes over.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import msgspec

from opendsec import errors
from opendsec.apiserver.link import EdgeLink
from opendsec.host import log_file, processes
from opendsec.host.keys import ensure_local_key
from opendsec.host.local import APISERVER, EDGE, LOADER, SUPERVISOR, Local, chosen, lock, remember, write_private
from opendsec.host.stopping import Stopped, clear_run_files, may_have_sandboxes, stop_platform
from opendsec.linux.process import identify, reap, wait_ended
from opendsec.model.node import NodeReport
from opendsec.server.logs import configure
from opendsec.server.runner import Address, listen, run
from opendsec.server.streams import first_failure
from opendsec.store.loading.base import LoaderKind
from opendsec.store.loading.settings import read_loading
from opendsec.wire import codec

log = logging.getLogger("opendsec.supervisor")

READY_S = 120.0
FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 2.0
PREPARING_PAUSE_S = 0.2
"""Between two looks at backends of which it is not known yet whether they work."""
STEADY_S = 3.0
"""A process that ran for so long starts again after FIRST_PAUSE_S, whatever happened before."""


class NotReadyError(errors.NodeError):
    """The platform did not come up; nothing of it is left running."""

    default_retryable = False


class _Told(Exception):
    """A signal asked for the end."""


@dataclass(slots=True)
class Supervisor:
    """Keeps the two processes going. Before `ready`, a process that ends is a reason not to start at all."""

    local: Local
    environment: Mapping[str, str]
    ready: bool = False
    told: asyncio.Event = field(default_factory=asyncio.Event)
    let_go: bool = False

    async def keep(self, name: str) -> None:
        """Start the process, and again whenever it ends. Raises NotReadyError."""
        now = asyncio.get_running_loop().time
        pause = FIRST_PAUSE_S
        while True:
            begun = now()
            status = await self._run_once(name)
            if not self.ready:
                raise NotReadyError(f"{name} ended with status {status} before it was ready", detail={"process": name})
            pause = FIRST_PAUSE_S if now() - begun > STEADY_S else min(pause * 2, LONGEST_PAUSE_S)
            log.warning("process_ended", extra={"fields": {"process": name, "status": status, "again_in_s": pause}})
            await asyncio.sleep(pause)

    async def _run_once(self, name: str) -> int | str | None:
        """How it ended, or why the machine could not start it just now (a burst of processes can fill it)."""
        if name == LOADER and (running := processes.find(self.local, name)) is not None:
            await self._watch_loader(running)
            return None
        try:
            pid, pidfd = processes.spawn(self.local, name, self.environment)
        except OSError as exc:
            return f"not started: {exc.strerror}"
        log.info("process_started", extra={"fields": {"process": name, "pid": pid}})
        try:
            await wait_ended(pidfd)
        finally:
            os.close(pidfd)
        return reap(pid)

    async def _watch_loader(self, pidfd: int) -> None:
        """One that an earlier supervisor started: sandboxes read their files through it, so it is left as it is."""
        try:
            await wait_ended(pidfd)
        finally:
            os.close(pidfd)

    async def announce(self, key: str, on_ready: Callable[[NodeReport], None]) -> None:
        """Wait until both answer, then say so. Raises NotReadyError."""
        report = await wait_ready(self.local)
        self.ready = True
        address = {"api_url": self.local.api_url, "api_key": key}
        write_private(self.local.local_json, msgspec.json.encode(address))
        log.info("ready", extra={"fields": {"api_url": self.local.api_url, "edge": self.local.edge}})
        on_ready(report)

    async def run(self, key: str, on_ready: Callable[[NodeReport], None]) -> None:
        """Until a signal comes. The processes stay as they are then."""
        try:
            async with asyncio.TaskGroup() as group:
                for name in (*self._loaders(), EDGE, APISERVER):
                    group.create_task(self.keep(name))
                group.create_task(self.announce(key, on_ready))
                group.create_task(log_file.keep_small(self.local.log_file))
                await self.told.wait()
                raise _Told
        except BaseExceptionGroup as failures:
            failure = first_failure(failures)
            if not isinstance(failure, _Told):
                raise failure from None

    def _loaders(self) -> tuple[str, ...]:
        settings = read_loading(self.local.environment(self.environment), state_dir=self.local.state_dir)
        return () if settings.kind is LoaderKind.DIRECT else (LOADER,)

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """While inside, signals mean something."""
        loop = asyncio.get_running_loop()

        def stop(*, let_go: bool) -> None:
            self.let_go = self.let_go or let_go
            self.told.set()

        loop.add_signal_handler(signal.SIGTERM, lambda: stop(let_go=False))
        loop.add_signal_handler(signal.SIGINT, lambda: stop(let_go=False))
        loop.add_signal_handler(signal.SIGUSR1, lambda: stop(let_go=True))
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
                loop.remove_signal_handler(number)


def check_free(address: Address) -> None:
    """Raises NotReadyError, before anything is started, when the API's address cannot be had.

    A Unix socket is taken over from whoever had it; that nobody of ours does, the lock says.
    """
    if address.path is not None:
        return
    try:
        listen(address).close()
    except OSError as exc:
        raise NotReadyError(
            f"listen: {exc.strerror}",
            detail={"field": "listen"},
            remedy="choose another address with --listen HOST:PORT or OPENDSEC_LISTEN",
        ) from exc


async def wait_ready(local: Local) -> NodeReport:
    """Until the apiserver answers and the edge has an available backend. Raises NotReadyError with the reasons."""
    edge = EdgeLink(local.edge, Address(path=local.edge_socket), patience_s=READY_S)
    api = EdgeLink(APISERVER, local.address, patience_s=READY_S)
    with contextlib.closing(edge), contextlib.closing(api):
        await api.call("GET", "/healthz", repeatable=True)
        while True:
            _, body = await edge.call("GET", "/v1/node", repeatable=True)
            report = codec.decode_answer(body, NodeReport)
            if any(backend.available for backend in report.backends.values()):
                return report
            if not any(backend.preparing for backend in report.backends.values()):
                break
            await asyncio.sleep(PREPARING_PAUSE_S)
    reasons = {name: [str(why) for why in backend.reasons] for name, backend in report.backends.items()}
    told = "; ".join(f"{name}: {', '.join(why) or 'no reason given'}" for name, why in reasons.items())
    raise NotReadyError(
        f"no backend works on this machine: {told}", detail={"backends": reasons}, remedy="run `opendsec doctor`"
    )


async def supervise(
    local: Local,
    environment: Mapping[str, str],
    *,
    on_ready: Callable[[NodeReport], None],
    on_stopped: Callable[[Stopped], None],
) -> None:
    """Run the platform until it is told to stop.

    Raises RunningAlreadyError, NotReadyError and what keeps it from starting.
    """
    with lock(local):
        own = identify(os.getpid())
        assert own is not None
        write_private(local.pid_file(SUPERVISOR), f"{own.pid} {own.start_ticks}".encode("ascii"))
        others = may_have_sandboxes(local)
        remember(local)
        supervisor = Supervisor(local, environment)
        with supervisor.listening():
            try:
                for name in (APISERVER, EDGE):
                    await processes.end(local, name)  # of a supervisor that was killed: sandboxes do not notice
                check_free(local.address)
                key = await asyncio.to_thread(ensure_local_key, local)
                await supervisor.run(key, on_ready)
            except BaseException:
                if not supervisor.ready:
                    for name in (APISERVER, EDGE, *(() if others else (LOADER,))):
                        await processes.end(local, name)
                if not (supervisor.ready or others):
                    clear_run_files(local)  # otherwise sandboxes may live, and are found again by them
                raise
            if not supervisor.let_go:
                on_stopped(await stop_platform(local, environment))


def main(arguments: list[str] | None = None) -> int:
    """The detached supervisor: tells its parent through a pipe how the start went, then works on."""
    parser = argparse.ArgumentParser(prog="python -m opendsec.host.supervisor")
    parser.add_argument("--ready-fd", type=int, required=True)
    ready_fd = parser.parse_args(arguments).ready_fd
    os.set_inheritable(ready_fd, False)
    configure(os.environ.get("OPENDSEC_LOG_LEVEL") or "info")

    def tell(message: dict[str, object]) -> None:
        # The parent may have gone; the platform does not depend on it.
        with contextlib.suppress(BrokenPipeError):
            os.write(ready_fd, msgspec.json.encode(message) + b"\n")
        os.close(ready_fd)

    def stopped(counts: Stopped) -> None:
        log.info("stopped", extra={"fields": {"sandboxes": counts.sandboxes, "processes": counts.processes}})

    try:
        run(
            supervise(
                chosen(os.environ), os.environ, on_ready=lambda report: tell({"ready": report}), on_stopped=stopped
            )
        )
    except errors.OpenDSecError as exc:
        tell({"error": codec.error_fields(exc)})
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
