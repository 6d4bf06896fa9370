"""`opendsec shell` on a real terminal: echo, size, resize, interrupt, status, and the terminal as it was afterwards."""

from __future__ import annotations

import fcntl
import json
import os
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from tests.node.cli.conftest import OPENDSEC

pytestmark = [pytest.mark.root, pytest.mark.native, pytest.mark.image, pytest.mark.erofs, pytest.mark.overlay]

WAIT_S = 30.0


def set_size(descriptor: int, rows: int, cols: int) -> None:
    fcntl.ioctl(descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", rows, cols, 0, 0))


@dataclass
class Terminal:
    """A terminal window with `opendsec shell` in it."""

    master: int
    slave: int
    before: list[object]
    program: subprocess.Popen[bytes]
    seen: bytes = field(default=b"")

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def expect(self, text: str) -> None:
        """Waits until the screen has shown it; what comes after it is looked at next time."""
        deadline = time.monotonic() + WAIT_S
        while text.encode() not in self.seen:
            left = deadline - time.monotonic()
            assert left > 0, f"no {text!r} in {self.seen!r}"
            if select.select([self.master], [], [], left)[0]:
                self.seen += os.read(self.master, 65536)
        self.seen = self.seen.partition(text.encode())[2]


@pytest.fixture
def terminal(platform: dict[str, str]) -> Iterator[Terminal]:
    """A shell in a fresh sandbox, on a terminal of 40 rows and 100 columns."""
    master, slave = os.openpty()
    set_size(slave, 40, 100)
    before = termios.tcgetattr(slave)
    program = subprocess.Popen(
        [*OPENDSEC, "shell", "debian"],
        env=platform,
        stdin=slave,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
    )
    opened = Terminal(master, slave, before, program)
    try:
        opened.expect("# ")
        yield opened
    finally:
        program.kill()
        program.wait(60)
        os.close(master)
        os.close(slave)


def live(platform: dict[str, str]) -> list[object]:
    done = subprocess.run([*OPENDSEC, "ls", "--json"], env=platform, capture_output=True, check=True, timeout=120)
    found: list[object] = json.loads(done.stdout)
    return found


def test_a_session_from_prompt_to_status(terminal: Terminal, platform: dict[str, str]) -> None:
    terminal.type("stty size; tty\r")
    terminal.expect("40 100\r\n")
    terminal.expect("/dev/pts/")
    set_size(terminal.slave, 50, 132)
    os.kill(terminal.program.pid, signal.SIGWINCH)
    terminal.type("until [ \"$(stty size)\" = '50 132' ]; do sleep 0.05; done; echo resized\r")
    terminal.expect("echo resized\r\n")
    terminal.expect("resized\r\n")
    terminal.type("sleep 600\r")
    terminal.expect("sleep 600\r\n")
    terminal.type("\x03")
    terminal.expect("^C")
    terminal.type("exit 7\r")
    assert terminal.program.wait(WAIT_S) == 7
    assert termios.tcgetattr(terminal.slave) == terminal.before
    assert live(platform) == []


def test_a_signal_restores_the_terminal_and_stops_the_sandbox(terminal: Terminal, platform: dict[str, str]) -> None:
    terminal.program.send_signal(signal.SIGTERM)
    assert terminal.program.wait(WAIT_S) == 143
    assert termios.tcgetattr(terminal.slave) == terminal.before
    assert live(platform) == []
