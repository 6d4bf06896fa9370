"""What a user fills in for a call, and how it becomes the wire value. Nothing is sent here."""

from __future__ import annotations

import inspect
import json
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from opendsec.client.kinds import check_fields, is_list, is_named, is_number, must
from opendsec.errors import InvalidSpecError
from opendsec.model.fncall import Case, FnCallSpec, GpuRequest, TaskType
from opendsec.model.fncall_check import check_call

ROOM_WAIT_S = 60.0
"""How long a call without a timeout of its own may wait for a container beyond what its limits allow it to run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DSecFnCallArgs:
    """Arguments of `DSecClient.fncall`. `code` is needed, or the `artifact` of an earlier call."""

    code: str = ""
    language: str = "python"
    """python, c, cpp, go, java, node, bash, …: what the image has."""
    task_type: TaskType | str = TaskType.SCRIPT
    """`script`, `compile`, `judge` or `function`."""
    files: Mapping[str, bytes | str] = field(default_factory=dict)
    """Relative path → content, beside the code."""
    stdin: bytes | str = b""
    args: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    cases: Sequence[Case | tuple[bytes | str, bytes | str]] = ()
    """Of a judge call: `Case`, or `(stdin, expected)`."""
    function: str = ""
    """Of a function call: its name in `code`."""
    arguments: Sequence[object] = ()
    """Of a function call: JSON values, by position."""
    keywords: Mapping[str, object] = field(default_factory=dict)
    """Of a function call: JSON values, by name."""
    imports: Sequence[str] = ()
    """Of a function call: modules that are warm already when it begins."""
    artifact: str = ""
    """Run this result of a compile call."""
    fetch: Sequence[str] = ()
    """Paths in the call's directory whose content is answered."""
    image: str = ""
    """"": the platform's image for calls."""
    cpu_time_s: float = 10.0
    """Seconds of processor time of each run (of each case)."""
    wall_time_s: float = 20.0
    """Seconds of each run."""
    compile_time_s: float = 30.0
    memory_mb: int = 256
    """MiB, of all processes of a run together."""
    processes: int = 128
    """Processes and threads of a run at once; another fork is refused."""
    output_kb: int = 1024
    """KiB of stdout and of stderr."""
    gpu: GpuRequest | None = None

    @classmethod
    def of_function(
        cls,
        function: Callable[..., object],
        arguments: Sequence[object] = (),
        keywords: Mapping[str, object] | None = None,
        *,
        imports: Sequence[str] = (),
        memory_mb: int = 256,
        wall_time_s: float = 20.0,
    ) -> DSecFnCallArgs:
        """A call of a Python function of this program: its source is sent, so it imports what it needs inside.

        Raises InvalidSpecError for what has no source, or refers to variables around it. `dataclasses.replace` changes
        what else there is.
        """
        try:
            source = textwrap.dedent(inspect.getsource(function))
        except (OSError, TypeError) as exc:
            raise InvalidSpecError(f"function: has no source: {exc}", detail={"field": "function"}) from exc
        plain = inspect.isfunction(function) and source.startswith("def ")
        if not plain or inspect.getclosurevars(function).nonlocals:
            raise InvalidSpecError(
                "function: is not a plain `def` that stands for itself",
                detail={"field": "function"},
                remedy="no decorator, no lambda, no variable of a function around it; pass what it needs as arguments",
            )
        return cls(
            task_type=TaskType.FUNCTION,
            code=source,
            function=function.__name__,
            arguments=arguments,
            keywords=keywords or {},
            imports=imports,
            memory_mb=memory_mb,
            wall_time_s=wall_time_s,
        )

    def to_spec(self) -> FnCallSpec:
        """The checked specification. Raises InvalidSpecError naming the field."""
        self._check_kinds()
        try:
            task_type = TaskType(self.task_type)
        except ValueError:
            raise InvalidSpecError(
                f"task_type: {self.task_type!r} is not of {', '.join(TaskType)}", detail={"field": "task_type"}
            ) from None
        return check_call(
            FnCallSpec(
                task_type=task_type,
                language=self.language,
                code=self.code,
                files={name: _bytes(content, "files") for name, content in self.files.items()},
                stdin=_bytes(self.stdin, "stdin"),
                args=tuple(self.args),
                env=dict(self.env),
                cases=tuple(map(_case, self.cases)),
                function=self.function,
                arguments=self._arguments(),
                imports=tuple(self.imports),
                artifact=self.artifact,
                fetch=tuple(self.fetch),
                image=self.image,
                cpu_time_s=float(self.cpu_time_s),
                wall_time_s=float(self.wall_time_s),
                compile_time_s=float(self.compile_time_s),
                memory_mb=self.memory_mb,
                processes=self.processes,
                output_kb=self.output_kb,
                gpu=self.gpu,
            )
        )

    def _check_kinds(self) -> None:
        """What Python would take apart, or make bytes of, is refused instead of becoming something else."""
        check_fields(
            self,
            texts=("code", "language", "function", "artifact", "image"),
            whole=("memory_mb", "processes", "output_kb"),
            lists_of_text=("args", "imports", "fetch"),
            dicts_of_text=("env",),
        )
        for name in ("cases", "arguments"):
            must(is_list(getattr(self, name)), name, "a list")
        for name in ("files", "keywords"):
            must(is_named(getattr(self, name), object), name, "a dict by name")
        for name in ("cpu_time_s", "wall_time_s", "compile_time_s"):
            must(is_number(getattr(self, name)), name, "a number of seconds")
        must(self.gpu is None or isinstance(self.gpu, GpuRequest), "gpu", "a GpuRequest")

    def _arguments(self) -> str:
        if not self.arguments and not self.keywords:
            return ""
        try:
            return json.dumps([list(self.arguments), dict(self.keywords)], separators=(",", ":"), allow_nan=False)
        except (TypeError, ValueError) as exc:
            raise InvalidSpecError(f"arguments: are not JSON: {exc}", detail={"field": "arguments"}) from exc


def longest_s(spec: FnCallSpec) -> float:
    """Seconds after which the call is over by its own limits, with time to wait for a container."""
    return ROOM_WAIT_S + spec.compile_time_s + spec.wall_time_s * max(1, len(spec.cases))


def _bytes(content: object, field: str) -> bytes:
    """`bytes(5)` would be five zeros."""
    if isinstance(content, str):
        return content.encode("utf-8", "surrogateescape")
    must(isinstance(content, (bytes, bytearray, memoryview)), field, "bytes or text")
    return bytes(content)  # type: ignore[call-overload, no-any-return]


def _case(given: object) -> Case:
    if isinstance(given, Case):
        contents: tuple[object, ...] = (given.stdin, given.expected)
        must(all(isinstance(content, bytes) for content in contents), "cases", "made of bytes")
        must(isinstance(given.name, str), "cases.name", "a string")
        return given
    if not isinstance(given, (tuple, list)) or len(given) != 2:
        raise InvalidSpecError("cases: one is neither a Case nor (stdin, expected)", detail={"field": "cases"})
    stdin, expected = given
    return Case(stdin=_bytes(stdin, "cases"), expected=_bytes(expected, "cases"))
