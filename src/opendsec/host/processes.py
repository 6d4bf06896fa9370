"""The processes of one machine's platform: start them, find them again, end them.

A process is known by pid and start time; a pid that belongs to somebody else by now is never signalled.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

from opendsec.host.local import LOADER, Local
from opendsec.linux.process import ProcessIdentity, open_process, reap, send_signal, wait_ended
from opendsec.linux.process import spawn as spawn_program

_MODULES = {LOADER: "opendsec.host.loader"}
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
    try:
        words = local.pid_file(name).read_text(encoding="ascii").split()
    except FileNotFoundError:
        return None
    if len(words) != 2 or not all(word.isdigit() for word in words):
        return None
    return open_process(ProcessIdentity(int(words[0]), int(words[1])))


def pid_of(local: Local, name: str) -> int | None:
    """Its pid while it runs."""
    pidfd = find(local, name)
    if pidfd is None:
        return None
    os.close(pidfd)
    return int(local.pid_file(name).read_text(encoding="ascii").split()[0])


async def end(local: Local, name: str) -> int:
    """End that process (SIGTERM, then SIGKILL after GRACE_S); 1 when it ran, else 0. Its pid file goes."""
    pidfd = find(local, name)
    ended = 0
    if pidfd is not None:
        pid = int(local.pid_file(name).read_text(encoding="ascii").split()[0])
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
