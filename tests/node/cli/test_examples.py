"""What the documents show works as they show it, and the demonstration finds exactly what it must find."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from tests.node.cli.conftest import OPENDSEC

pytestmark = [pytest.mark.root, pytest.mark.native, pytest.mark.image, pytest.mark.erofs, pytest.mark.overlay]

ROOT = Path(__file__).parents[3]
_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: str) -> list[str]:
    """The page's Python blocks."""
    return _BLOCK.findall((ROOT / page).read_text(encoding="utf-8"))


def python(platform: dict[str, str], folder: Path, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """One Python program, as a reader of the documents would run it in `folder`."""
    argv = [sys.executable, "-c", program, *arguments]
    return subprocess.run(argv, env=platform, cwd=folder, capture_output=True, text=True, timeout=100)


@pytest.mark.parametrize(
    ("page", "output"),
    [("README.md", "0 hello\n\n"), ("docs/howto/commands.md", "42\n\n"), ("docs/howto/files.md", "")],
)
def test_a_page_that_is_one_program(platform: dict[str, str], tmp_path: Path, page: str, output: str) -> None:
    (tmp_path / "project/build").mkdir(parents=True)
    (tmp_path / "project/build/result").write_text("done")
    program = blocks(page)[0]
    done = python(platform, tmp_path, program)
    assert (done.returncode, done.stdout) == (0, output), done.stderr
    assert page != "docs/howto/files.md" or (tmp_path / "build/result").read_text() == "done"


_EXPRESSIONS = """
import ast, sys
names = {}
for block in ast.literal_eval(sys.argv[1]):
    for line in ast.parse(block).body:
        if isinstance(line, ast.Expr):
            value = eval(compile(ast.Expression(line.value), "page", "eval"), names)
            print("" if value is None else ">", "" if value is None else str(value).strip())
        else:
            exec(compile(ast.Module([line], []), "page", "exec"), names)
"""
"""Types the blocks into one session, and shows values as an interactive Python does."""


def test_the_tutorial_from_top_to_bottom(platform: dict[str, str], tmp_path: Path) -> None:
    done = python(platform, tmp_path, _EXPRESSIONS, repr(blocks("docs/tutorial/first-sandbox.md")))
    assert done.returncode == 0, done.stderr
    said = [line.removeprefix("> ") for line in done.stdout.splitlines()]
    for expected in (
        "0 42",
        "2",
        "ls: cannot access '/nowhere': No such file or directory",
        "timeout",
        "/tmp x",
        "done",
    ):
        assert expected in said, expected
    assert sorted(line for line in said if line.endswith(" 42")) == sorted(["0 42", *(f"{i} 42" for i in range(64))])
    left = subprocess.run([*OPENDSEC, "ls", "-q"], env=platform, capture_output=True, timeout=120)
    assert left.stdout == b""


_ASYNC_BLOCKS = """
import ast, asyncio, inspect, sys
import opendsec

async def main():
    names = {name: getattr(opendsec, name) for name in opendsec.__all__}
    args = names["args"] = opendsec.DSecContainerRunArgs(container_image="debian")
    names |= {"programs": ["print(1)", "raise SystemExit(1)"], "reward": {}}
    async with opendsec.DSecClient() as client:
        for number, block in enumerate(ast.literal_eval(sys.argv[1])):
            async with client.container(args) as sandbox:
                await sandbox.files.write("/work/Makefile", "test:\\n\\ttrue\\n")
                process = await sandbox.commands.start("echo out")
                names |= {"client": client, "sandbox": sandbox, "process": process}
                code = compile(block, f"block {number}", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
                value = eval(code, names)
                if inspect.isawaitable(value):
                    await value
        async for status in client.list(state="running"):
            await client.stop(status.sandbox_id)

asyncio.run(main())
"""
"""Each block with `client`, `args`, and a fresh `sandbox` and `process`."""


@pytest.mark.qemu
@pytest.mark.vmkernel
def test_every_block_of_the_sdk_reference(platform: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "project").mkdir()
    (tmp_path / "project/a").write_text("a")
    found = blocks("docs/reference/sdk.md")
    assert len(found) >= 8
    done = python(platform, tmp_path, _ASYNC_BLOCKS, repr(found))
    assert done.returncode == 0, done.stderr
    assert "b'out\\n'" in done.stdout


def test_the_readmes_call(platform: dict[str, str], tmp_path: Path) -> None:
    done = python(platform, tmp_path, _ASYNC_BLOCKS, repr(blocks("README.md")[1:]))
    assert (done.returncode, done.stdout) == (0, "ok 144\n\n"), done.stderr


def test_the_readmes_command(platform: dict[str, str]) -> None:
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    command = next(line for line in re.findall(r"`([^`\n]+)`", page) if line.startswith("opendsec run"))
    done = subprocess.run(
        [*OPENDSEC, *shlex.split(command)[1:]], env=platform, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, "hello\n"), done.stderr


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
    done = subprocess.run(argv, env=platform, capture_output=True, timeout=120)
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
    done = subprocess.run([*OPENDSEC, "doctor", "--json"], env=platform, capture_output=True, timeout=120)
    answer = json.loads(done.stdout)
    assert (done.returncode, answer["container"]) == (0, True)
    assert {item["name"] for item in answer["answers"] if item["needed"] and not item["ok"]} == set()
