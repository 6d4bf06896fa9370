"""Sixty programs in six languages, the hostile ones among them: each gets the verdict it deserves, and the containers
they ran in are as good as new.

`programs/<verdict>_<what>.<language>`: the task is to add numbers. A line `verdict:` says what is expected, `limits:`
other limits than the usual.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.node.fncall.places import LANGUAGES, Ground

from opendsec.model.fncall import CallStatus, Case, FnCallSpec, TaskType, Verdict

pytestmark = [
    pytest.mark.anyio,
    *(getattr(pytest.mark, name) for name in ("root", "userns", "netns", "cgroup", "memcg", "overlay", "native")),
    pytest.mark.erofs,
    pytest.mark.image,
    pytest.mark.timeout(180),
]

PROGRAMS = Path(__file__).with_name("programs")
LANGUAGE_OF = {"python": "python", "c": "c", "cpp": "cpp", "java": "java", "sh": "bash", "js": "node"}
CASE = Case(stdin=b"3\n1 2 3\n", expected=b"6\n", name="sum")
LIMITS: dict[str, Any] = {"cpu_time_s": 3.0, "wall_time_s": 15.0, "memory_mb": 96, "processes": 64, "output_kb": 256}
SHORT: dict[str, Any] = {"cpu_time_s": 0.5, "wall_time_s": 1.5}
"""For programs that are to reach them."""


@dataclass(frozen=True, slots=True)
class Program:
    """One file."""

    name: str
    spec: FnCallSpec
    verdict: Verdict


def read_program(path: Path) -> Program:
    code = path.read_text()
    said = dict(line.lstrip("/# ").split(": ", 1) for line in code.splitlines()[:2] if ": " in line[:12])
    verdict = Verdict(said["verdict"])
    limits = {**LIMITS, **(SHORT if verdict is Verdict.TLE else {})}
    for pair in said.get("limits", "").split():
        name, value = pair.split("=")
        limits[name] = int(value)
    if path.suffix == ".java" and verdict is Verdict.TLE:
        limits["wall_time_s"] = 5.0
    spec = FnCallSpec(
        task_type=TaskType.JUDGE,
        image=LANGUAGES,
        language=LANGUAGE_OF[path.suffix[1:]],
        code=code,
        cases=(CASE,),
        compile_time_s=30.0,
        **limits,
    )
    return Program(path.name, spec, verdict)


ALL = [read_program(path) for path in sorted(PROGRAMS.iterdir())]


def test_the_set_is_what_it_should_be() -> None:
    assert len(ALL) >= 60
    assert {program.spec.language for program in ALL} == set(LANGUAGE_OF.values())
    assert {program.verdict for program in ALL} == set(Verdict)
    assert all(program.name.startswith(f"{program.verdict.value.lower()}_") for program in ALL)


async def test_every_program_gets_its_verdict(languages: Ground) -> None:
    """All at once: hostile ones beside those that must not notice. One more call in every container at the end."""
    found: dict[str, str] = {}
    async with languages.engine(containers=4) as engine:

        async def judge(program: Program) -> None:
            result = await engine.call(program.spec, project="contest")
            assert result.status is CallStatus.OK
            case = result.cases[0]
            if case.verdict is not program.verdict:
                found[program.name] = f"{case.verdict}: {case.run} {result.compile}"

        async with asyncio.TaskGroup() as group:
            for program in ALL:
                group.create_task(judge(program))
        pools = engine._open_pools
        (line,) = pools._lines.values()
        assert [member.doubt for member in line.idle] == [""] * len(line.idle)
        assert all(member.box.is_clean and member.files.processes() == member.processes for member in line.idle)
        assert pools.live == len(line.idle) <= 4
        good = next(program for program in ALL if program.name == "ac_sum.python")
        again = await asyncio.gather(*(engine.call(good.spec, project="contest") for _ in range(8)))
        assert {result.cases[0].verdict for result in again} == {Verdict.AC}
    assert found == {}
