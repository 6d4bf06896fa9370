"""The engine of calls: from `FnCallSpec` to `FnCallResult`, over pools of locked-down containers.

    engine = Engine(settings=…, containers=<the edge's ContainerBackend, open>, images=<its images>)
    await engine.open()
    result = await engine.call(spec, project="default")

A call takes one container for itself: compile, run, each case of a judge call, one after the other, and between any two
everything inside is as it was. What a program did is a result; what goes wrong on this side is an error, and a call
whose container was lost through no fault of its own is carried out once more before it is.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Protocol, TypeVar

from opendsec.backends.container import ContainerBackend
from opendsec.errors import (
    BackendUnavailableError,
    DiskFullError,
    InvalidSpecError,
    NodeError,
    OpenDSecError,
    UnsupportedError,
)
from opendsec.fncall import languages
from opendsec.fncall.artifacts import Artifact, Artifacts, key_of
from opendsec.fncall.base import FnCalls
from opendsec.fncall.box import Box
from opendsec.fncall.gpu import GpuDesk
from opendsec.fncall.gpu_places import GpuPlaces
from opendsec.fncall.judging import verdict_of
from opendsec.fncall.languages import Language
from opendsec.fncall.member import Group, Member
from opendsec.fncall.pool import Pools
from opendsec.fncall.running import Program, run_function, run_program
from opendsec.fncall.settings import FnCallSettings
from opendsec.fncall.starting import Starting
from opendsec.model.fncall import (
    CallStatus,
    Case,
    CaseOutcome,
    FnCallResult,
    FnCallSpec,
    GpuMode,
    GpuRequest,
    RunOutcome,
    TaskType,
    Verdict,
)
from opendsec.model.fncall_check import CASE_OUTPUT_BYTES, MAX_CALL_BYTES
from opendsec.model.image import Image
from opendsec.model.node import BackendReport

T = TypeVar("T")
IMAGE_FRESH_S = 2.0
"""What a name of an image means is looked up again after so long."""
IMAGES_KNOWN = 256
"""With so many names known those that are not fresh any more are forgotten."""
FETCH_BYTES = MAX_CALL_BYTES
"""Of all files a call fetches, together."""
MAX_ARTIFACT_BYTES = 256 * 1024 * 1024
FEW_TO_WRITE, FEW_BYTES = 16, 64 * 1024
"""So many files and bytes are put there on the event loop; more take a thread, and so does all reading."""


class Images(Protocol):
    """Where images are looked up."""

    def compose(self, image: str) -> Image:
        """Raises ImageNotFoundError, ImageInvalidError, InvalidSpecError. May block."""


class Engine(FnCalls):
    """One per edge."""

    def __init__(
        self, *, settings: FnCallSettings, containers: ContainerBackend, images: Images, gpus: GpuDesk | None = None
    ) -> None:
        self._settings = settings
        self._images = images
        self._gpus = gpus
        self._gpu_places = GpuPlaces(settings.run_dir.with_name(f"{settings.run_dir.name}-gpu"))
        self._known: dict[str, tuple[float, Image]] = {}
        self._starting = Starting(settings, containers)
        self._artifacts = Artifacts(
            settings.state_dir / "artifacts", edge=settings.edge, most_bytes=settings.artifacts_mb * 1024 * 1024
        )
        self._compiling: dict[str, asyncio.Lock] = {}
        self._pools: Pools | None = None
        self.removed = 0
        """Containers an earlier engine had left."""

    async def open(self) -> None:
        self.removed = await self._starting.remove_leftovers()
        self._gpu_places.close()  # an earlier engine's
        await asyncio.to_thread(self._artifacts.open)
        self._pools = Pools(
            self._start,
            self._end,
            most=self._settings.containers,
            queue=self._settings.queue,
            idle_s=self._settings.idle_s,
            calls=self._settings.calls_per_container,
        )

    async def close(self) -> None:
        if self._pools is not None:
            await self._pools.close()
            self._pools = None
        self._gpu_places.close()

    def report(self) -> BackendReport:
        pools = self._pools
        if pools is None:
            return BackendReport(available=False, reasons=("the engine of calls is not open",))
        words = [kind.value for kind in TaskType]
        if self._gpus is not None:
            words += ["gpu", *(["gpu_simulated"] if self._gpus.inventory.simulated else [])]
        degraded = tuple(f"{field} of calls is not kept: no such controller" for field in self._starting.unlimited())
        live = pools.busy + pools.waiting
        return BackendReport(available=True, capabilities=tuple(words), live=live, degraded=degraded)

    async def call(self, spec: FnCallSpec, *, project: str) -> FnCallResult:
        language = languages.find(spec.language)
        if spec.task_type is TaskType.COMPILE and not language.compile:
            raise UnsupportedError(
                f"task_type: {language.name} has nothing to compile", detail={"field": "task_type"}, remedy="use script"
            )
        if language.file in spec.files and spec.code:
            raise InvalidSpecError(f"files: {language.file!r} is where the code goes", detail={"field": "files"})
        group = await self._group(spec, project)
        try:
            return await self._carry_out(spec, group, language)
        except NodeError as error:
            if not error.retryable:
                raise
        return await self._carry_out(spec, group, language)

    # Containers

    @property
    def _open_pools(self) -> Pools:
        if self._pools is None:
            raise BackendUnavailableError("the engine of calls is not open")
        return self._pools

    async def _image(self, name: str) -> Image:
        name = name or self._settings.image
        known = self._known.get(name)
        now = time.monotonic()
        if known is not None and now - known[0] < IMAGE_FRESH_S:
            return known[1]
        try:
            image = await asyncio.to_thread(self._images.compose, name)
        except OSError as error:
            raise NodeError(f"image {name!r} cannot be looked up: {error}", retryable=True) from error
        if len(self._known) >= IMAGES_KNOWN:
            self._known = {each: (at, known) for each, (at, known) in self._known.items() if now - at < IMAGE_FRESH_S}
        self._known[name] = (now, image)
        return image

    async def _group(self, spec: FnCallSpec, project: str) -> Group:
        image = await self._image(spec.image)
        imports = spec.imports if spec.task_type is TaskType.FUNCTION else None
        gpu = ""
        if spec.gpu is not None:
            if self._gpus is None:
                raise UnsupportedError("gpu: this node has no GPU for calls", detail={"field": "gpu"})
            gpu = f"{spec.gpu.mode.value}:{spec.gpu.profile}"
        return Group(project, image.digest, imports, gpu, image)

    async def _start(self, group: Group) -> Member:
        name = self._starting.new_name()
        if not group.gpu or self._gpus is None:
            return await self._starting.start(group, name=name)
        mode, _, profile = group.gpu.partition(":")
        lease = self._gpus.take(GpuRequest(mode=GpuMode(mode), profile=profile), holder=name)
        release = functools.partial(self._gpus.release, name)
        with ExitStack() as stack:
            try:
                binds = stack.enter_context(self._gpu_places.attached(lease))
            except BaseException:
                release()
                raise
            return await self._starting.start(group, env=lease.env, name=name, binds=binds, on_gone=release)

    async def _end(self, member: Member) -> None:
        gone = await self._starting.end(member)
        if gone and member.group.gpu and self._gpus is not None:
            self._gpus.release(member.name)

    # Calls

    async def _carry_out(self, spec: FnCallSpec, group: Group, language: Language) -> FnCallResult:
        arrived = time.monotonic()
        async with self._open_pools.member(group) as member:
            queued_s = time.monotonic() - arrived
            try:
                if spec.task_type is TaskType.FUNCTION:
                    result = await self._function(spec, member)
                else:
                    result = await self._program(spec, member, language)
            except OpenDSecError:
                await member.empty()
                raise
            except OSError as error:  # no descriptor left, a limit the kernel refuses
                member.doubt = f"a run could not be prepared: {error}"
                raise NodeError(f"the call could not be carried out here: {error}", retryable=True) from error
            except BaseException:
                member.doubt = member.doubt or "its call was given up"
                raise
        return replace(result, queued_s=queued_s)

    async def _function(self, spec: FnCallSpec, member: Member) -> FnCallResult:
        await _prepare(member, spec.files)
        run, value = await run_function(member, spec, user=self._starting.user_of(member))
        files = await _fetched(member, spec)
        await member.empty()
        return FnCallResult(status=run.status, run=run, value=value, files=files)

    async def _program(self, spec: FnCallSpec, member: Member, language: Language) -> FnCallResult:
        if spec.artifact:
            artifact = await self._artifact(spec, member)
            language = languages.find(artifact.language)
            files = {**spec.files, **artifact.files}
            return await self._runs(spec, member, language, files, artifact, None)
        missing = await member.missing(language.needs)
        if missing:
            raise UnsupportedError(
                f"language: image {member.image.name!r} has no {missing}, which {language.name} needs",
                detail={"field": "language", "language": language.name, "program": missing},
                remedy="name an image that has it",
            )
        if not language.compile:
            files = {**spec.files, language.file: spec.code.encode()}
            return await self._runs(spec, member, language, files, None, None)
        built, outcome = await self._built(spec, member, language)
        if spec.task_type is TaskType.COMPILE or built is None:
            return _compiled(spec, built, outcome)
        return await self._runs(spec, member, language, {**spec.files, **built.files}, built, outcome)

    async def _artifact(self, spec: FnCallSpec, member: Member) -> Artifact:
        return await asyncio.to_thread(self._artifacts.get, spec.artifact, project=member.group.project)

    async def _built(
        self, spec: FnCallSpec, member: Member, language: Language
    ) -> tuple[Artifact | None, RunOutcome | None]:
        """What the compiler left; None: it found fault. The outcome is None when nothing was compiled now."""
        command = language.compile_command(memory_mb=spec.memory_mb)
        key = key_of(spec, project=member.group.project, image=member.group.image, command=command)
        lock = self._compiling.setdefault(key, asyncio.Lock())
        try:
            async with lock:
                found = await asyncio.to_thread(self._artifacts.find, key)
                if found is not None:
                    return found, None
                return await self._compile(spec, member, language, key)
        finally:
            if not lock.locked():
                self._compiling.pop(key, None)

    async def _compile(
        self, spec: FnCallSpec, member: Member, language: Language, key: str
    ) -> tuple[Artifact | None, RunOutcome]:
        await _prepare(member, {**spec.files, language.file: spec.code.encode()})
        limits = replace(spec, memory_mb=max(spec.memory_mb, COMPILE_MEMORY_MB), processes=max(spec.processes, 128))
        outcome = await run_program(
            member,
            limits,
            Program(
                argv=language.compile_command(memory_mb=spec.memory_mb),
                env=member.environment({**language.env, **spec.env}),
                stdin=b"",
                cpu_s=spec.compile_time_s,
                wall_s=spec.compile_time_s * 2,
            ),
        )
        built = None
        if outcome.status is CallStatus.OK:
            built = await self._kept(spec, member, language, key)
        await member.empty()
        if member.doubt:
            raise NodeError(f"the container cannot be used for the run: {member.doubt}", retryable=True)
        return built, outcome

    async def _kept(self, spec: FnCallSpec, member: Member, language: Language, key: str) -> Artifact | None:
        box = member.box
        try:
            files = await _in_thread(lambda: _read(box, box.find(language.keep), MAX_ARTIFACT_BYTES))
        except ValueError:  # a part of a program would be another program
            raise InvalidSpecError(
                f"code: what was compiled has more than {MAX_ARTIFACT_BYTES} bytes",
                detail={"field": "code"},
                remedy="make it smaller, or compile it in a sandbox",
            ) from None
        if not files:
            return None
        artifact = Artifact(
            name=self._artifacts.name_of(key),
            project=member.group.project,
            image=member.group.image,
            language=language.name,
            files=files,
        )
        try:
            await asyncio.to_thread(self._artifacts.keep, key, artifact)
        except OSError as error:
            raise DiskFullError(f"no room for what was compiled: {error}") from error
        return artifact

    async def _runs(
        self,
        spec: FnCallSpec,
        member: Member,
        language: Language,
        files: Mapping[str, bytes],
        built: Artifact | None,
        compiled: RunOutcome | None,
    ) -> FnCallResult:
        run = functools.partial(_run_once, spec, member, language, files, built)
        if spec.task_type is not TaskType.JUDGE:
            outcome = await run(spec.stdin)
            fetched = await _fetched(member, spec)
            await member.empty()
            return FnCallResult(status=outcome.status, compile=compiled, run=outcome, files=fetched)
        cases = []
        for case in spec.cases:
            outcome = await run(case.stdin)
            await member.empty()
            cases.append(_judged(case, outcome))
            if member.doubt and len(cases) < len(spec.cases):
                raise NodeError(f"the container cannot be used for the next case: {member.doubt}", retryable=True)
        return FnCallResult(status=CallStatus.OK, compile=compiled, cases=tuple(cases))


_OF_THE_FILES = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.ENAMETOOLONG, errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.EINVAL}
)
"""Errors of putting files into a directory that are about these files."""
COMPILE_MEMORY_MB = 1024
"""Compilers get as much at least: the call's limit is for the program."""


