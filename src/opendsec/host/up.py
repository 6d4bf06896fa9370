"""`opendsec up`, `down` and `status`: the whole platform on this machine, without anything to set up.

`up` runs it in the foreground (Ctrl-C stops everything), `up -d` returns when it is ready. Neither decides anything
about sandboxes; `supervisor` keeps the processes going, `stopping` ends them.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from opendsec.errors import NodeError
from opendsec.host import log_file, processes
from opendsec.host.edge_report import ask_edge
from opendsec.host.local import APISERVER, EDGE, LOADER, SUPERVISOR, Local, RunningAlreadyError, chosen, lock, started
from opendsec.host.stopping import Stopped, stop_platform
from opendsec.host.supervisor import supervise
from opendsec.linux.process import send_signal, spawn
from opendsec.model.node import BackendReport, NodeReport
from opendsec.server.logs import configure
from opendsec.server.runner import run
from opendsec.store.loading.sources import is_remote
from opendsec.wire import codec

LOG_TAIL_LINES = 20
SHOWN_IMAGES = 10

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]

_stderr = Console(stderr=True, highlight=False)


def up(
    detach: Annotated[
        bool, typer.Option("-d", "--detach", help="Return when it is ready; stop it with `down`.")
    ] = False,
    listen: Annotated[
        str | None,
        typer.Option(help="host:port or unix:/path of the API. Default: 127.0.0.1:8700, or OPENDSEC_LISTEN."),
    ] = None,
    edge_name: Annotated[str | None, typer.Option(help="Name of this machine's edge. Default: local.")] = None,
    restart: Annotated[
        bool,
        typer.Option(
            "--restart", help="If it runs, start its processes anew, as after an upgrade; sandboxes and commands go on."
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Run the platform on this machine: apiserver and edge, started again when they die."""
    local = chosen(
        started(os.environ).environment(os.environ) if restart else os.environ, listen=listen, edge=edge_name
    )
    try:
        with _problems(as_json):
            if restart:
                asyncio.run(processes.let_go(local, SUPERVISOR))
            if detach:
                _show_ready(local, _start_detached(local), as_json=as_json)
            else:
                _run_here(local, as_json=as_json)
    except RunningAlreadyError as exc:
        running = started(os.environ)
        if as_json:
            _print_json({"api_url": running.api_url, "already_running": True})
        else:
            print(
                f"OpenDSec is running already: {running.api_url}. "
                "`opendsec down` stops it, `opendsec up -d --restart` starts it anew and sandboxes go on."
            )
        if not detach:
            raise typer.Exit(1) from exc


def down(as_json: Json = False) -> None:
    """Stop all sandboxes and then the platform on this machine, and say what was stopped."""
    local = started(os.environ)
    with _problems(as_json):
        stopped = asyncio.run(_take_over_and_stop(local, show=not as_json))
    if as_json:
        _print_json(stopped)
    else:
        _print_stopped(stopped)
    if stopped.failed:
        raise typer.Exit(1)


def status(as_json: Json = False) -> None:
    """What of the platform runs on this machine. Exit status 0 when it is ready, 3 when it is not."""
    local = started(os.environ)
    pids = {name: processes.pid_of(local, name) for name in (SUPERVISOR, APISERVER, EDGE)}
    if (loader := processes.pid_of(local, LOADER)) is not None:
        pids[LOADER] = loader
    report, problem = asyncio.run(ask_edge(local))
    ready = report is not None and pids[APISERVER] is not None
    if as_json:
        _print_json({"ready": ready, "api_url": local.api_url, "pids": pids, "node": report, "problem": problem})
    else:
        _print_status(local, pids, report, problem)
    if not ready:
        raise typer.Exit(3)


# --- up ---


def _run_here(local: Local, *, as_json: bool) -> None:
    configure(os.environ.get("OPENDSEC_LOG_LEVEL") or "info")

    def ready(report: NodeReport) -> None:
        _show_ready(local, codec.to_builtins(report), as_json=as_json)

    def stopped(counts: Stopped) -> None:
        if not as_json:
            _print_stopped(counts)

    run(supervise(local, os.environ, on_ready=ready, on_stopped=stopped))


def _start_detached(local: Local) -> Mapping[str, Any]:
    """The edge's report. Raises what kept the supervisor from getting ready; nothing is left then."""
    with lock(local):
        pass  # says at once that it is running already, or that this user may not run it
    read_end, write_end = os.pipe()
    with _log_file(local) as log:
        begun = os.fstat(log).st_size
        words = ["-m", "opendsec.host.supervisor", "--ready-fd", "3"]
        fds = {1: log, 2: log, 3: write_end}
        pid, pidfd = spawn(Path(sys.executable), argv=words, fds=fds, env=local.environment(os.environ))
    os.close(write_end)
    try:
        with os.fdopen(read_end, "rb") as pipe:
            line = pipe.readline()
    except KeyboardInterrupt:
        send_signal(pidfd, signal.SIGTERM)
        raise
    finally:
        os.close(pidfd)
    if not line:
        raise NodeError(
            f"the supervisor (pid {pid}) ended before anything was ready", remedy=_log_tail(local.log_file, begun)
        )
    message: dict[str, Any] = msgspec.json.decode(line)
    if "error" in message:
        error = codec.error_from_fields(message["error"])
        if "process" in error.detail or "backends" in error.detail:
            _stderr.print(_log_tail(local.log_file, begun), markup=False, soft_wrap=True)
        raise error
    report: Mapping[str, Any] = message["ready"]
    return report


