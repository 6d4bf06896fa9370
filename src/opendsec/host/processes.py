"""The processes of one machine's platform: start them, find them again, end them.

A process is known by pid and start time; a pid that belongs to somebody else by now is never signalled. Where its pid
file was lost (the run directory was removed while the platform ran), it is found by what it was started with: our
module, these directories in its environment, this mount namespace.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

from opendsec.host.local import LOADER, SUPERVISOR, Local
from opendsec.linux.process import ProcessIdentity, identify, open_process, reap, send_signal, wait_ended
from opendsec.linux.process import spawn as spawn_program

_MODULES = {LOADER: "opendsec.host.loader", SUPERVISOR: "opendsec.host.supervisor"}
"""Where it is not `opendsec.<name>`."""

GRACE_S = 15.0
"""Between SIGTERM and SIGKILL."""

# The pid file is written by the process itself before it becomes the program: at no moment does it run unknown.
_START = 'echo "$$ $(cut -d" " -f22 /proc/$$/stat)" > "$1.new" && mv "$1.new" "$1" && shift && exec "$@"'


def spawn(local: Local, name: str, environment: Mapping[str, str]) -> tuple[int, int]:
    """Start the module of that process in a session of its own: a Ctrl-C at the terminal is the supervisor's business.

    Returns pid and pidfd. Output goes where ours goes.
    """
    words = [
        "-c",
        _START,
        "sh",
        str(local.pid_file(name)),
        sys.executable,
        "-m",
        _MODULES.get(name, f"opendsec.{name}"),
    ]
    return spawn_program(Path("/bin/sh"), argv=words, env=local.environment(environment))


def find(local: Local, name: str) -> int | None:
    """A pidfd of that process, to be closed by the caller; None when it does not run."""
    found = _open(local, name)
    return None if found is None else found[1]


def pid_of(local: Local, name: str) -> int | None:
    """Its pid while it runs."""
    found = _open(local, name)
    if found is None:
        return None
    os.close(found[1])
    return found[0]


def _open(local: Local, name: str) -> tuple[int, int] | None:
    """Pid and pidfd."""
    try:
        words = local.pid_file(name).read_text(encoding="ascii").split()
    except FileNotFoundError:
        identity = _looked_for(local, name)
    else:
        good = len(words) == 2 and all(word.isdigit() for word in words)
        identity = ProcessIdentity(int(words[0]), int(words[1])) if good else None
    pidfd = None if identity is None else open_process(identity)
    return None if identity is None or pidfd is None else (identity.pid, pidfd)


def _looked_for(local: Local, name: str) -> ProcessIdentity | None:
    """That process by what it was started with. Those of others cannot be read, and are none of ours."""
    module = _MODULES.get(name, f"opendsec.{name}")
    settings = {f"OPENDSEC_RUN_DIR={local.run_dir}", f"OPENDSEC_STATE_DIR={local.state_dir}"}
    ours = _read_link(Path("/proc/self/ns/mnt"))
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            words = entry.joinpath("cmdline").read_bytes().decode(errors="surrogateescape").split("\0")
            if words[1:3] != ["-m", module] or _read_link(entry / "ns/mnt") != ours:
                continue
            given = entry.joinpath("environ").read_bytes().decode(errors="surrogateescape").split("\0")
        except OSError:
            continue  # it has ended, or may not be looked at
        if settings <= set(given):
            return identify(int(entry.name))
    return None


def _read_link(path: Path) -> str:
    return str(path.readlink())


async def end(local: Local, name: str) -> int:
    """End that process (SIGTERM, then SIGKILL after GRACE_S); 1 when it ran, else 0. Its pid file goes."""
    found = _open(local, name)
    ended = 0
    if found is not None:
        pid, pidfd = found
        try:
            ended = int(send_signal(pidfd, signal.SIGTERM))
            try:
                await wait_ended(pidfd, timeout_s=GRACE_S)
            except TimeoutError:
                send_signal(pidfd, signal.SIGKILL)
                await wait_ended(pidfd)
        finally:
            os.close(pidfd)
        reap(pid)
    local.pid_file(name).unlink(missing_ok=True)
    return ended


async def let_go(local: Local, name: str) -> None:
    """Ask the supervisor to end without its children; returns when it has ended."""
    pidfd = find(local, name)
    if pidfd is None:
        return
    try:
        send_signal(pidfd, signal.SIGUSR1)
        await wait_ended(pidfd, timeout_s=GRACE_S)
    finally:
        os.close(pidfd)
