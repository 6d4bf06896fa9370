"""The public names: complete, sorted, loadable, the same in both SDKs, each with a docstring and a place in the
reference."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import opendsec
import opendsec.sync
from opendsec import errors

REFERENCE = Path(__file__).parents[3] / "docs" / "reference" / "sdk.md"


def test_names_are_sorted_and_alike() -> None:
    assert opendsec.__all__ == sorted(set(opendsec.__all__))
    assert opendsec.__all__ == opendsec.sync.__all__


@pytest.mark.parametrize("name", opendsec.__all__)
def test_each_name_loads_and_is_documented(name: str) -> None:
    value = getattr(opendsec, name)
    assert inspect.getdoc(value)
    assert inspect.getdoc(getattr(opendsec.sync, name))
    assert f"`{name}`" in REFERENCE.read_text(encoding="utf-8")


def test_every_error_is_public() -> None:
    assert {cls.__name__ for cls in errors.CODES.values()} <= set(opendsec.__all__)


@pytest.mark.parametrize("name", ["DSecClient", "Sandbox", "Commands", "Files", "Images", "Process", "ProcessInput"])
def test_every_public_method_is_documented_and_has_a_twin(name: str) -> None:
    text = REFERENCE.read_text(encoding="utf-8")
    for method, member in inspect.getmembers(getattr(opendsec, name)):
        if method.startswith("_"):
            continue
        assert inspect.getdoc(member), method
        assert f"{method}" in text, method
        twin = "close" if method == "aclose" else method
        assert hasattr(getattr(opendsec.sync, name), twin), method


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = opendsec.no_such_name


def test_importing_a_part_does_not_load_the_sdk() -> None:
    code = "import sys, opendsec.errors; sys.exit(any(m in sys.modules for m in ('httpcore', 'anyio', 'msgspec')))"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, env={"PYTHONPATH": ":".join(sys.path)})
