"""Installs a kernel or Firecracker again and again, killed a step later each time, until one gets to its end. After
each the state directory must hold what was there before or what is new, whole.

    python dying_installation.py kernel|firecracker STATE ORIGIN

A step is whatever touches the state directory: Python's audit events of it (open, mkdir, rename, remove …). Writes how
many installations were killed.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from opendsec.vm import firecracker_install, kernels, kernels_install


def die_at(step: int, state: Path) -> None:
    left = step

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal left
        if any(
            isinstance(argument, str | bytes | os.PathLike) and _is_below(state, argument) for argument in arguments
        ):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def _is_below(state: Path, argument: object) -> bool:
    return isinstance(argument, str | bytes | os.PathLike) and os.fsdecode(argument).startswith(str(state))


def install(what: str, state: Path, origin: str) -> None:
    if what == "kernel":
        kernels_install.install(state, origin, say=lambda _: None)
    else:
        firecracker_install.install(state, origin, say=lambda _: None)


def is_killed(work: Callable[[], None], step: int, state: Path) -> bool:
    child = os.fork()
    if child == 0:
        die_at(step, state)
        work()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if not os.WIFSIGNALED(status):
        assert os.waitstatus_to_exitcode(status) == 0
        return False
    assert os.WTERMSIG(status) == signal.SIGKILL
    return True


def main() -> None:
    what, state, origin = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    look: Callable[[Path], object] = kernels.find_kernel if what == "kernel" else firecracker_install.find_programs
    killed = 0
    while is_killed(lambda: install(what, state, origin), killed + 1, state):
        killed += 1
        look(state)
    look(state)
    sys.stdout.write(f"{killed}\n")


main()
