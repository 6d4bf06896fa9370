"""From instructions to a plan: variables replaced, stages resolved, what is not supported refused by name and line.

Pure: images are looked up in what the caller gives. Nothing here knows whether a step was taken before.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from opendsec.build.dockerfile import Dockerfile, Instruction, bad, unsupported
from opendsec.build.stage import PROXY_ARGUMENTS, StagePlanner
from opendsec.build.steps import Copy, Plan, Stage
from opendsec.build.words import WordError, expand
from opendsec.errors import InvalidSpecError
from opendsec.model.image import ImageConfig

SCRATCH = "scratch"
DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildOptions:
    """What the user said beside the Dockerfile."""

    arguments: Mapping[str, str] = field(default_factory=dict)
    target: str = ""
    """Name or number of the stage to build; empty: the last."""
    network: bool = True
    """Whether RUN has the network the node offers."""
    machine: str = field(default_factory=platform.machine)
    """Of the platform's nodes, as uname(2) has it; default: of this machine."""


Lookup = Callable[[str], ImageConfig]
"""The configuration of an image of the store; ImageNotFoundError."""


def images_named(dockerfile: Dockerfile, options: BuildOptions) -> tuple[str, ...]:
    """Every image of the store the file could mean, whether or not the target needs it."""
    planner = _Planner(dockerfile, options, lambda _name: ImageConfig())
    stages = planner.stages()
    names = [stage.base_image for stage in stages if stage.base_image]
    names += [step.from_image for stage in stages for step in stage.steps if isinstance(step, Copy)]
    return tuple(sorted({name for name in names if name}))


def make_plan(dockerfile: Dockerfile, options: BuildOptions, lookup: Lookup) -> Plan:
    """Raises InvalidSpecError, UnsupportedError with the line; what `lookup` raises."""
    planner = _Planner(dockerfile, options, lookup)
    stages = planner.stages()
    target = _target(stages, options.target)
    needed = _needed(stages, target)
    unused = sorted(set(options.arguments) - planner.used - PROXY_ARGUMENTS)
    notes = [*planner.notes, *(f"the argument {name} is used by no ARG" for name in unused)]
    return Plan(stages=tuple(stages[index] for index in sorted(needed)), notes=tuple(notes))


def _target(stages: Sequence[Stage], wanted: str) -> int:
    if not wanted:
        return len(stages) - 1
    for stage in reversed(stages):
        if wanted.lower() == stage.name or wanted == str(stage.index):
            return stage.index
    names = ", ".join(stage.name or str(stage.index) for stage in stages)
    raise InvalidSpecError(f"target: there is no stage {wanted!r}; there are {names}", detail={"field": "target"})


def _needed(stages: Sequence[Stage], target: int) -> set[int]:
    """The stage, and all it is made from; those come before it."""
    needed: set[int] = set()
    todo = [target]
    while todo:
        index = todo.pop()
        if index in needed:
            continue
        needed.add(index)
        stage = stages[index]
        below = [step.from_stage for step in stage.steps if isinstance(step, Copy)]
        todo += [one for one in (stage.base_stage, *below) if one is not None]
    return needed


