"""What the documents show works as they show it, and the demonstration finds exactly what it must find."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.node.cli.conftest import OPENDSEC

pytestmark = [pytest.mark.root, pytest.mark.native, pytest.mark.image, pytest.mark.erofs, pytest.mark.overlay]

ROOT = Path(__file__).parents[3]
_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def programs(page: str) -> list[str]:
    """The page's Python blocks that are whole programs."""
    blocks: list[str] = _BLOCK.findall((ROOT / page).read_text(encoding="utf-8"))
    return [block for block in blocks if "import" in block]


@pytest.mark.parametrize(
    ("page", "output"),
    [
        ("README.md", "0 hello\n\n"),
        ("docs/tutorial/first-sandbox.md", "0 42\n\n"),
        ("docs/howto/commands.md", "42\n\n"),
    ],
)
def test_the_first_program_of_a_page(platform: dict[str, str], page: str, output: str) -> None:
    program = programs(page)[0]
    done = subprocess.run([sys.executable, "-c", program], env=platform, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, output), done.stderr


@pytest.mark.parametrize(
    ("words", "status", "output"),
    [
        (("sh", "-c", "echo out; echo err >&2; exit 3"), 3, b"out\n"),
        (("python3", "-c", "print('hello')"), 0, b"hello\n"),
        (("sh", "-c", "kill -9 $$"), 137, b""),
        (("/etc/passwd",), 126, b""),
        (("no-such-program",), 127, b""),
    ],
)
def test_run_in_a_real_container(platform: dict[str, str], words: tuple[str, ...], status: int, output: bytes) -> None:
    argv = [*OPENDSEC, "run", "debian", "--", *words]
    done = subprocess.run(argv, env=platform, capture_output=True, timeout=60)
    assert (done.returncode, done.stdout) == (status, output), done.stderr


@pytest.mark.slow
def test_the_demonstration(platform: dict[str, str]) -> None:
    argv = [*OPENDSEC, "demo", "--count", "4", "--json"]
    done = subprocess.run(argv, env=platform, capture_output=True, timeout=180)
    answer = json.loads(done.stdout)
    assert (done.returncode, answer["wrong"]) == (0, [])
    assert [item["patched"] for item in sorted(answer["report"]["attempts"], key=lambda item: item["index"])] == [
        False,
        True,
        False,
        True,
    ]
    assert {item["after"]["exit_code"] for item in answer["report"]["attempts"] if item["patched"]} == {1}


def test_doctor_agrees_with_the_tests(platform: dict[str, str]) -> None:
    done = subprocess.run([*OPENDSEC, "doctor", "--json"], env=platform, capture_output=True, timeout=60)
    answer = json.loads(done.stdout)
    assert (done.returncode, answer["container"]) == (0, True)
    assert {item["name"] for item in answer["answers"] if item["needed"] and not item["ok"]} == set()
