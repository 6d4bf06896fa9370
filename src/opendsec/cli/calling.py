"""`opendsec fncall run` and `opendsec fncall judge`: one call, from files of this machine."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from opendsec import CallStatus, Case, CaseOutcome, DSecClient, DSecFnCallArgs, FnCallResult, TaskType, Verdict
from opendsec.cli import exits
from opendsec.cli.output import Json, note, print_json, print_line, print_table, size, write_bytes
from opendsec.cli.session import with_client

app = typer.Typer(
    help="Calls: short programs in warm containers, without a sandbox of their own.", no_args_is_help=True
)

LANGUAGES = {
    ".py": "python",
    ".c": "c",
    ".cc": "cpp",
    ".cpp": "cpp",
    ".cxx": "cpp",
    ".go": "go",
    ".java": "java",
    ".js": "node",
    ".mjs": "node",
    ".ts": "typescript",
    ".sh": "bash",
    ".rs": "rust",
    ".rb": "ruby",
    ".pl": "perl",
    ".php": "php",
    ".lua": "lua",
    ".r": "r",
}
_ANSWERS = (".out", ".ans")

Program = Annotated[Path, typer.Argument(help="File with the program; - reads it from standard input.")]
Language = Annotated[
    str | None, typer.Option("--language", help="python, c, cpp, go, …; without it the file's ending says it.")
]
Image = Annotated[str, typer.Option("--image", help="Image to run in; without it the platform's for calls.")]
Memory = Annotated[int, typer.Option("--memory", metavar="MIB", help="Memory limit in MiB.")]
CpuTime = Annotated[float, typer.Option("--cpu-time", metavar="SECONDS", help="Processor time of each run.")]
WallTime = Annotated[float, typer.Option("--wall-time", metavar="SECONDS", help="Time of each run.")]
Beside = Annotated[
    list[Path] | None, typer.Option("--file", metavar="PATH", help="File to put beside the program; may repeat.")
]


@app.command("run")
def run(
    program: Program,
    words: Annotated[list[str] | None, typer.Argument(metavar="ARGUMENT", help="Arguments of the program.")] = None,
    language: Language = None,
    image: Image = "",
    stdin: Annotated[
        bool, typer.Option("--stdin", "-i", help="Give this terminal's, pipe's or file's bytes to the program.")
    ] = False,
    files: Beside = None,
    memory: Memory = 256,
    cpu_time: CpuTime = 10.0,
    wall_time: WallTime = 20.0,
    as_json: Json = False,
) -> None:
    """Run a program once: `opendsec fncall run hello.c`. Output, then its exit status."""
    if stdin and str(program) == "-":
        raise typer.BadParameter("the program itself comes from standard input", param_hint="--stdin")
    args = DSecFnCallArgs(
        code=code_of(program),
        language=language or language_of(program),
        args=tuple(words or ()),
        image=image,
        stdin=sys.stdin.buffer.read() if stdin else b"",
        files=files_of(files),
        memory_mb=memory,
        cpu_time_s=cpu_time,
        wall_time_s=wall_time,
    )

    async def main(client: DSecClient) -> int:
        result = await client.fncall(args)
        if as_json:
            print_json(result)
        else:
            _print_run(result)
        return exits.of_call(result)

    with_client(main)


@app.command("judge")
def judge(
    program: Program,
    cases: Annotated[
        Path, typer.Option("--cases", metavar="DIRECTORY", help="Pairs of files NAME.in and NAME.out (or NAME.ans).")
    ],
    language: Language = None,
    image: Image = "",
    files: Beside = None,
    memory: Memory = 256,
    cpu_time: CpuTime = 10.0,
    wall_time: WallTime = 20.0,
    as_json: Json = False,
) -> None:
    """Run a program against test cases: a verdict for each; status 0 when all are accepted, else 1."""
    args = DSecFnCallArgs(
        task_type=TaskType.JUDGE,
        code=code_of(program),
        language=language or language_of(program),
        cases=read_cases(cases),
        image=image,
        files=files_of(files),
        memory_mb=memory,
        cpu_time_s=cpu_time,
        wall_time_s=wall_time,
    )

    async def main(client: DSecClient) -> int:
        result = await client.fncall(args)
        if as_json:
            print_json(result)
        else:
            _print_verdicts(result)
        return 0 if result.ok else 1

    with_client(main)


def read_cases(directory: Path) -> tuple[Case, ...]:
    """By name. Raises typer.BadParameter for a directory without any, or an input without its answer."""
    try:
        inputs = sorted(path for path in directory.iterdir() if path.suffix == ".in")
        found = tuple(Case(name=path.stem, stdin=path.read_bytes(), expected=_answer(path)) for path in inputs)
    except OSError as exc:
        raise _unreadable(directory, exc, "--cases") from exc
    if not found:
        raise typer.BadParameter(f"{directory} has no file NAME.in", param_hint="--cases")
    return found


def _answer(path: Path) -> bytes:
    for ending in _ANSWERS:
        answer = path.with_suffix(ending)
        if answer.exists():
            return answer.read_bytes()
    raise typer.BadParameter(
        f"{path.name} has no {' or '.join(path.stem + ending for ending in _ANSWERS)} beside it", param_hint="--cases"
    )


def code_of(program: Path) -> str:
    """Its text; `-` is standard input. Raises typer.BadParameter."""
    try:
        data = sys.stdin.buffer.read() if str(program) == "-" else program.read_bytes()
        return data.decode("utf-8")
    except OSError as exc:
        raise _unreadable(program, exc, "PROGRAM") from exc
    except UnicodeDecodeError as exc:
        raise typer.BadParameter(f"{program} is no UTF-8 text", param_hint="PROGRAM") from exc


def language_of(program: Path) -> str:
    """What its ending says. Raises typer.BadParameter."""
    found = LANGUAGES.get(program.suffix.lower())
    if found is None:
        raise typer.BadParameter(f"{program} does not say its language by its ending", param_hint="--language")
    return found


def files_of(paths: list[Path] | None) -> dict[str, bytes]:
    """By their last names. Raises typer.BadParameter."""
    found: dict[str, bytes] = {}
    for path in paths or ():
        try:
            found[path.name] = path.read_bytes()
        except OSError as exc:
            raise _unreadable(path, exc, "--file") from exc
    return found


def _unreadable(path: Path, exc: OSError, option: str) -> typer.BadParameter:
    return typer.BadParameter(f"{path}: {exc.strerror}", param_hint=option)


def _print_run(result: FnCallResult) -> None:
    shown = result.compile if result.run is None else result.run
    if shown is not None:
        write_bytes(1, shown.stdout)
        write_bytes(2, shown.stderr)
    if text := exits.sentence_of_call(result):
        note(f"opendsec: {text}")


def _print_verdicts(result: FnCallResult) -> None:
    print_table(("CASE", "VERDICT", "CPU", "TIME", "MEMORY"), map(_row, result.cases))
    if result.compile is not None and result.status is CallStatus.COMPILE_ERROR:
        write_bytes(2, result.compile.stderr)
    accepted = sum(case.verdict is Verdict.AC for case in result.cases)
    print_line(f"{accepted} of {len(result.cases)} accepted")


def _row(case: CaseOutcome) -> tuple[str, str, str, str, str]:
    if case.run is None:
        return case.name, case.verdict.value, "-", "-", "-"
    run = case.run
    return case.name, case.verdict.value, f"{run.cpu_s:.2f} s", f"{run.wall_s:.2f} s", size(run.memory_bytes)
