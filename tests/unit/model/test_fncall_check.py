"""Which calls are refused, and that the field at fault is named."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opendsec.errors import InvalidSpecError
from opendsec.model.fncall import (
    CallStatus,
    Case,
    CaseOutcome,
    FnCallResult,
    FnCallSpec,
    GpuRequest,
    TaskType,
    Verdict,
)
from opendsec.model.fncall_check import (
    MAX_CALL_BYTES,
    MAX_CASES,
    MAX_CODE_BYTES,
    MAX_FILES,
    check_call,
    edge_of_artifact,
    new_artifact_name,
)

SCRIPT = FnCallSpec(code="1")
FUNCTION = FnCallSpec(task_type=TaskType.FUNCTION, code="def f(): pass", function="f")
JUDGE = FnCallSpec(task_type=TaskType.JUDGE, code="1", cases=(Case(),))
ARTIFACT = "art-local-" + "a" * 16


@pytest.mark.parametrize(
    "spec",
    [
        SCRIPT,
        FUNCTION,
        JUDGE,
        replace(FUNCTION, arguments="[[" + "[" * 198 + "]" * 198 + "], {}]"),
        replace(FUNCTION, arguments='[[1], {"a": null}]', imports=("os.path", "json"), fetch=("out",)),
        replace(SCRIPT, files={"a/b.txt": b"", "a/c": b"", "ä ö": b""}, args=("x", ""), env={"A": "b=c"}),
        replace(SCRIPT, code="", artifact=ARTIFACT, language="cpp"),
        replace(JUDGE, code="", artifact=ARTIFACT),
        replace(SCRIPT, gpu=GpuRequest(profile="1g.10gb"), image="library/python:3.12"),
        replace(SCRIPT, language="c++"),
        FnCallSpec(task_type=TaskType.COMPILE, language="c", code="int main(){}"),
    ],
)
def test_good_calls(spec: FnCallSpec) -> None:
    assert check_call(spec) is spec


@pytest.mark.parametrize(
    ("base", "field", "value"),
    [
        (SCRIPT, "code", ""),
        (SCRIPT, "code", "x" * (MAX_CODE_BYTES + 1)),
        (SCRIPT, "code", "\ud800"),
        (SCRIPT, "language", "Python 3"),
        (SCRIPT, "language", ""),
        (SCRIPT, "files", {"": b""}),
        (SCRIPT, "files", {".": b""}),
        (SCRIPT, "files", {"a//b": b""}),
        (SCRIPT, "files", {"a/": b""}),
        (SCRIPT, "files", {"/a": b""}),
        (SCRIPT, "files", {"a/../b": b""}),
        (SCRIPT, "files", {"a\0": b""}),
        (SCRIPT, "files", {"a" * 256: b""}),
        (SCRIPT, "files", {"a/" * 600 + "b": b""}),
        (SCRIPT, "files", {"a": b"", "a/b": b""}),
        (SCRIPT, "files", {str(n): b"" for n in range(MAX_FILES + 1)}),
        (SCRIPT, "files", {"a": bytes(MAX_CALL_BYTES)}),
        (SCRIPT, "stdin", bytes(MAX_CALL_BYTES)),
        (SCRIPT, "fetch", ("../x",)),
        (SCRIPT, "fetch", tuple(map(str, range(65)))),
        (SCRIPT, "args", ("\0",)),
        (SCRIPT, "args", ("x" * 131_072,)),
        (SCRIPT, "env", {"": "x"}),
        (SCRIPT, "env", {"A": "\0"}),
        (SCRIPT, "image", "../x"),
        (SCRIPT, "cpu_time_s", 0.0),
        (SCRIPT, "cpu_time_s", float("nan")),
        (SCRIPT, "wall_time_s", float("inf")),
        (SCRIPT, "compile_time_s", -1.0),
        (SCRIPT, "memory_mb", 1),
        (SCRIPT, "processes", 0),
        (SCRIPT, "output_kb", 16 * 1024 + 1),
        (SCRIPT, "cases", (Case(),)),
        (SCRIPT, "function", "f"),
        (SCRIPT, "imports", ("os",)),
        (SCRIPT, "artifact", "art-LOCAL-x"),
        (JUDGE, "cases", ()),
        (JUDGE, "cases", (Case(),) * (MAX_CASES + 1)),
        (JUDGE, "stdin", b"x"),
        (FUNCTION, "language", "c"),
        (FUNCTION, "function", "f()"),
        (FUNCTION, "function", ""),
        (FUNCTION, "arguments", "{"),
        (FUNCTION, "arguments", '[["\ud800"], {}]'),
        (FUNCTION, "arguments", "[[NaN], {}]"),
        (FUNCTION, "arguments", "[1, 2]"),
        (FUNCTION, "arguments", "[" * 100_000),
        (FUNCTION, "arguments", "[[" + "[" * 200 + "]" * 200 + "], {}]"),
        (FUNCTION, "imports", ("os; import sys",)),
        (FUNCTION, "stdin", b"x"),
    ],
)
def test_wrong_calls(base: FnCallSpec, field: str, value: Any) -> None:
    with pytest.raises(InvalidSpecError) as refused:
        check_call(replace(base, **{field: value}))
    assert refused.value.detail["field"] == field
    assert len(str(refused.value)) < 300


def test_fields_below() -> None:
    for spec, field in (
        (replace(JUDGE, cases=(Case(name="a\0"),)), "cases.name"),
        (replace(SCRIPT, gpu=GpuRequest(profile="../x")), "gpu.profile"),
        (replace(SCRIPT, artifact=ARTIFACT), "code"),
    ):
        with pytest.raises(InvalidSpecError) as refused:
            check_call(spec)
        assert refused.value.detail["field"] == field


@given(st.dictionaries(st.text(max_size=30), st.just(b""), max_size=4))
def test_whatever_passes_lies_inside(files: dict[str, bytes]) -> None:
    try:
        check_call(replace(SCRIPT, files=files))
    except InvalidSpecError:
        return
    for name in files:
        assert not name.startswith("/")
        assert not {"", ".", ".."} & set(name.split("/"))
        assert "\0" not in name


def test_artifacts_name_their_edge() -> None:
    assert edge_of_artifact(new_artifact_name("edge7")) == "edge7"


def test_what_a_result_says() -> None:
    def cases(*verdicts: Verdict) -> FnCallResult:
        outcomes = tuple(CaseOutcome(name="", verdict=verdict, run=None) for verdict in verdicts)
        return FnCallResult(status=CallStatus.OK, cases=outcomes)

    assert cases(Verdict.AC, Verdict.AC).ok
    assert cases(Verdict.AC, Verdict.AC).verdict is Verdict.AC
    mixed = cases(Verdict.AC, Verdict.TLE, Verdict.WA)
    assert (mixed.ok, mixed.verdict) == (False, Verdict.TLE)
    assert cases().verdict is None
    assert FnCallResult(status=CallStatus.OK, value="null").returned is None
    with pytest.raises(ValueError, match="runtime_error"):
        _ = FnCallResult(status=CallStatus.RUNTIME_ERROR).returned
