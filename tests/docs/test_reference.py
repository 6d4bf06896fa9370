"""What the code knows and the documents do not say is a failure: settings, errors, end reasons, commands, links."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from opendsec.errors import CODES
from opendsec.model.command import EndReason
from opendsec.model.node import SandboxEnd

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "docs/reference"
_SETTING = re.compile(r"\bOPENDSEC_[A-Z_]*[A-Z]\b")
_LINK = re.compile(r"\]\((?!https?:)([^)#]+)")


def _code_settings() -> set[str]:
    sources = (ROOT / "src").rglob("*.py")
    return {name for path in sources for name in _SETTING.findall(path.read_text(encoding="utf-8"))}


def test_every_setting_is_documented_and_every_documented_one_exists() -> None:
    documented = set(_SETTING.findall((REFERENCE / "settings.md").read_text(encoding="utf-8")))
    assert documented == _code_settings()


@pytest.mark.parametrize("code", sorted(CODES))
def test_every_error_code_is_documented_with_its_class(code: str) -> None:
    cls = CODES[code]
    rows = (REFERENCE / "errors.md").read_text(encoding="utf-8").splitlines()
    row = next((line for line in rows if line.startswith(f"| `{code}` |")), "")
    assert f"`{cls.__name__}` | {cls.http_status} | {'yes' if cls.default_retryable else 'no'} |" in row


@pytest.mark.parametrize("reason", [*EndReason, *SandboxEnd])
def test_every_end_reason_is_documented(reason: str) -> None:
    assert f"`{reason}`" in (REFERENCE / "errors.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "page", sorted(p.relative_to(ROOT) for p in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
)
def test_links_lead_somewhere(page: Path) -> None:
    folder = (ROOT / page).parent
    links = _LINK.findall((ROOT / page).read_text(encoding="utf-8"))
    assert [link for link in links if not (folder / link).exists()] == []


def test_every_page_is_reached_from_the_readme() -> None:
    linked = set(_LINK.findall((ROOT / "README.md").read_text(encoding="utf-8")))
    pages = {str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")}
    assert pages - linked == set()


_PATH = re.compile(r"`([a-z_]+(?:/[A-Za-z_.-]+)+)`")


@pytest.mark.parametrize(
    "page", ["docs/ARCHITECTURE.md", "docs/GLOSSARY.md", "AGENTS.md", "CONTRIBUTING.md", "README.md"]
)
def test_paths_that_are_named_exist(page: str) -> None:
    roots = (ROOT, ROOT / "src/opendsec")
    named = set(_PATH.findall((ROOT / page).read_text(encoding="utf-8")))
    assert {name for name in named if not any((root / name).exists() for root in roots)} == set()
