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
class _Place:
    """Where a stage stands: the image below the next step, and what it follows from."""

    reference: str
    key: str


@dataclass(slots=True)
class _Tally:
    steps: int = 0
    cached: int = 0
    number: int = 0
    places: dict[int, _Place] = field(default_factory=dict)


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
    tally: _Tally = field(default_factory=_Tally)

    async def build(self, name: str) -> BuiltImage:
        """All stages, then the name."""
        for note in self.plan.notes:
            self.on_event(BuildNote(text=note))
        self.tally.steps = sum(len(stage.steps) for stage in self.plan.stages)
        for stage in self.plan.stages:
            self.tally.places[stage.index] = await self._stage(stage)
        last = self.plan.stages[-1]
        place = self.tally.places[last.index]
        made = await self.client.images.tag(name, place.reference, config=last.config, replace=True)
        return BuiltImage(
            name=name,
            digest=made.digest,
            config=last.config,
            steps=self.tally.steps,
            cached=self.tally.cached,
            notes=self.plan.notes,
        )

    async def _stage(self, stage: Stage) -> _Place:
        place = await self._base(stage)
        for step in stage.steps:
            place = await self._step(stage, step, place)
        return place

    async def _base(self, stage: Stage) -> _Place:
        if stage.base_stage is not None:
            return self.tally.places[stage.base_stage]
        if not stage.base_image:
            made = await self.client.images.tag(f"{CACHE}{SCRATCH}", SCRATCH, replace=True)
            return _Place(reference=f"{made.name}@{made.digest}", key=made.digest)
        return _place_of(self.images[stage.base_image])

    async def _step(self, stage: Stage, step: Step, below: _Place) -> _Place:
        self.tally.number += 1
        number = self.tally.number
        self.on_event(
            StepBegun(number=number, total=self.tally.steps, stage=stage.name, line=step.line, text=step.text)
        )
        began = time.monotonic()
        inputs = await self._inputs(step)
        key = step_key(below.key, step, inputs.digest)
        known = await self._known(key) if self.cache else None
        if known is not None:
            self.tally.cached += 1
            self.on_event(StepDone(number=number, cached=True, seconds=time.monotonic() - began))
            return _Place(reference=known, key=key)
        network = isinstance(step, Run) and step.network
        async with self.guests.started(below.reference, network=network) as sandbox:
            await self._take(sandbox, step, inputs, number)
            packed = await sandbox.pack_diff(f"{CACHE}{key}", role=self.role, defaults=False, replace=True)
        reference = str(packed)
        if not packed.changed:
            made = await self.client.images.tag(f"{CACHE}{key}", reference, replace=True)
            reference = f"{made.name}@{made.digest}"
        seconds = time.monotonic() - began
        self.on_event(StepDone(number=number, cached=False, seconds=seconds, layer_bytes=packed.details.layer_bytes))
        return _Place(reference=reference, key=key)

    async def _known(self, key: str) -> str | None:
        try:
            found = await self.client.images.inspect(f"{CACHE}{key}")
        except (ImageNotFoundError, ImageInvalidError):  # A damaged one is made anew, under the same name.
            return None
        return f"{found.name}@{found.digest}"

    async def _inputs(self, step: Step) -> Inputs:
        """What the step depends on beside its own words and what lies below it."""
        if not isinstance(step, Copy):
            return Inputs()
        if step.from_stage is not None:
            return Inputs(digest=self.tally.places[step.from_stage].key)
        if step.from_image:
            return Inputs(digest=_place_of(self.images[step.from_image]).key)
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

    async def _take(self, sandbox: Sandbox, step: Step, inputs: Inputs, number: int) -> None:
        where = self._where(step)
        try:
            await self._do(sandbox, step, inputs, number, where)
        except FileError as error:
            raise FileError(
                f"{where}: {error.message}", detail={**error.detail, "line": step.line}, remedy=error.remedy
            ) from error

    async def _do(self, sandbox: Sandbox, step: Step, inputs: Inputs, number: int, where: str) -> None:
        match step:
            case Run():
                await run(sandbox, step, where, lambda data: self.on_event(StepOutput(number=number, data=data)))
            case MakeDirectory():
                await make_directory(sandbox, step, where)
            case Copy() if _from_elsewhere(step):
                async with self.guests.started(self._other(step)) as other:
                    await copy_image(sandbox, other, step, where)
            case Copy():
                await copy_context(sandbox, step, inputs, where)

    def _other(self, step: Copy) -> str:
        if step.from_stage is not None:
            return self.tally.places[step.from_stage].reference
        return _place_of(self.images[step.from_image]).reference

    def _where(self, step: Step) -> str:
        literal = bool(self.dockerfile.instructions) and self.dockerfile.instructions[0].literal
        return f"template, step {step.line}" if literal else f"Dockerfile, line {step.line}"


def _place_of(image: ImageDetails) -> _Place:
    """Exactly this image; the key follows what it refers to, too."""
    reference = f"{image.name.partition('@sha256:')[0]}@{image.digest}"
    return _Place(reference=reference, key=f"{image.digest} {image.start_digest}")
