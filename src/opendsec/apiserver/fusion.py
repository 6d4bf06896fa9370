"""SandboxFusion's `POST /run_code`, said in our words and back. Pure: values in, values out.

Behaves as its server (bytedance/SandboxFusion) does towards its client package `sandbox-fusion`: `status` is Success
when every command ended with 0, Failed when one did not or ran out of time, SandboxError when the platform could not
say (its client then asks again); a command is Finished, with a negative `return_code` for a signal, or
TimeLimitExceeded without one. Fields it does not know are passed over, as there. `memory_limit_MB` is ours and verl's.

Differs: nothing runs as root, there is no network, memory is limited to MEMORY_MB, and output to OUTPUT_KB. Modes that
need a test framework in the image (pytest, junit, jest, …) are refused by name.
"""

from __future__ import annotations

import base64
import binascii
import posixpath
from collections.abc import Mapping

import msgspec

from opendsec import errors
from opendsec.model.fncall import CallStatus, FnCallResult, FnCallSpec, GpuRequest, RunOutcome
from opendsec.model.fncall_check import MAX_SECONDS, check_call
from opendsec.wire import codec

RUN_CODE = "/run_code"
REFUSED = (
    "/run_jupyter",
    "/get_prompts",
    "/get_prompt_by_id",
    "/submit",
    "/list_datasets",
    "/list_ids",
    "/get_metrics",
    "/get_metrics_function",
)
MEMORY_MB = 1024
"""verl's default; SandboxFusion's own is 4 GiB for all that runs at once."""
OUTPUT_KB = 4096

LANGUAGES: Mapping[str, str] = {
    "python": "python",
    "python_gpu": "python",
    "cpp": "cpp",
    "c": "c",
    "nodejs": "node",
    "typescript": "typescript",
    "go": "go",
    "java": "java",
    "bash": "bash",
    "rust": "rust",
    "php": "php",
    "lua": "lua",
    "perl": "perl",
    "ruby": "ruby",
    "R": "r",
    "csharp": "csharp",
    "scala": "scala",
    "julia": "julia",
    "swift": "swift",
    "racket": "racket",
    "cuda": "cuda",
}
"""Their word → ours. Whether the image has it, the edge says."""
_GPU = frozenset({"python_gpu", "cuda"})
_SIGKILL = 9
_THEIR_FIELDS = {
    "wall_time_s": "run_timeout",
    "compile_time_s": "compile_timeout",
    "memory_mb": "memory_limit_MB",
    "fetch": "fetch_files",
}


class RunCode(msgspec.Struct):
    """Their RunCodeRequest."""

    code: str
    language: str
    compile_timeout: float = 10.0
    run_timeout: float = 10.0
    stdin: str | None = None
    files: dict[str, str | None] = {}
    """Path → base64."""
    fetch_files: list[str] = []
    memory_mb: int | None = msgspec.field(default=None, name="memory_limit_MB")


class CommandRunResult(msgspec.Struct):
    """Theirs."""

    status: str
    execution_time: float | None = None
    return_code: int | None = None
    stdout: str | None = None
    stderr: str | None = None


class RunCodeAnswer(msgspec.Struct):
    """Their RunCodeResponse."""

    status: str
    message: str = ""
    compile_result: CommandRunResult | None = None
    run_result: CommandRunResult | None = None
    executor_pod_name: str | None = None
    files: dict[str, str] = {}


def read_request(body: bytes) -> RunCode:
    """Raises InvalidSpecError naming the field (status 422, as theirs)."""
    return codec.decode_answer(body, RunCode)


def spec_of(request: RunCode) -> FnCallSpec:
    """The same call in our words, checked. Raises InvalidSpecError, UnsupportedError (a mode we do not have)."""
    language = LANGUAGES.get(request.language)
    if language is None:
        raise errors.UnsupportedError(
            f"language: {request.language[:40]!r} is not offered by /run_code here",
            detail={"field": "language"},
            remedy=f"offered are {', '.join(LANGUAGES)}, as far as the image has them",
        )
    spec = FnCallSpec(
        language=language,
        code=request.code or "\n",
        files={_inside(name): _content(name, text) for name, text in request.files.items() if text is not None},
        stdin=(request.stdin or "").encode("utf-8", "replace"),
        fetch=tuple(map(_inside, request.fetch_files)),
        cpu_time_s=MAX_SECONDS,
        wall_time_s=request.run_timeout,
        compile_time_s=request.compile_timeout,
        memory_mb=MEMORY_MB if request.memory_mb is None else request.memory_mb,
        output_kb=OUTPUT_KB,
        gpu=GpuRequest() if request.language in _GPU else None,
    )
    try:
        return check_call(spec)
    except errors.InvalidSpecError as exc:
        ours = str(exc.detail.get("field"))
        theirs = _THEIR_FIELDS.get(ours, ours)
        text = exc.message.replace(f"{ours}:", f"{theirs}:", 1)
        raise errors.InvalidSpecError(text, detail={**exc.detail, "field": theirs}) from exc


def _inside(name: str) -> str:
    """Their file names may begin with `./`."""
    return posixpath.normpath(name) if name.startswith("./") else name


def _content(name: str, text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise errors.InvalidSpecError(
            f"files: the content of {name[:80]!r} is not base64", detail={"field": "files"}
        ) from None


def answer_of(request: RunCode, result: FnCallResult) -> RunCodeAnswer:
    """Their answer to it, with files named as the caller named them."""
    found = {name: result.files[_inside(name)] for name in request.fetch_files if _inside(name) in result.files}
    return RunCodeAnswer(
        status="Success" if result.status is CallStatus.OK else "Failed",
        compile_result=None if result.compile is None else _command(result.compile),
        run_result=None if result.run is None else _command(result.run),
        files={name: base64.b64encode(content).decode("ascii") for name, content in found.items()},
    )


def failed(error: errors.OpenDSecError) -> RunCodeAnswer:
    """Their answer when the platform could not do it."""
    return RunCodeAnswer(status="SandboxError", message=f"{error.code}: {error}")


def _command(run: RunOutcome) -> CommandRunResult:
    timed_out = run.status is CallStatus.TIME_LIMIT
    code = run.exit_code if run.exit_code is not None else -(run.signal or _SIGKILL)
    return CommandRunResult(
        status="TimeLimitExceeded" if timed_out else "Finished",
        execution_time=run.wall_s,
        return_code=None if timed_out else code,
        stdout=run.stdout.decode("utf-8", "replace"),
        stderr=run.stderr.decode("utf-8", "replace"),
    )
