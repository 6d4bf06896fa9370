"""Whether a call is one we can carry out: every field's bounds, in one place, for SDK, edge and engine alike.

Bounds keep one caller from taking what thousands share; whoever needs more wants a sandbox. A field the task type has
no use for is refused, never passed over.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping

from opendsec.errors import InvalidSpecError
from opendsec.model.fncall import FnCallSpec, TaskType
from opendsec.model.ids import check_edge_name, check_image_name, new_token
from opendsec.model.spec import MAX_ENV_STRING, check_env, encode_text

MAX_CODE_BYTES = 1024 * 1024
MAX_FILES = 1024
MAX_CALL_BYTES = 6 * 1024 * 1024
"""Code, files, stdin and cases of one call together: as JSON (base64) they are within one request's 8 MiB."""
MAX_ARGS = 1024
MAX_CASES = 1000
MAX_IMPORTS = 64
MAX_FETCH = 64
MAX_DEPTH = 200
"""Of lists and dictionaries in each other in the arguments: what every Python reads."""
MAX_SECONDS = 3600.0
MIN_MEMORY_MB, MAX_MEMORY_MB = 16, 1024 * 1024
MAX_OUTPUT_KB = 16 * 1024
MAX_PROCESSES = 4096
CASE_OUTPUT_BYTES = 4096
"""So much of a case's stdout and of its stderr is in the answer to a judge call; all of it is judged."""

_LANGUAGE = re.compile(r"[a-z][a-z0-9+#._-]{0,31}\Z")
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,254}\Z")
_MODULE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(?:\.[A-Za-z_][A-Za-z0-9_]*)*\Z")
_ARTIFACT = re.compile(r"art-([a-z0-9]{1,32})-[a-z2-7]{16,64}\Z")
_PROFILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9.+-]{0,31}\Z")


def new_artifact_name(edge: str) -> str:
    """A fresh name of a compile call's result, which lies on the edge of that name."""
    return f"art-{check_edge_name(edge)}-{new_token()}"


def edge_of_artifact(name: str) -> str:
    """The edge that has it. Raises InvalidSpecError for what is no artifact's name."""
    match = _ARTIFACT.match(name)
    if match is None:
        raise _bad("artifact", f"{name[:80]!r} is not the name of an artifact")
    return match.group(1)


def check_call(spec: FnCallSpec) -> FnCallSpec:
    """The spec itself if every field is good. Raises InvalidSpecError naming the field."""
    if not _LANGUAGE.match(spec.language):
        raise _bad("language", f"{spec.language[:80]!r} is not 1 to 32 of a-z, 0-9 and +#._-, beginning with a letter")
    _check_code(spec)
    _check_files(spec.files)
    _check_words(spec)
    _check_task(spec)
    _check_limits(spec)
    _check_size(spec)
    for name in spec.fetch:
        check_relative(name, "fetch")
    _at_most(len(spec.fetch), MAX_FETCH, "fetch")
    if spec.image:
        check_image_name(spec.image)
    if spec.gpu is not None and spec.gpu.profile and not _PROFILE.match(spec.gpu.profile):
        raise _bad("gpu.profile", f"{spec.gpu.profile[:80]!r} is not a MIG profile such as 1g.10gb")
    return spec


def check_relative(path: str, field: str) -> None:
    """A path below the call's directory: no NUL, no `..`, no empty part, at most 1023 bytes."""
    parts = path.split("/")
    encoded = encode_text(path, field)
    if not path or b"\x00" in encoded or len(encoded) > 1023:
        raise _bad(field, f"path {path[:80]!r} is empty, longer than 1023 bytes, or holds a NUL")
    if any(part in ("", ".", "..") for part in parts):
        raise _bad(field, f"path {path[:80]!r} is not relative, or has an empty part, `.` or `..`")
    if any(len(encode_text(part, field)) > 255 for part in parts):
        raise _bad(field, f"path {path[:80]!r} has a part longer than 255 bytes")


def _check_code(spec: FnCallSpec) -> None:
    if not spec.code and not spec.artifact:
        raise _bad("code", "is empty")
    _at_most(len(_text(spec.code, "code")), MAX_CODE_BYTES, "code", "bytes")


def _check_files(files: Mapping[str, bytes]) -> None:
    _at_most(len(files), MAX_FILES, "files")
    for name in files:
        check_relative(name, "files")
    for name in files:
        parts = name.split("/")
        for depth in range(1, len(parts)):
            if "/".join(parts[:depth]) in files:
                raise _bad("files", f"{'/'.join(parts[:depth])[:80]!r} is a file and a directory at once")


def _check_words(spec: FnCallSpec) -> None:
    _at_most(len(spec.args), MAX_ARGS, "args")
    for word in spec.args:
        encoded = encode_text(word, "args")
        if b"\x00" in encoded or len(encoded) > MAX_ENV_STRING:
            raise _bad("args", f"{word[:80]!r} holds a NUL or is longer than {MAX_ENV_STRING} bytes")
    check_env(spec.env)
    _at_most(sum(len(key) + len(value) for key, value in spec.env.items()), MAX_CODE_BYTES, "env", "characters")


