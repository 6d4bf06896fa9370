"""The figures of the HTTP page's table of limits are those of the code: what is at the limit is taken, what is over it
is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from opendsec.apiserver.iam import check_project_name
from opendsec.errors import InvalidSpecError
from opendsec.model.command import ExecRequest, PtySize, check_exec
from opendsec.model.spec import Lifetime, Resources, SandboxSpec, check_snapshot_name, check_spec
from opendsec.store.scrub import check_patterns

PAGE = Path(__file__).parents[2] / "docs/reference/http-api.md"


def spec(**fields: object) -> Callable[[], object]:
    return lambda: check_spec(replace(SandboxSpec(image="debian"), **fields))  # type: ignore[arg-type]


def command(**fields: object) -> Callable[[], object]:
    given = fields if "argv" in fields else {"script": "true", **fields}
    return lambda: check_exec(ExecRequest(**given))  # type: ignore[arg-type]


def resources(**fields: object) -> Callable[[], object]:
    return spec(resources=Resources(**fields))  # type: ignore[arg-type]


LIMITS: list[tuple[str, str, Callable[[], object], Callable[[], object]]] = [
    ("labels", "32;", spec(labels={str(n): "" for n in range(32)}), spec(labels={str(n): "" for n in range(33)})),
    ("labels", "1 to 63", spec(labels={"k" * 63: ""}), spec(labels={"k" * 64: ""})),
    ("labels", "256 characters", spec(labels={"k": "v" * 256}), spec(labels={"k": "v" * 257})),
    ("env", "131,071 bytes", spec(env={"A": "v" * 131_069}), spec(env={"A": "v" * 131_070})),
    ("env", "131,071 bytes", command(env={"A": "v" * 131_069}), command(env={"A": "v" * 131_070})),
    ("cwd", "4095 bytes", command(cwd="/" + "d" * 4094), command(cwd="/" + "d" * 4095)),
    ("workdir", "4095 bytes", spec(workdir="/" + "d" * 4094), spec(workdir="/" + "d" * 4095)),
    ("user", "1 to 256", command(user="u" * 256), command(user="u" * 257)),
    ("init_user", "1 to 256", spec(init_user="u" * 256), spec(init_user="u" * 257)),
    ("toolkits", "32", spec(toolkits=tuple(f"t{n}" for n in range(32))), spec(toolkits=("t",) * 33)),
    ("memory_limit_mb", "4 to 67,108,864", resources(memory_limit_mb=4), resources(memory_limit_mb=3)),
    ("memory_limit_mb", "67,108,864", resources(memory_limit_mb=67_108_864), resources(memory_limit_mb=67_108_865)),
    ("cpu_cores_limit", "0.01 to 4096", resources(cpu_cores_limit=4096), resources(cpu_cores_limit=4097)),
    ("pids_limit", "8 to 4,194,304", resources(pids_limit=8), resources(pids_limit=7)),
    ("disk_limit_mb", "16 to 16,777,216", resources(disk_limit_mb=16), resources(disk_limit_mb=15)),
    (
        "ttl_running_stop",
        "less than 315,360,000",
        spec(lifetime=Lifetime(ttl_running_stop=315_359_999)),
        spec(lifetime=Lifetime(ttl_running_stop=315_360_000)),
    ),
    ("timeout_s", "more than 0", command(timeout_s=0.001), command(timeout_s=0)),
    ("grace_s", "0 to 3600", command(grace_s=3600), command(grace_s=3601)),
    ("script", "3,145,728", command(script="x" * 3_145_728), command(script="x" * 3_145_729)),
    ("argv", "131,071", command(argv=("x" * 131_071,)), command(argv=("x" * 131_072,))),
    ("operation_id", "1 to 255", command(operation_id="o" * 255), command(operation_id="o" * 256)),
    ("session", "1 to 128", command(session="s" * 128), command(session="s" * 129)),
    (
        "max_output_bytes",
        "1,073,741,824",
        command(max_output_bytes=1_073_741_824),
        command(max_output_bytes=1_073_741_825),
    ),
    ("pty.rows", "65,535", command(pty=PtySize(rows=65_535)), command(pty=PtySize(rows=65_536))),
    ("snapshot", "1 to 128", lambda: check_snapshot_name("s" * 128), lambda: check_snapshot_name("s" * 129)),
    ("project", "1 to 63", lambda: check_project_name("p" * 63), lambda: check_project_name("p" * 64)),
    (
        "scrub",
        "1000 each",
        lambda: check_patterns(("p",) * 1000, "scrub"),
        lambda: check_patterns(("p",) * 1001, "scrub"),
    ),
    (
        "keep",
        "4096 characters",
        lambda: check_patterns(("p" * 4096,), "keep"),
        lambda: check_patterns(("p" * 4097,), "keep"),
    ),
    (
        "scrub",
        "65,536 together",
        lambda: check_patterns(("p" * 4096,) * 16, "scrub"),
        lambda: check_patterns((*["p" * 4096] * 16, "p"), "scrub"),
    ),
]


@pytest.mark.parametrize(
    ("field", "told", "taken", "refused"), LIMITS, ids=[f"{number}-{one[0]}" for number, one in enumerate(LIMITS)]
)
def test_a_limit_is_what_the_page_says(
    field: str, told: str, taken: Callable[[], object], refused: Callable[[], object]
) -> None:
    table = PAGE.read_text(encoding="utf-8").partition("## Limits of fields")[2].partition("## Errors")[0]
    rows = [line for line in table.splitlines() if line.startswith("|") and field in line.split("|")[1]]
    assert any(told in row for row in rows), rows
    taken()
    with pytest.raises(InvalidSpecError):
        refused()
