"""What must not stand in the repository: paths of one machine, unfinished marks, words of a place of work."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
THIS = Path(__file__).relative_to(ROOT)

BANNED = {
    "a path of one machine": re.compile(r"/work/(main|brief|shared|\.)|/root/\.pyenv"),
    "an unfinished mark": re.compile(r"\b(TODO|FIXME|XXX)\b"),
    "an issue number": re.compile(r"\bissue #?\d+\b", re.IGNORECASE),
    "a word of a place of work": re.compile(r"\b(helper [A-H]|the lead|sub-?agent)\b"),
}
ALLOWED: set[tuple[str, str]] = set()


def _tracked() -> list[Path]:
    listed = subprocess.run(
        ["git", "-c", f"safe.directory={ROOT}", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, timeout=30
    )
    names = [name for name in listed.stdout.decode().split("\0") if name]
    return [Path(name) for name in names if Path(name) != THIS and (ROOT / name).is_file()]


def test_no_banned_words() -> None:
    found = []
    for name in _tracked():
        try:
            text = (ROOT / name).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        for number, line in enumerate(text.splitlines(), 1):
            for what, pattern in BANNED.items():
                match = pattern.search(line)
                if match and (str(name), match.group()) not in ALLOWED:
                    found.append(f"{name}:{number}: {what}: {line.strip()[:100]}")
    assert found == []


def test_a_worker_is_called_an_edge_or_a_process() -> None:
    sources = [name for name in _tracked() if name.parts[:2] == ("src", "opendsec") and name.suffix == ".py"]
    assert len(sources) > 100
    found = [
        f"{name}:{number}"
        for name in sources
        for number, line in enumerate((ROOT / name).read_text(encoding="utf-8").splitlines(), 1)
        if re.search(r"(?<![a-z])workers?(?![a-z])", line, re.IGNORECASE)
    ]
    assert found == []


def test_names_of_modules_say_something() -> None:
    vague = {"utils", "util", "helpers", "helper", "common", "misc", "manager", "handler", "service"}
    found = [str(path) for path in _tracked() if path.stem in vague]
    assert found == []
