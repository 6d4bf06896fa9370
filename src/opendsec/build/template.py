"""A build written in Python: the same instructions as a Dockerfile's, one method each, in the order they are called.

    Template().from_image("debian").run("apt-get update && apt-get install -y jq").copy("app", "/app").workdir("/app")

A template is a value: every method returns a new one, so templates that begin alike share their beginning. Nothing in
the arguments is expanded: `$HOME` in `run` is the shell's business, in `env` it is text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from opendsec.build.dockerfile import Dockerfile, Instruction
from opendsec.errors import InvalidSpecError

Command = str | Sequence[str]
"""A command line for the shell, or a program with its arguments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """Begin with `from_image`; `opendsec.build.build` makes the image."""

    instructions: tuple[Instruction, ...] = ()

    def from_image(self, image: str) -> Template:
        """What it begins with: an image of the store, or `scratch`."""
        if self.instructions:
            raise InvalidSpecError("from_image: the template has begun already", detail={"field": "from_image"})
        return self._with("FROM", image)

    def run(self, command: Command, *, network: bool = True) -> Template:
        """Run a command; it must end with 0."""
        return self._command("RUN", command, flags=() if network else ("--network=none",))

    def copy(
        self,
        source: str | Sequence[str],
        target: str,
        *,
        from_image: str = "",
        owner: str = "",
        mode: int | None = None,
    ) -> Template:
        """Copy files or directories' content; names and patterns as in COPY, from the context or another image.

        `owner`: `user` or `user:group`; `mode`: of all that is copied.
        """
        flags = [f"--from={from_image}"] if from_image else []
        flags += [f"--chown={owner}"] if owner else []
        flags += [] if mode is None else [f"--chmod={mode:04o}"]
        sources = [source] if isinstance(source, str) else list(source)
        return self._with("COPY", *sources, target, flags=tuple(flags))

    def env(self, variables: Mapping[str, str] | None = None, **more: str) -> Template:
        """Set variables, for the steps that follow and for sandboxes of the image."""
        return self._with("ENV", *_pairs({**(variables or {}), **more}))

    def label(self, labels: Mapping[str, str]) -> Template:
        """Add labels."""
        return self._with("LABEL", *_pairs(labels))

    def workdir(self, path: str) -> Template:
        """Make a directory, and go on in it."""
        return self._with("WORKDIR", path)

    def user(self, user: str) -> Template:
        """Go on as this user: name, number, or with `:group`."""
        return self._with("USER", user)

    def entrypoint(self, command: Command) -> Template:
        """What sandboxes' commands are arguments of elsewhere; kept for export."""
        return self._command("ENTRYPOINT", command)

    def cmd(self, command: Command) -> Template:
        """What a container of the image runs elsewhere; kept for export."""
        return self._command("CMD", command)

    def dockerfile(self) -> Dockerfile:
        """As instructions."""
        if not self.instructions:
            raise InvalidSpecError("the template is empty: begin with from_image", detail={"field": "template"})
        return Dockerfile(instructions=self.instructions)

    def _command(self, name: str, command: Command, *, flags: tuple[str, ...] = ()) -> Template:
        if isinstance(command, str):
            return self._with(name, command, flags=flags)
        return self._with(name, *command, flags=flags, as_list=True)

    def _with(self, name: str, *arguments: str, flags: tuple[str, ...] = (), as_list: bool = False) -> Template:
        if not self.instructions and name != "FROM":
            raise InvalidSpecError(f"{name.lower()}: begin with from_image", detail={"field": "from_image"})
        instruction = Instruction(
            line=len(self.instructions) + 1,
            name=name,
            arguments=arguments,
            flags=flags,
            json=as_list,
            text=" ".join((name, *flags, *arguments)),
            literal=True,
        )
        return replace(self, instructions=(*self.instructions, instruction))


def _pairs(values: Mapping[str, str]) -> list[str]:
    return [word for pair in values.items() for word in pair]