async def _run_once(
    spec: FnCallSpec,
    member: Member,
    language: Language,
    files: Mapping[str, bytes],
    built: Artifact | None,
    stdin: bytes,
) -> RunOutcome:
    await _prepare(member, files, programs=() if built is None else tuple(built.files))
    return await run_program(
        member,
        spec,
        Program(
            argv=language.run_command(spec.args, memory_mb=spec.memory_mb),
            env=member.environment({**language.env, **spec.env}),
            stdin=stdin,
            cpu_s=spec.cpu_time_s,
            wall_s=spec.wall_time_s,
        ),
    )


async def _in_thread(work: Callable[[], T]) -> T:
    """Whoever is cancelled waits for the thread all the same: it uses the container's descriptors."""
    working = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(working)
    finally:
        await asyncio.wait({working})


def _read(box: Box, paths: Iterable[str], room: int) -> dict[str, bytes]:
    """Those that are there. Blocking. Raises ValueError when they have more than `room` bytes together."""
    found: dict[str, bytes] = {}
    for path in paths:
        content = box.read(path, room)
        if content is not None:
            found[path] = content
            room -= len(content)
    return found


async def _prepare(member: Member, files: Mapping[str, bytes], *, programs: tuple[str, ...] = ()) -> None:
    prepare = functools.partial(member.box.prepare, files, programs=programs)
    try:
        if len(files) > FEW_TO_WRITE or sum(len(content) for content in files.values()) > FEW_BYTES:
            await _in_thread(prepare)
        else:
            prepare()
    except OSError as error:
        member.doubt = f"files could not be put there: {error}"
        if error.errno not in _OF_THE_FILES:
            raise  # of this host
        raise InvalidSpecError(
            f"files: they do not fit into the call's directory: {error}",
            detail={"field": "files"},
            remedy="send less, or use a sandbox",
        ) from error


