"""`opendsec demo`: shows what `opendsec.demo` found, and fails when anything about it is not as it must be."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from opendsec import DSecClient
from opendsec.cli.figures import COLUMNS, Latency, latency
from opendsec.cli.output import Json, note, print_json, print_line, print_table, progress
from opendsec.cli.session import with_client
from opendsec.demo import project, rounds

CACHE = Path("~/.cache/opendsec/demo")
SHOWN_COMPLAINTS = 10


def demo(
    count: Annotated[int, typer.Option("--count", "-n", min=2, help="Sandboxes at once.")] = 64,
    image: Annotated[str, typer.Option(help="Image with Python 3 and git.")] = "debian",
    sdist: Annotated[Path | None, typer.Option(help=f"A copy of {project.ARCHIVE}, instead of asking PyPI.")] = None,
    as_json: Json = False,
) -> None:
    """Test a real project in many sandboxes at once, break it in half of them, test again, compare, stop everything."""

    async def main(client: DSecClient) -> int:
        if sdist is None:
            archive = await project.fetch(CACHE.expanduser())
        else:
            project.check_digest(sdist)
            archive = sdist
        with tempfile.TemporaryDirectory(prefix="opendsec-demo-") as folder:
            files = project.unpack(archive, Path(folder))
            note(f"{project.NAME} {project.VERSION} from PyPI: {files} files, into {count} sandboxes of `{image}`")
            with progress("upload, test, break half, test again", count * rounds.STEPS) as advance:
                report = await rounds.run(client, image=image, count=count, source=Path(folder), on_step=advance)
        wrong = rounds.verdict(report, count)
        if as_json:
            print_json({"ok": not wrong, "wrong": wrong, "latencies": _latencies(report), "report": report})
        else:
            _show(report, wrong)
        return 1 if wrong else 0

    with_client(main)


def _latencies(report: rounds.Report) -> list[Latency]:
    runs = [run for item in report.attempts for run in (item.before, item.after) if run is not None]
    named = (
        ("create (batch request → ready)", [item.create_s for item in report.attempts]),
        ("upload the project", [item.upload_s for item in report.attempts if item.upload_s]),
        ("run its tests (all at once)", [run.seconds for run in runs]),
        ("stop", report.stop_s),
    )
    return [latency(what, seconds) for what, seconds in named if seconds]


def _show(report: rounds.Report, wrong: list[str]) -> None:
    rows = [_outcome(report, patched=patched) for patched in (False, True)]
    print_table(("", "SANDBOXES", "TESTS EACH", "FIRST RUN", "SECOND RUN"), rows)
    print_line("")
    print_table(COLUMNS, [row.cells() for row in _latencies(report)])
    print_line("")
    if not wrong:
        print_line(f"Exactly the patched half fails, as it must. {report.wall_s:.1f} s in all; everything is stopped.")
        return
    for line in wrong[:SHOWN_COMPLAINTS]:
        print_line(f"wrong: {line}")
    if len(wrong) > SHOWN_COMPLAINTS:
        print_line(f"and {len(wrong) - SHOWN_COMPLAINTS} more")


def _outcome(report: rounds.Report, *, patched: bool) -> tuple[str, ...]:
    items = [item for item in report.attempts if item.patched is patched]
    tests = sorted({run.tests for item in items for run in (item.before, item.after) if run is not None})
    title = "broken before the second run" if patched else "left as published"
    span = "-".join(str(number) for number in sorted({tests[0], tests[-1]})) if tests else "-"
    return title, str(len(items)), span, _summary([i.before for i in items]), _summary([i.after for i in items])


def _summary(runs: list[rounds.SuiteRun | None]) -> str:
    passed = sum(1 for run in runs if run is not None and run.passed)
    failed = sum(1 for run in runs if run is not None and run.failed)
    lost = len(runs) - passed - failed
    parts = ((passed, "pass"), (failed, "fail"), (lost, "did not run"))
    return ", ".join(f"{number} {word}" for number, word in parts if number) or "-"