def _check_task(spec: FnCallSpec) -> None:
    kind = spec.task_type
    if kind is TaskType.JUDGE:
        if not spec.cases:
            raise _bad("cases", "a judge call has at least one")
        _at_most(len(spec.cases), MAX_CASES, "cases")
        _none(spec, ("stdin",))
    else:
        _none(spec, ("cases",))
    if kind is TaskType.FUNCTION:
        _check_function(spec)
    else:
        _none(spec, ("function", "arguments", "imports"))
    if kind is TaskType.COMPILE:
        _none(spec, ("artifact", "stdin", "args", "fetch"))
    if spec.artifact:
        edge_of_artifact(spec.artifact)
        _none(spec, ("code",))


def _check_function(spec: FnCallSpec) -> None:
    if spec.language != "python":
        raise _bad("language", "a function call is in python")
    if not _IDENTIFIER.match(spec.function):
        raise _bad("function", f"{spec.function[:80]!r} is not the name of a Python function")
    _none(spec, ("artifact", "args", "stdin"))
    _at_most(len(spec.imports), MAX_IMPORTS, "imports")
    for name in spec.imports:
        if not _MODULE.match(name) or len(name) > 255:
            raise _bad("imports", f"{name[:80]!r} is not the name of a module")
    if spec.arguments:
        _check_arguments(spec.arguments)


def _check_arguments(text: str) -> None:
    _text(text, "arguments")
    try:
        value = json.loads(text, parse_constant=_no_constant)
    except RecursionError:
        raise _too_deep() from None
    except ValueError:
        raise _bad("arguments", "is not JSON") from None
    if text.count("[") + text.count("{") > MAX_DEPTH and _is_deeper(value, MAX_DEPTH):
        raise _too_deep()
    if not (isinstance(value, list) and len(value) == 2 and isinstance(value[0], list) and isinstance(value[1], dict)):
        raise _bad("arguments", "is not `[[positional…], {keyword…}]`")


def _too_deep() -> InvalidSpecError:
    return _bad("arguments", f"has more than {MAX_DEPTH} lists and dictionaries in each other")


def _is_deeper(value: object, most: int) -> bool:
    level = [value]
    for _ in range(most + 1):
        holders = [each for each in level if isinstance(each, (list, dict))]
        level = [inner for each in holders for inner in (each.values() if isinstance(each, dict) else each)]
        if not holders:
            return False
    return True


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _check_limits(spec: FnCallSpec) -> None:
    for name in ("cpu_time_s", "wall_time_s", "compile_time_s"):
        value = getattr(spec, name)
        if not 0.01 <= value <= MAX_SECONDS:
            raise _bad(name, f"{value} is not between 0.01 and {MAX_SECONDS:g} seconds")
    if not MIN_MEMORY_MB <= spec.memory_mb <= MAX_MEMORY_MB:
        raise _bad("memory_mb", f"{spec.memory_mb} is not between {MIN_MEMORY_MB} and {MAX_MEMORY_MB} MiB")
    if not 1 <= spec.processes <= MAX_PROCESSES:
        raise _bad("processes", f"{spec.processes} is not between 1 and {MAX_PROCESSES}")
    if not 1 <= spec.output_kb <= MAX_OUTPUT_KB:
        raise _bad("output_kb", f"{spec.output_kb} is not between 1 and {MAX_OUTPUT_KB} KiB")


def _check_size(spec: FnCallSpec) -> None:
    sizes = {
        "files": _total(spec.files.values()),
        "cases": sum(len(case.stdin) + len(case.expected) for case in spec.cases),
        "stdin": len(spec.stdin),
        "arguments": len(spec.arguments),
    }
    largest = max(sizes, key=lambda name: sizes[name])
    _at_most(sum(sizes.values()) + len(spec.code), MAX_CALL_BYTES, largest, "bytes in all")
    for case in spec.cases:
        if len(case.name) > 255 or "\x00" in case.name:
            raise _bad("cases.name", f"{case.name[:80]!r} is longer than 255 characters or holds a NUL")
        encode_text(case.name, "cases.name")


def _none(spec: FnCallSpec, names: Iterable[str]) -> None:
    for name in names:
        if getattr(spec, name):
            raise _bad(name, f"a {spec.task_type.value} call{' of an artifact' if spec.artifact else ''} has none")


def _at_most(count: int, most: int, field: str, unit: str = "entries") -> None:
    if count > most:
        raise _bad(field, f"{count} {unit}, at most {most}")


def _text(text: str, field: str) -> bytes:
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError:
        raise _bad(field, "holds a surrogate, which is no character") from None


def _total(values: Iterable[bytes]) -> int:
    return sum(len(value) for value in values)


def _bad(field: str, why: str) -> InvalidSpecError:
    return InvalidSpecError(f"{field}: {why}", detail={"field": field})
