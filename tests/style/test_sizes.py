"""Files and functions stay small enough to be read: at most 800 lines a module, 60 a function.

`ALLOWED` may only shrink: an entry that no longer needs its allowance fails too.
"""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
MODULE_LINES = 800
FUNCTION_LINES = 60
ALLOWED: dict[str, int] = {}
"""`path` or `path::function` → lines it has for now."""


def _sources() -> list[Path]:
    folders = ("src", "tests", "benchmarks", "scripts")
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def _measured() -> dict[str, tuple[int, int]]:
    """Everything with a limit: name → (lines, limit)."""
    found: dict[str, tuple[int, int]] = {}
    for path in _sources():
        text = path.read_text(encoding="utf-8")
        name = str(path.relative_to(ROOT))
        found[name] = (text.count("\n"), MODULE_LINES)
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                found[f"{name}::{node.name}"] = (lines, FUNCTION_LINES)
    return found


def test_modules_and_functions_are_small() -> None:
    too_big = {name: lines for name, (lines, limit) in _measured().items() if lines > max(limit, ALLOWED.get(name, 0))}
    assert too_big == {}


def test_the_allowances_are_still_needed() -> None:
    measured = _measured()
    stale = [name for name in ALLOWED if measured.get(name, (0, 0))[0] <= measured.get(name, (0, 0))[1]]
    assert stale == []


def test_native_sources_are_small() -> None:
    files = [*(ROOT / "native").rglob("*.c"), *(ROOT / "native").rglob("*.h")]
    too_big = {str(path.relative_to(ROOT)): n for path in files if (n := path.read_text().count("\n")) > MODULE_LINES}
    assert too_big == {}
