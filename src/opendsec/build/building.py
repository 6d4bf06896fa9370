"""Build an image: take the steps of a plan one after the other, each in a sandbox of its own, each a packed layer.

    Dockerfile or template → plan → for each step: its key → an image of that key? → else sandbox → step → pack → image

Images of steps are named BUILD_CACHE with the key in the platform's store, so any builder of the platform finds them,
and removing them costs nothing but time. The image that was asked for gets its name at the very end, in one go: a build
that fails or dies leaves steps that the next build takes up, and never half an image.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from opendsec.build.context import Context, digest_sources
from opendsec.build.copying import Inputs, copy_context, copy_image, make_directory
from opendsec.build.dockerfile import Dockerfile, parse_dockerfile
from opendsec.build.events import BuildNote, BuiltImage, OnEvent, StepBegun, StepDone, StepOutput
from opendsec.build.plan import SCRATCH, BuildOptions, images_named, make_plan
from opendsec.build.steps import Copy, MakeDirectory, Plan, Run, Stage, Step, step_key
from opendsec.build.taking import Guests, Limits, run
from opendsec.build.template import Template
from opendsec.client._async.client import DSecClient
from opendsec.client._async.sandbox import Sandbox
from opendsec.client.concurrency import async_blocking
from opendsec.errors import FileError, ImageInvalidError, ImageNotFoundError, InvalidSpecError
from opendsec.model.ids import check_image_name
from opendsec.model.image import BUILD_CACHE as CACHE
from opendsec.model.image import LayerRole
from opendsec.model.image_view import ImageDetails


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """One step, with all that decides whether it has to be taken."""

    number: int
    """Among the steps of all stages, from 1."""
    stage: Stage
    step: Step
    inputs: Inputs
    key: str


async def build(
    client: DSecClient,
    source: str | Template,
    *,
    name: str,
    context: Path | None = None,
    ignore_file: Path | None = None,
    options: BuildOptions | None = None,
    role: LayerRole = LayerRole.BASE,
    cache: bool = True,
    limits: Limits | None = None,
    on_event: OnEvent | None = None,
) -> BuiltImage:
    """Build a Dockerfile (its text) or a template, and let `name` mean the result.

    `context`: the directory COPY and ADD read; None: there is none. `ignore_file`: instead of its `.dockerignore`.
    `role`: of the layers. `cache=False`: steps are taken even if they were before.

    Raises InvalidSpecError, UnsupportedError with the line; ImageNotFoundError for FROM; CommandFailedError when a
    program fails (`detail` has line, exit_code and the end of its output); ForbiddenError when the key may not build;
    and what starting and packing sandboxes raises. The name means what it did before then.
    """
    check_image_name(name, field="name")
    if name.startswith(CACHE):
        raise InvalidSpecError(f"name: {CACHE}… is for steps of builds", detail={"field": "name"})
    dockerfile = source.dockerfile() if isinstance(source, Template) else parse_dockerfile(source)
    chosen = options or BuildOptions()
    images = {one: await client.images.inspect(one) for one in images_named(dockerfile, chosen)}
    plan = make_plan(dockerfile, chosen, lambda one: images[one].config)
    refuse_parts(plan, images)
    if context is None:
        _refuse_context(plan)
    builder = _Builder(
        client=client,
        plan=plan,
        dockerfile=dockerfile,
        images=images,
        context=None if context is None else await async_blocking(Context, context, ignore_file=ignore_file),
        role=role,
        cache=cache,
        guests=Guests(client, label=secrets.token_hex(8), limits=limits or Limits()),
        on_event=on_event or (lambda _event: None),
    )
    return await builder.build(name)


def refuse_parts(plan: Plan, images: Mapping[str, ImageDetails]) -> None:
    """InvalidSpecError before anything is done: in a toolkit or workspace alone no sandbox can start, and steps run in
    sandboxes and copy from them.
    """
    for stage in plan.stages:
        copied = [(step.line, step.from_image) for step in stage.steps if isinstance(step, Copy)]
        for line, name in [(0, stage.base_image), *copied]:
            part = images.get(name)
            if part is None or part.base or not part.layers or part.layers[0].role is LayerRole.BASE:
                continue
            role = part.layers[0].role.value
            raise InvalidSpecError(
                f"{f'line {line}: ' if line else 'FROM: '}image {name!r} is a {role}, with no base below it",
                detail={"field": "dockerfile", "line": line, "image": name},
                remedy=f"name an image that has one: `opendsec image compose NAME BASE --{role} {name}` makes it",
            )


def _refuse_context(plan: Plan) -> None:
    for stage in plan.stages:
        for step in stage.steps:
            if isinstance(step, Copy) and step.sources and not _from_elsewhere(step):
                raise InvalidSpecError(
                    f"line {step.line}: there is no build context to copy from", detail={"field": "context"}
                )


def _from_elsewhere(step: Copy) -> bool:
    return step.from_stage is not None or bool(step.from_image)


@dataclass(slots=True, kw_only=True)
class _Builder:
    """One build."""

    client: DSecClient
    plan: Plan
    dockerfile: Dockerfile
    images: Mapping[str, ImageDetails]
    context: Context | None
    role: LayerRole
    cache: bool
    guests: Guests
    on_event: OnEvent
    jobs: dict[int, list[_Job]] = field(default_factory=dict)
    """By stage."""
    keys: dict[int, str] = field(default_factory=dict)
    """What the last step of each stage follows from."""
    references: dict[int, str] = field(default_factory=dict)
    """Images of stages that are there."""
    scratch: str = ""
    """The empty image."""
    taken: int = 0

    async def build(self, name: str) -> BuiltImage:
        """All that is needed for the last stage, then the name."""
        for note in self.plan.notes:
            self.on_event(BuildNote(text=note))
        for stage in self.plan.stages:
            await self._find_out(stage)
        empty = await self.client.images.tag(f"{CACHE}{SCRATCH}", SCRATCH, replace=True)  # Refused at once, if at all.
        self.scratch = f"{empty.name}@{empty.digest}"
        last = self.plan.stages[-1]
        made = await self.client.images.tag(name, await self._made(last.index), config=last.config, replace=True)
        return BuiltImage(
            name=name,
            digest=made.digest,
            config=last.config,
            steps=self._total,
            cached=self._total - self.taken,
            notes=self.plan.notes,
        )

    @property
    def _total(self) -> int:
        return sum(len(stage.steps) for stage in self.plan.stages)

    async def _find_out(self, stage: Stage) -> None:
        """Keys of all steps of a stage; nothing has to be built for that."""
        number = sum(len(jobs) for jobs in self.jobs.values())
        key = self._base_key(stage)
        self.jobs[stage.index] = []
        for step in stage.steps:
            number += 1
            inputs = await self._inputs(step)
            key = step_key(key, step, inputs.digest)
            self.jobs[stage.index].append(_Job(number=number, stage=stage, step=step, inputs=inputs, key=key))
        self.keys[stage.index] = key

    def _base_key(self, stage: Stage) -> str:
        if stage.base_stage is not None:
            return self.keys[stage.base_stage]
        return _key_of(self.images[stage.base_image]) if stage.base_image else SCRATCH

    async def _made(self, index: int) -> str:
        """The image of a stage, made if it has to be. What lies below the last step that is known is not looked at."""
        if index in self.references:
            return self.references[index]
        jobs = self.jobs[index]
        first, reference = 0, ""
        for position in range(len(jobs) if self.cache else 0, 0, -1):
            reference = await self._known(jobs[position - 1].key)
            if reference:
                first = position
                break
        for job in jobs[:first]:
            self._tell_begun(job)
            self.on_event(StepDone(number=job.number, cached=True, seconds=0.0))
        if not reference:
            reference = await self._base(next(one for one in self.plan.stages if one.index == index))
        for job in jobs[first:]:
            reference = await self._taken(job, reference)
        self.references[index] = reference
        return reference

    async def _base(self, stage: Stage) -> str:
        if stage.base_stage is not None:
            return await self._made(stage.base_stage)
        if stage.base_image:
            return _reference_of(self.images[stage.base_image])
        return self.scratch

    async def _taken(self, job: _Job, below: str) -> str:
        """Take a step; the image after it."""
        other = await self._other(job.step)
        self._tell_begun(job)
        self.taken += 1
        began = time.monotonic()
        name = f"{CACHE}{job.key}"
        network = isinstance(job.step, Run) and job.step.network
        async with self.guests.started(below, network=network) as sandbox:
            await self._take(sandbox, job, other)
            packed = await sandbox.pack_diff(name, role=self.role, defaults=False, replace=True)
        reference = str(packed)
        if not packed.changed:
            made = await self.client.images.tag(name, reference, replace=True)
            reference = f"{made.name}@{made.digest}"
        seconds, layer_bytes = time.monotonic() - began, packed.details.layer_bytes
        self.on_event(StepDone(number=job.number, cached=False, seconds=seconds, layer_bytes=layer_bytes))
        return reference

    def _tell_begun(self, job: _Job) -> None:
        self.on_event(
            StepBegun(
                number=job.number, total=self._total, stage=job.stage.name, line=job.step.line, text=job.step.text
            )
        )

    async def _other(self, step: Step) -> str:
        """The image a step copies from; empty: none."""
        if not isinstance(step, Copy):
            return ""
        if step.from_stage is not None:
            return await self._made(step.from_stage)
        return _reference_of(self.images[step.from_image]) if step.from_image else ""

    async def _known(self, key: str) -> str:
        """The image of a step that was taken before; empty: it was not."""
        try:
            found = await self.client.images.inspect(f"{CACHE}{key}")
        except (ImageNotFoundError, ImageInvalidError):  # A damaged one is made anew, under the same name.
            return ""
        return _reference_of(found)

    async def _inputs(self, step: Step) -> Inputs:
        """What the step depends on beside its own words and what lies below it."""
        if not isinstance(step, Copy):
            return Inputs()
        if step.from_stage is not None:
            return Inputs(digest=self.keys[step.from_stage])
        if step.from_image:
            return Inputs(digest=_key_of(self.images[step.from_image]))
        if self.context is None:
            return Inputs()
        context = self.context
        try:
            sources = [one for pattern in step.sources for one in await async_blocking(context.sources, pattern)]
        except InvalidSpecError as error:
            raise InvalidSpecError(
                f"{self._where(step)}: {error.message}", detail={**error.detail, "line": step.line}, remedy=error.remedy
            ) from error
        digest, files = await async_blocking(digest_sources, sources)
        return Inputs(digest=digest, sources=tuple(sources), files=files)

    async def _take(self, sandbox: Sandbox, job: _Job, other: str) -> None:
        step, where = job.step, self._where(job.step)
        try:
            match step:
                case Run():
                    told = partial(self._tell_output, job.number)
                    await run(sandbox, step, where, told)
                case MakeDirectory():
                    await make_directory(sandbox, step, where)
                case Copy() if other:
                    async with self.guests.started(other) as source:
                        await copy_image(sandbox, source, step, where)
                case Copy():
                    await copy_context(sandbox, step, job.inputs, where)
        except FileError as error:
            raise FileError(
                f"{where}: {error.message}", detail={**error.detail, "line": step.line}, remedy=error.remedy
            ) from error

    def _tell_output(self, number: int, data: bytes) -> None:
        self.on_event(StepOutput(number=number, data=data))

    def _where(self, step: Step) -> str:
        literal = bool(self.dockerfile.instructions) and self.dockerfile.instructions[0].literal
        return f"template, step {step.line}" if literal else f"Dockerfile, line {step.line}"


def _reference_of(image: ImageDetails) -> str:
    """Exactly this image."""
    return f"{image.name.partition('@sha256:')[0]}@{image.digest}"


def _key_of(image: ImageDetails) -> str:
    """Its content, and that of what it refers to by name."""
    return f"{image.digest} {image.start_digest}"
