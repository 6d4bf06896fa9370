"""Writes docs/reference/backends.md: what each backend offers, and which promises the contract suite holds it to.

Read from the backends themselves (`Backend.offers`) and from the tests in tests/contract. `--check` changes nothing and
fails when the page is not current.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from opendsec.backends.base import Backend, Capability
from opendsec.backends.container import ContainerBackend
from opendsec.backends.dummy import DummyBackend
from opendsec.backends.fullvm import FullVmBackend
from opendsec.backends.microvm import MicroVmBackend

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/reference/backends.md"
BACKENDS: tuple[type[Backend], ...] = (ContainerBackend, MicroVmBackend, FullVmBackend, DummyBackend)
HEAD = """\
# Which backend can what

Written by `scripts/backends_table.py` from the backends and from their tests.

One SDK over all of them: the class of the run arguments chooses. What a backend does not offer is refused by name
(`unsupported`, with the field or the capability), never left out silently. Calls (`client.fncall`) have no sandbox and
are not listed: see [calls](../howto/fncall.md).

## Offered

At best: on a host that lacks something (a control group controller, nftables, project quotas) a capability may be
missing, and `opendsec doctor`, `opendsec status` and `GET /v1/node` say which and why. A full VM runs commands,
sessions, terminals, files and clipboard only with our agent inside.

"""
WORDS: Mapping[Capability, str] = {
    Capability.EXEC: "commands",
    Capability.SESSIONS: "sessions: shells that live on",
    Capability.PTY: "terminals",
    Capability.FILES: "files",
    Capability.NETWORK: "outgoing network",
    Capability.MEMORY_LIMIT: "`memory_limit_mb`",
    Capability.CPU_LIMIT: "`cpu_cores_limit`",
    Capability.PIDS_LIMIT: "`pids_limit`",
    Capability.DISK_LIMIT: "`disk_limit_mb`",
    Capability.PAUSE: "pause and resume",
    Capability.PACK: "`pack_diff`: files written become a layer",
    Capability.SNAPSHOT: "snapshots and forks: memory and disk",
    Capability.RECOVER: "sandboxes outlive the edge's kill -9",
    Capability.PORTS: "connections to ports inside",
    Capability.SCREEN: "screen",
    Capability.INPUT: "mouse and keyboard",
    Capability.SERIAL: "serial console",
    Capability.CLIPBOARD: "clipboard",
}
PROMISES = """
A backend that parks ({parks}) gives its memory back while paused: what it was at goes on after the resume.

## Promises

Each line is a test of the contract suite (`tests/contract`), run against real sandboxes of each kind in CI. `yes`: it
holds; `refused`: the backend does not offer what it takes, and says so; `-`: it is about something this kind has not.

"""


def page() -> str:
    """The whole page."""
    kinds = [backend.kind.value for backend in BACKENDS]
    offers = [[words, *_marks(capability)] for capability, words in WORDS.items()]
    text = HEAD + _table(["", *kinds], offers)
    parks = ", ".join(backend.kind.value for backend in BACKENDS if backend.parks) or "none"
    text += PROMISES.replace("{parks}", parks)
    for path in sorted((ROOT / "tests/contract").glob("test_*.py")):
        text += _section(path, kinds)
    return text


def _marks(capability: Capability) -> list[str]:
    return ["yes" if capability in backend.offers else "-" for backend in BACKENDS]


def _section(path: Path, kinds: Sequence[str]) -> str:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    module = importlib.import_module(f"tests.contract.{path.stem}")
    places = set(_places(module))
    rows = [[_sentence(one.name), *_held(one, kinds, places)] for one in _tests(tree)]
    title = (ast.get_docstring(tree) or path.stem).splitlines()[0].rstrip(".:;")
    return f"### {title}\n\n{_table(['', *kinds], rows)}\n" if rows else ""


def _tests(tree: ast.Module) -> Iterator[ast.AsyncFunctionDef]:
    for node in tree.body:
        if isinstance(node, ast.AsyncFunctionDef) and node.name.startswith("test_"):
            yield node


def _held(test: ast.AsyncFunctionDef, kinds: Sequence[str], places: set[str]) -> list[str]:
    needed = {
        Capability[node.args[1].attr]
        for node in ast.walk(test)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "need"
        and isinstance(node.args[1], ast.Attribute)
    }
    by_kind = {backend.kind.value: backend for backend in BACKENDS}
    return ["-" if kind not in places else "yes" if needed <= by_kind[kind].offers else "refused" for kind in kinds]


def _places(module: ModuleType) -> list[str]:
    """The kinds a module's tests run on, as the suite itself decides."""
    conftest = importlib.import_module("tests.contract.conftest")
    found: list[str] = []

    class Asked:
        """As much of a test as pytest shows."""

        fixturenames = ("place",)

        def __init__(self) -> None:
            self.module = module

        def parametrize(self, _name: str, params: Sequence[Any], **_given: object) -> None:
            found.extend(str(one.id) for one in params)

    conftest.pytest_generate_tests(Asked())
    return found


def _sentence(name: str) -> str:
    return name.removeprefix("test_").replace("_", " ")


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main() -> int:
    """Write the page, or with `--check` compare it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    text = page()
    if not check:
        PAGE.write_text(text, encoding="utf-8")
        return 0
    if PAGE.exists() and PAGE.read_text(encoding="utf-8") == text:
        return 0
    print(f"{PAGE} is not current: run scripts/backends_table.py", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    raise SystemExit(main())
