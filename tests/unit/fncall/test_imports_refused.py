"""What a caller reads when a module of a function call cannot be imported."""

from __future__ import annotations

import subprocess
import sys

import pytest

from opendsec.fncall.starting import not_imported


def said(program: str) -> str:
    """What Python itself says."""
    return subprocess.run([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True, timeout=120).stderr


@pytest.mark.parametrize(
    ("program", "module"),
    [
        ("__import__('no_such_module')", "no_such_module"),
        ("__import__('no_such.inner')", "no_such"),
        ("__import__('json.no_such')", "json.no_such"),
    ],
)
def test_a_module_that_is_not_there_is_named(program: str, module: str) -> None:
    refused = not_imported(said(program), "debian")
    assert refused.message == f"imports: image debian has no module {module}"
    assert refused.detail == {"field": "imports", "module": module}


def test_what_else_a_module_raises_is_shown_whole() -> None:
    refused = not_imported(said("raise ImportError('no libx.so')"), "debian")
    assert "Traceback" in refused.message
    assert "no libx.so" in refused.message
    assert refused.detail == {"field": "imports"}