def _compiled(spec: FnCallSpec, built: Artifact | None, outcome: RunOutcome | None) -> FnCallResult:
    """The answer when nothing is run: a compile call, or a program with faults."""
    if built is not None:
        return FnCallResult(status=CallStatus.OK, compile=outcome, artifact=built.name)
    cases = tuple(CaseOutcome(name=case.name, verdict=Verdict.CE, run=None) for case in spec.cases)
    return FnCallResult(
        status=CallStatus.OK if spec.task_type is TaskType.JUDGE else CallStatus.COMPILE_ERROR,
        compile=outcome,
        cases=cases,
    )


def _judged(case: Case, outcome: RunOutcome) -> CaseOutcome:
    verdict = verdict_of(outcome, case.expected)
    cut = replace(outcome, stdout=outcome.stdout[:CASE_OUTPUT_BYTES], stderr=outcome.stderr[:CASE_OUTPUT_BYTES])
    return CaseOutcome(name=case.name, verdict=verdict, run=cut)


async def _fetched(member: Member, spec: FnCallSpec) -> dict[str, bytes]:
    if not spec.fetch:
        return {}
    try:
        return await _in_thread(functools.partial(_read, member.box, spec.fetch, FETCH_BYTES))
    except ValueError as error:
        raise InvalidSpecError(
            f"fetch: {error}", detail={"field": "fetch"}, remedy="fetch less, or use a sandbox"
        ) from error