@contextmanager
def _log_file(local: Local) -> Iterator[int]:
    path = local.log_file
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if path.exists() and path.stat().st_size > log_file.KEEP_BYTES:
        path.rename(log_file.older(path))
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _log_tail(path: Path, begun: int) -> str:
    with path.open("rb") as file:
        file.seek(begun)
        lines = file.read().decode("utf-8", "replace").splitlines()
    return "\n".join([f"the last lines of {path}:", *lines[-LOG_TAIL_LINES:]])


# --- down and status ---


async def _take_over_and_stop(local: Local, *, show: bool) -> Stopped:
    await processes.let_go(local, SUPERVISOR)
    with lock(local), _progress(show) as on_progress:
        return await stop_platform(local, os.environ, on_progress=on_progress)


@contextmanager
def _progress(show: bool) -> Iterator[Callable[[int, int], None]]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=_stderr, transient=True, disable=not show) as bar:
        task = bar.add_task("stopping sandboxes", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


# --- words ---


@contextmanager
def _problems(as_json: bool) -> Iterator[None]:
    """Errors that do not belong to the platform's own tree, in its words."""
    try:
        yield
    except OSError as exc:
        remedy = "the platform belongs to root: use sudo" if isinstance(exc, PermissionError) and os.geteuid() else ""
        sentence = f"{exc.strerror or exc}: {exc.filename}" if exc.filename else str(exc)
        raise NodeError(sentence, remedy=remedy, retryable=False) from exc


def _show_ready(local: Local, report: Mapping[str, Any], *, as_json: bool) -> None:
    if as_json:
        _print_json({"api_url": local.api_url, "edge": local.edge, "node": report})
        return
    usable = sorted(name for name, backend in report["backends"].items() if backend["available"])
    images = _named(report["images"], report.get("image_count", 0)) or _no_images(local)
    coming = sorted(name for name, backend in report["backends"].items() if backend.get("preparing"))
    more = f" (being prepared: {', '.join(coming)})" if coming else ""
    what = f"edge {local.edge}, backends {', '.join(usable)}{more}, images {images}"
    print(f"OpenDSec is ready: {local.api_url}, {what}", flush=True)


def _print_stopped(stopped: Stopped) -> None:
    words = [_counted(stopped.sandboxes, "sandbox", "es"), _counted(stopped.processes, "process", "es")]
    words.append(_counted(stopped.layers, "layer mount", "s"))
    nothing = not (stopped.sandboxes or stopped.processes or stopped.layers or stopped.failed)
    print("OpenDSec was not running; nothing to stop." if nothing else f"Stopped {', '.join(words)}.")
    for reason in stopped.failed:
        _stderr.print(f"not stopped: {reason}", markup=False, soft_wrap=True)


def _counted(count: int, word: str, plural: str) -> str:
    return f"{count} {word}" if count == 1 else f"{count} {word}{plural}"


def _print_status(local: Local, pids: Mapping[str, int | None], report: NodeReport | None, problem: str) -> None:
    for name, pid in pids.items():
        print(f"{name:<11} {f'pid {pid}' if pid is not None else 'not running'}")
    if not any(pids.values()):
        print("Nothing runs. `opendsec up -d` starts it.")
        return
    if report is None:
        print(f"node        {problem}")
        return
    print(f"api         {local.api_url}")
    print(f"sandboxes   {report.live} live, {report.creating} being created")
    for kind, backend in sorted(report.backends.items()):
        print(f"{kind:<11} {_backend_words(backend)}")
    print(f"images      {_named(report.images, report.image_count) or _no_images(local)}")


def _backend_words(backend: BackendReport) -> str:
    if not backend.available:
        return "; ".join(backend.reasons)
    return "available" + (f", degraded: {'; '.join(backend.degraded)}" if backend.degraded else "")


def _no_images(local: Local) -> str:
    """What to say instead of names; behind plain HTTP nobody knows whether there are none."""
    store = local.environment(os.environ).get("OPENDSEC_STORE", "")
    if store.startswith(("http://", "https://")):
        return "not known (a store behind HTTP cannot be listed)"
    if is_remote(store):
        return "none yet (`opendsec image sync` brings them)"
    return "none yet (`opendsec image build-debian debian`)"


def _named(images: Sequence[str], count: int) -> str:
    """The first few names, and how many more there are."""
    shown = list(images[:SHOWN_IMAGES])
    return ", ".join([*shown, *([f"and {count - len(shown)} more"] if count > len(shown) else [])])


def _print_json(value: object) -> None:
    sys.stdout.buffer.write(codec.encode(value) + b"\n")
    sys.stdout.flush()
