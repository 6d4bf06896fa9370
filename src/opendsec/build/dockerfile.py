"""The text of a Dockerfile as instructions. The parser is BuildKit's own, by way of the package `dockerfile`.

It refuses, by name and line, what is no instruction; what instructions mean is decided in `plan`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from opendsec.errors import InvalidSpecError, UnsupportedError

INSTRUCTIONS = frozenset(
    {"ADD", "ARG", "CMD", "COPY", "ENTRYPOINT", "ENV", "EXPOSE", "FROM", "HEALTHCHECK", "LABEL", "MAINTAINER"}
    | {"ONBUILD", "RUN", "SHELL", "STOPSIGNAL", "USER", "VOLUME", "WORKDIR"}
)
_ESCAPE = re.compile(r"#\s*escape\s*=\s*(\S)\s*\Z", re.IGNORECASE)
_DIRECTIVE = re.compile(r"#\s*[A-Za-z0-9_-]+\s*=")


@dataclass(frozen=True, slots=True, kw_only=True)
class Heredoc:
    """A document in place: `<<NAME`, its lines, `NAME`."""

    name: str
    content: str
    expand: bool
    """Variables in it are replaced: its name was not quoted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    """One instruction."""

    line: int
    """Counted from 1; where it begins."""
    name: str
    """In capitals."""
    arguments: tuple[str, ...]
    flags: tuple[str, ...] = ()
    json: bool = False
    """The arguments were a JSON list."""
    text: str = ""
    """As written, lines joined."""
    heredocs: tuple[Heredoc, ...] = ()
    literal: bool = False
    """It comes from a template: nothing in it is expanded or unquoted, and `line` counts its steps."""

    @property
    def where(self) -> str:
        """For errors."""
        return f"template, step {self.line}" if self.literal else f"Dockerfile, line {self.line}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Dockerfile:
    """All of one."""

    instructions: tuple[Instruction, ...]
    escape: str = "\\"


def parse_dockerfile(text: str) -> Dockerfile:
    """Raises InvalidSpecError with the line, UnsupportedError when the parser is not installed."""
    try:
        import dockerfile  # type: ignore[import-not-found]  # Holds a runtime of its own; nobody else should pay for it.
    except ImportError as error:
        raise UnsupportedError(
            "reading Dockerfiles needs the package `dockerfile`",
            detail={"field": "dockerfile"},
            remedy="pip install 'opendsec[build]', or write the build as a template (docs/howto/build.md)",
        ) from error
    try:
        commands = dockerfile.parse_string(text)
    except dockerfile.GoParseError as error:
        raise InvalidSpecError(f"Dockerfile: {error}", detail={"field": "dockerfile"}) from error
    return Dockerfile(instructions=tuple(_instruction(one) for one in commands), escape=_escape(text))


def bad(at: Instruction, why: str, *, remedy: str = "") -> InvalidSpecError:
    """The error for one instruction."""
    return InvalidSpecError(f"{at.where}: {why}", detail={"field": "dockerfile", "line": at.line}, remedy=remedy)


def unsupported(at: Instruction, what: str, *, remedy: str) -> UnsupportedError:
    """The error for what Docker can and we do not."""
    return UnsupportedError(
        f"{at.where}: {what} is not supported", detail={"field": "dockerfile", "line": at.line}, remedy=remedy
    )


def _instruction(command: object) -> Instruction:
    original = str(command.original)  # type: ignore[attr-defined]  # The package has no types.
    instruction = Instruction(
        line=int(command.start_line),  # type: ignore[attr-defined]
        name=str(command.cmd).upper(),  # type: ignore[attr-defined]
        arguments=tuple(command.value),  # type: ignore[attr-defined]
        flags=tuple(command.flags),  # type: ignore[attr-defined]
        json=bool(command.json),  # type: ignore[attr-defined]
        text=original,
        heredocs=tuple(_heredoc(one, original) for one in command.heredocs),  # type: ignore[attr-defined]
    )
    if instruction.name not in INSTRUCTIONS:
        raise bad(instruction, f"{instruction.name} is no instruction")
    return instruction


def _heredoc(found: object, original: str) -> Heredoc:
    name = str(found.name)  # type: ignore[attr-defined]
    opening = re.search(rf"<<(-?)([\"']?){re.escape(name)}\2", original)
    content = str(found.content)  # type: ignore[attr-defined]
    if opening is not None and opening[1]:
        content = re.sub(r"^\t+", "", content, flags=re.MULTILINE)
    return Heredoc(name=name, content=content, expand=opening is None or not opening[2])


def _escape(text: str) -> str:
    """The parser directive at the top, as the parser itself reads it."""
    for line in text.lstrip("\ufeff").splitlines():
        stripped = line.strip()
        if match := _ESCAPE.match(stripped):
            return match[1]
        if not _DIRECTIVE.match(stripped):
            break
    return "\\"
