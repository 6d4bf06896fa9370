"""One stage of a Dockerfile, instruction by instruction: its steps, and the configuration it ends with. Pure."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Protocol

from opendsec.build.dockerfile import Instruction, bad, unsupported
from opendsec.build.steps import Copy, Inline, MakeDirectory, Run, Stage, Step
from opendsec.build.words import WordError, expand_document
from opendsec.model.image import ImageConfig

_SHELL = ("/bin/sh", "-c")
_PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "FTP_PROXY", "NO_PROXY", "ALL_PROXY")
PROXY_ARGUMENTS = frozenset([*_PROXIES, *(name.lower() for name in _PROXIES)])
_NOTED = "dev.opendsec.dockerfile."
_MODE = re.compile(r"0?[0-7]{3,4}\Z")


class Scope(Protocol):
    """What a stage asks the file it stands in."""

    escape: str
    globals: dict[str, str]
    notes: list[str]
    network: bool
    proxies: dict[str, str]

    def given(self, name: str) -> str | None:
        """What the user said for an argument."""

    def arguments(self, at: Instruction, variables: Mapping[str, str]) -> list[tuple[str, str | None]]:
        """Names and defaults of an ARG."""

    def expanded(self, at: Instruction, word: str, variables: Mapping[str, str]) -> str:
        """A word with variables replaced."""

    def stage_named(self, name: str) -> Stage | None:
        """An earlier stage."""

    def stage_numbered(self, number: int) -> bool:
        """Whether there is an earlier stage of that number."""


class StagePlanner:
    """One stage, instruction by instruction."""

    def __init__(self, planner: Scope, stage: Stage, config: ImageConfig) -> None:
        self._planner = planner
        self._stage = stage
        self._config = replace(config, env=dict(config.env))
        self._arguments: dict[str, str] = {}
        self._shell: tuple[str, ...] = _SHELL
        self._cmd_said = False
        self._steps: list[Step] = []

    def stage(self) -> Stage:
        return replace(self._stage, steps=tuple(self._steps), config=self._config)

    def take(self, at: Instruction) -> None:
        takers: dict[str, Callable[[Instruction], None]] = {
            "ADD": self._copy,
            "ARG": self._arg,
            "CMD": self._cmd,
            "COPY": self._copy,
            "ENTRYPOINT": self._entrypoint,
            "ENV": self._env,
            "LABEL": self._label,
            "MAINTAINER": self._maintainer,
            "ONBUILD": self._onbuild,
            "RUN": self._run,
            "SHELL": self._set_shell,
            "USER": self._user,
            "WORKDIR": self._workdir,
        }
        takers.get(at.name, self._noted)(at)

    # words

    def _variables(self) -> dict[str, str]:
        """ENV always wins over ARG."""
        return {**self._arguments, **self._config.env}

    def _expand(self, at: Instruction, word: str) -> str:
        return self._planner.expanded(at, word, self._variables())

    def _pairs(self, at: Instruction) -> dict[str, str]:
        """All values of one instruction see the variables as they were before it."""
        words = at.arguments
        if not words or len(words) % 2:
            raise bad(at, f"{at.name} takes NAME=value")
        names = [self._expand(at, word) for word in words[::2]]
        values = [self._expand(at, word) for word in words[1::2]]
        if "" in names:
            raise bad(at, f"{at.name}: a name is empty")
        return dict(zip(names, values, strict=True))

    def _one(self, at: Instruction) -> str:
        if len(at.arguments) != 1 or not (word := self._expand(at, at.arguments[0])):
            raise bad(at, f"{at.name} takes exactly one argument, which is not empty")
        return word

    # configuration

    def _set(self, **changes: object) -> None:
        self._config = replace(self._config, **changes)  # type: ignore[arg-type]

    def _env(self, at: Instruction) -> None:
        self._set(env={**self._config.env, **self._pairs(at)})

    def _label(self, at: Instruction) -> None:
        self._set(labels={**self._config.labels, **self._pairs(at)})

    def _maintainer(self, at: Instruction) -> None:
        self._set(labels={**self._config.labels, "maintainer": self._one(at)})

    def _arg(self, at: Instruction) -> None:
        for name, default in self._planner.arguments(at, self._variables()):
            value = self._planner.given(name)
            if value is None:
                value = self._planner.globals.get(name) if default is None else default
            if value is not None:
                self._arguments[name] = value

    def _user(self, at: Instruction) -> None:
        self._set(user=self._one(at))

    def _workdir(self, at: Instruction) -> None:
        path = _joined(self._config.workdir, self._one(at))
        self._set(workdir=path)
        self._steps.append(MakeDirectory(line=at.line, text=at.text, path=path, owner=self._config.user))

    def _set_shell(self, at: Instruction) -> None:
        if not at.json or not at.arguments:
            raise bad(at, 'SHELL takes a JSON list, like ["/bin/bash", "-c"]')
        self._shell = at.arguments

    def _command(self, at: Instruction) -> tuple[str, ...]:
        return at.arguments if at.json else (*self._shell, *at.arguments[:1])

    def _cmd(self, at: Instruction) -> None:
        self._cmd_said = True
        self._set(cmd=self._command(at))

    def _entrypoint(self, at: Instruction) -> None:
        """A new entry point has no use for the arguments of the base's."""
        self._set(entrypoint=self._command(at), cmd=self._config.cmd if self._cmd_said else ())

    def _noted(self, at: Instruction) -> None:
        """EXPOSE, VOLUME, STOPSIGNAL, HEALTHCHECK: nothing here acts on them. Kept as labels, and said."""
        said = [word if at.name == "HEALTHCHECK" else self._expand(at, word) for word in at.arguments]
        label = f"{_NOTED}{at.name.lower()}"
        before = self._config.labels.get(label, "").split() if at.name in {"EXPOSE", "VOLUME"} else []
        value = " ".join(dict.fromkeys([*before, *at.flags, *said]))
        self._set(labels={**self._config.labels, label: value})
        self._planner.notes.append(f"{at.where}: {at.name} has no effect on sandboxes; it is kept as the label {label}")

    def _onbuild(self, at: Instruction) -> None:
        raise unsupported(at, "ONBUILD", remedy="write the instruction into the Dockerfile that is to have it")

    # steps

    def _run(self, at: Instruction) -> None:
        network = self._planner.network
        for flag in at.flags:
            key, _, value = flag.partition("=")
            if key == "--mount":
                raise unsupported(
                    at,
                    f"RUN --mount={value}",
                    remedy="COPY what is needed and remove it in the same RUN; steps that did not change are not "
                    "taken again anyway",
                )
            if key == "--network" and value in {"none", "default"}:
                network = network and value == "default"
                continue
            raise unsupported(at, f"RUN {flag}", remedy="leave it out")
        keyed = {name: value for name, value in self._arguments.items() if name not in PROXY_ARGUMENTS}
        proxies = dict(self._planner.proxies)
        self._steps.append(
            Run(
                line=at.line,
                text=at.text,
                argv=self._argv(at),
                env={**keyed, **self._config.env},
                user=self._config.user,
                workdir=self._config.workdir,
                network=network,
                unkeyed_env=proxies,
            )
        )

    def _argv(self, at: Instruction) -> tuple[str, ...]:
        if not at.arguments or not at.arguments[0].strip():
            raise bad(at, "RUN takes a command")
        if at.json or not at.heredocs:
            return self._command(at)
        if len(at.heredocs) == 1 and re.fullmatch(r"<<-?[\"']?\S+", at.arguments[0].strip()):
            script = at.heredocs[0].content
            if script.startswith("#!"):
                raise unsupported(at, "a script with #! of its own", remedy="write RUN INTERPRETER <<EOF")
            return (*self._shell, script)
        text = re.sub(r"\A\s*RUN\s+", "", at.text, flags=re.IGNORECASE)
        for flag in at.flags:
            text = text.removeprefix(flag).lstrip()
        return (*self._shell, text)

    def _copy(self, at: Instruction) -> None:
        flags = self._copy_flags(at)
        words = [self._expand(at, word) for word in at.arguments]
        if len(words) < 2:
            raise bad(at, f"{at.name} takes at least one source and a target")
        *sources, target = words
        inline = self._inline(at)
        plain = [word for word, raw in zip(sources, at.arguments, strict=False) if not raw.startswith("<<")]
        for source in plain:
            if re.match(r"(?:https?|git|ssh)://|git@", source):
                raise unsupported(at, f"a source from the network ({source})", remedy="fetch it with RUN")
        many = len(plain) + len(inline) > 1
        if many and not target.endswith("/"):
            raise bad(at, f"{at.name} of several sources needs a directory: let the target end with /")
        self._steps.append(
            Copy(
                line=at.line,
                text=at.text,
                sources=tuple(plain),
                target=_joined(self._config.workdir, target),
                into_directory=target.endswith(("/", "/.")) or target == ".",
                inline=inline,
                unpack=at.name == "ADD",
                **flags,  # type: ignore[arg-type]
            )
        )

    def _inline(self, at: Instruction) -> tuple[Inline, ...]:
        variables, escape = self._variables(), self._planner.escape
        try:
            return tuple(
                Inline(
                    name=one.name,
                    content=expand_document(one.content, variables, escape=escape) if one.expand else one.content,
                )
                for one in at.heredocs
            )
        except WordError as error:
            raise bad(at, str(error)) from error

    def _copy_flags(self, at: Instruction) -> dict[str, object]:
        found: dict[str, object] = {}
        for flag in at.flags:
            key, _, value = flag.partition("=")
            match key:
                case "--from" if at.name == "COPY":
                    found |= self._from(at, value)
                case "--chown":
                    found["owner"] = self._expand(at, value)
                case "--chmod":
                    found["mode"] = self._mode(at, self._expand(at, value))
                case "--link":
                    pass  # The same files; how layers share them is ours to decide.
                case _:
                    raise unsupported(at, f"{at.name} {key}", remedy="name what is wanted, or use .dockerignore")
        return found

    def _mode(self, at: Instruction, text: str) -> int:
        if not _MODE.match(text):
            raise bad(at, f"--chmod: {text!r} is not a mode like 755 or 0644")
        return int(text, 8)

    def _from(self, at: Instruction, name: str) -> dict[str, object]:
        stage = self._planner.stage_named(name)
        if stage is not None:
            return {"from_stage": stage.index}
        if name.isdigit():
            if not self._planner.stage_numbered(int(name)):
                raise bad(at, f"--from: there is no stage {name} before this one")
            return {"from_stage": int(name)}
        if not name:
            raise bad(at, "--from names nothing")
        return {"from_image": name}


def _joined(directory: str, path: str) -> str:
    joined = posixpath.normpath(posixpath.join(directory, path))
    return f"/{joined.lstrip('/')}"