class _Planner:
    """The file as a whole: global arguments, and stages by name."""

    def __init__(self, dockerfile: Dockerfile, options: BuildOptions, lookup: Lookup) -> None:
        self._file = dockerfile
        self._given = options.arguments
        self._lookup = lookup
        self.network = options.network
        self.proxies = {name: value for name, value in options.arguments.items() if name in PROXY_ARGUMENTS}
        self.escape = dockerfile.escape
        self.used: set[str] = set()
        self.notes: list[str] = []
        self.done: list[Stage] = []
        self.globals: dict[str, str] = platform_arguments(options.machine)

    def stages(self) -> list[Stage]:
        stage: StagePlanner | None = None
        for instruction in self._file.instructions:
            if instruction.name == "FROM":
                self._finish(stage)
                stage = self._begin(instruction)
            elif stage is not None:
                stage.take(instruction)
            elif instruction.name == "ARG":
                self._global(instruction)
            else:
                raise bad(instruction, f"{instruction.name} stands before the first FROM")
        if stage is None:
            raise InvalidSpecError("Dockerfile: it has no FROM", detail={"field": "dockerfile"})
        self._finish(stage)
        return self.done

    def _finish(self, stage: StagePlanner | None) -> None:
        if stage is not None:
            self.done.append(stage.stage())

    def _global(self, instruction: Instruction) -> None:
        for name, default in self.arguments(instruction, self.globals):
            value = self.given(name)
            if value is None:
                value = default
            if value is not None:
                self.globals[name] = value

    def given(self, name: str) -> str | None:
        """What the user said for an argument."""
        self.used.add(name)
        return self._given.get(name)

    def arguments(self, at: Instruction, variables: Mapping[str, str]) -> list[tuple[str, str | None]]:
        """Names and defaults of an ARG."""
        found: list[tuple[str, str | None]] = []
        known = dict(variables)
        for word in at.arguments:
            name, equals, default = word.partition("=")
            if not _VARIABLE.match(name):
                raise bad(at, f"ARG: {name!r} is not a name")
            value = self.expanded(at, default, known) if equals else None
            if value is not None:
                known[name] = value
            found.append((name, value))
        return found

    def expanded(self, at: Instruction, word: str, variables: Mapping[str, str]) -> str:
        """A word with variables replaced; one of a template as it is."""
        if at.literal:
            return word
        try:
            return expand(word, variables, escape=self.escape)
        except WordError as error:
            raise bad(at, str(error)) from error

    def _begin(self, at: Instruction) -> StagePlanner:
        words = at.arguments
        if len(words) not in (1, 3) or (len(words) == 3 and words[1].upper() != "AS"):
            raise bad(at, "FROM takes an image, and perhaps AS and a name")
        self._check_platform(at)
        image = self.expanded(at, words[0], self.globals)
        if not image:
            raise bad(at, f"FROM: {words[0]!r} is empty", remedy="give it with --build-arg, or a default with ARG")
        name = words[2].lower() if len(words) == 3 else ""
        if name and not re.match(r"[a-z][a-z0-9_.-]*\Z", name):
            raise bad(at, f"FROM: {words[2]!r} is no name for a stage")
        stage = Stage(index=len(self.done), name=name, line=at.line)
        below = self.stage_named(image)
        if below is not None:
            return StagePlanner(self, replace(stage, base_stage=below.index), below.config)
        if image == SCRATCH:
            return StagePlanner(self, stage, ImageConfig(env={"PATH": DEFAULT_PATH}))
        return StagePlanner(self, replace(stage, base_image=image), self._lookup(image))

    def stage_named(self, name: str) -> Stage | None:
        """An earlier stage; the latest of that name."""
        return next((stage for stage in reversed(self.done) if stage.name and stage.name == name.lower()), None)

    def stage_numbered(self, number: int) -> bool:
        """Whether there is an earlier stage of that number."""
        return number < len(self.done)

    def _check_platform(self, at: Instruction) -> None:
        for flag in at.flags:
            key, _, value = flag.partition("=")
            if key != "--platform":
                raise bad(at, f"FROM: the flag {key} is not known")
            wanted = self.expanded(at, value, self.globals)
            ours = self.globals["TARGETPLATFORM"]
            if wanted.split("/")[:2] != ours.split("/")[:2]:
                raise unsupported(at, f"the platform {wanted}", remedy=f"images are built for {ours}")


def platform_arguments(machine: str) -> dict[str, str]:
    """What Docker predefines in the global scope."""
    names = {"x86_64": ("amd64", ""), "aarch64": ("arm64", "")}
    architecture, variant = names.get(machine, (machine, ""))
    found: dict[str, str] = {}
    for side in ("TARGET", "BUILD"):
        found |= {
            f"{side}PLATFORM": f"linux/{architecture}",
            f"{side}OS": "linux",
            f"{side}ARCH": architecture,
            f"{side}VARIANT": variant,
        }
    return found
