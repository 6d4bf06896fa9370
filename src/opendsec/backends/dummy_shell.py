"""The dummy backend's programs: a tiny, deterministic shell language.

    true · false · exit N · echo [-n] WORD… · cat [FILE…] · sleep SECONDS · yes [LINES]
    pwd · cd DIR · env · export NAME=VALUE
    trap '' TERM      ignore SIGTERM from here on
    allocate MIB      use that much memory until the end of the command; above the memory limit it is killed
    forks N           be N processes; above the pids limit it fails with exit status 1, and is counted

joined by `;`, newlines, `&&` and `||`; `> FILE`, `>> FILE` and `>&2` redirect one verb; quotes, backslashes and
`$NAME` work as in a shell. Nothing else does: an unknown verb is "not found" (127), anything unparsable a syntax
error (2). A program is a generator that yields what it waits for.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Callable, Generator
from dataclasses import dataclass, field

from opendsec.backends.dummy_files import FileTree

MAX_REDIRECTED = 4 * 1024 * 1024
"""Most bytes one verb may redirect into a file (`yes > FILE` would never end)."""

_TOKEN = re.compile(
    r"""(?P<op>&&|\|\||>&2|>>|>|;|\n)|(?P<word>(?:[^\s'";&|>\\]|\\.|'[^']*'|"(?:[^"\\]|\\.)*")+)|(?P<space>[
    \t\r]+)""",
    re.DOTALL,
)
_PIECE = re.compile(
    r"""'(?P<raw>[^']*)'|"(?P<quoted>(?:[^"\\]|\\.)*)"|\\(?P<escaped>.)|\$(?P<name>[A-Za-z_]\w*)|(?P<plain>[^'"\\$]+|\$)""",
    re.DOTALL,
)
_VARIABLE = re.compile(r"\\(?P<escaped>.)|\$(?P<name>[A-Za-z_]\w*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Sleep:
    """Wait that long."""

    seconds: float


@dataclass(frozen=True, slots=True)
class NeedStdin:
    """Wait until there is input or its end."""


@dataclass(frozen=True, slots=True)
class NeedRoom:
    """Wait until the stream's window has room."""

    stream: int


Wait = Sleep | NeedStdin | NeedRoom
Program = Generator[Wait, None, int]


class Ended(Exception):
    """`exit N`: leaves the whole script."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class Killed(Exception):
    """The kernel would have killed it here."""


class ForkDeniedError(Exception):
    """The pids limit forbids it."""


@dataclass(slots=True)
class ShellState:
    """What `cd` and `export` change; a session keeps it."""

    cwd: str
    env: dict[str, str]


@dataclass(slots=True)
class ProcessIo:
    """What a program may touch. The callables belong to the command that runs it."""

    files: FileTree
    state: ShellState
    write: Callable[[int, bytes], int]
    """(stream, bytes) → how many fitted into the window"""
    read: Callable[[], bytes | None]
    """Input, b"" when there is none yet, None at the end"""
    allocate: Callable[[int], None]
    fork: Callable[[int], None]
    ignores_term: bool = False
    redirect: tuple[str, bool] | None = None
    """(file, append)"""
    to_stderr: bool = False
    collected: list[bytes] = field(default_factory=list)


def _put(io: ProcessIo, data: bytes, stream: int = 1) -> Program:
    if stream == 1 and io.redirect is not None:
        io.collected.append(data)
        if sum(map(len, io.collected)) > MAX_REDIRECTED:
            raise OSError(errno.EFBIG, "File too large", io.redirect[0])
        return 0
    stream = 2 if io.to_stderr else stream
    while data:
        taken = io.write(stream, data)
        data = data[taken:]
        if data:
            yield NeedRoom(stream)
    return 0


def _absolute(io: ProcessIo, path: str) -> str:
    return path if path.startswith("/") else f"{io.state.cwd.rstrip('/')}/{path}"


def _echo(io: ProcessIo, words: list[str]) -> Program:
    newline = not (words and words[0] == "-n")
    text = " ".join(words if newline else words[1:]) + ("\n" if newline else "")
    return (yield from _put(io, text.encode("utf-8", "surrogateescape")))


def _cat(io: ProcessIo, words: list[str]) -> Program:
    for path in words:
        node = io.files.node(_absolute(io, path))
        yield from _put(io, node.data)
    while not words:
        data = io.read()
        if data is None:
            break
        if not data:
            yield NeedStdin()
        yield from _put(io, data)
    return 0


def _sleep(io: ProcessIo, words: list[str]) -> Program:
    yield Sleep(float(words[0]))
    return 0


def _yes(io: ProcessIo, words: list[str]) -> Program:
    left = int(words[0]) if words else None
    while left is None or left > 0:
        lines = 4096 if left is None else min(left, 4096)
        yield from _put(io, b"y\n" * lines)
        left = None if left is None else left - lines
    return 0


def _pwd(io: ProcessIo, words: list[str]) -> Program:
    return (yield from _put(io, io.state.cwd.encode("utf-8", "surrogateescape") + b"\n"))


def _env(io: ProcessIo, words: list[str]) -> Program:
    for name, value in io.state.env.items():
        yield from _put(io, f"{name}={value}\n".encode("utf-8", "surrogateescape"))
    return 0


def _cd(io: ProcessIo, words: list[str]) -> Program:
    yield from ()
    target = _absolute(io, words[0] if words else io.state.env.get("HOME", "/"))
    io.files.directory(target)
    parts: list[str] = []
    for part in target.split("/"):
        if part == "..":
            parts = parts[:-1]
        elif part not in ("", "."):
            parts.append(part)
    io.state.cwd = "/" + "/".join(parts)
    return 0


def _export(io: ProcessIo, words: list[str]) -> Program:
    yield from ()
    for word in words:
        name, _, value = word.partition("=")
        io.state.env[name] = value
    return 0


def _trap(io: ProcessIo, words: list[str]) -> Program:
    yield from ()
    io.ignores_term = words == ["", "TERM"]
    return 0


def _allocate(io: ProcessIo, words: list[str]) -> Program:
    yield from ()
    io.allocate(int(words[0]) * 1024 * 1024)
    return 0


def _forks(io: ProcessIo, words: list[str]) -> Program:
    yield from ()
    io.fork(int(words[0]))
    return 0


def _exit(io: ProcessIo, words: list[str]) -> Program:
    yield from ()
    raise Ended(int(words[0]) & 255 if words else 0)


def _constant(code: int) -> Callable[[ProcessIo, list[str]], Program]:
    def verb(io: ProcessIo, words: list[str]) -> Program:
        yield from ()
        return code

    return verb


VERBS: dict[str, Callable[[ProcessIo, list[str]], Program]] = {
    "true": _constant(0),
    "false": _constant(1),
    "exit": _exit,
    "echo": _echo,
    "cat": _cat,
    "sleep": _sleep,
    "yes": _yes,
    "pwd": _pwd,
    "cd": _cd,
    "env": _env,
    "export": _export,
    "trap": _trap,
    "allocate": _allocate,
    "forks": _forks,
}


def _expand(word: str, env: dict[str, str]) -> str:
    def variable(match: re.Match[str]) -> str:
        escaped = match["escaped"]
        if escaped is not None:
            return escaped if escaped in '"\\$' else "\\" + escaped
        return env.get(match["name"], "")

    def piece(match: re.Match[str]) -> str:
        if match["name"] is not None:
            return env.get(match["name"], "")
        if match["quoted"] is not None:
            return _VARIABLE.sub(variable, match["quoted"])
        return next(text for text in (match["raw"], match["escaped"], match["plain"]) if text is not None)

    return _PIECE.sub(piece, word)


def _tokens(script: str) -> list[tuple[str, bool]]:
    """(text, is an operator). Raises ValueError with the text it stopped at."""
    found: list[tuple[str, bool]] = []
    position = 0
    while position < len(script):
        match = _TOKEN.match(script, position)
        if match is None:
            raise ValueError(script[position : position + 20])
        if match["space"] is None:
            found.append((match[0], match["op"] is not None))
        position = match.end()
    return found


def _statements(tokens: list[tuple[str, bool]]) -> list[tuple[str, list[tuple[str, bool]]]]:
    """(how it is joined to the one before, its tokens)"""
    statements: list[tuple[str, list[tuple[str, bool]]]] = [(";", [])]
    for text, operator in tokens:
        if operator and text in (";", "\n", "&&", "||"):
            statements.append((text, []))
        else:
            statements[-1][1].append((text, operator))
    return [(joint, body) for joint, body in statements if body]


def _say(io: ProcessIo, text: str) -> Program:
    return (yield from _put(io, f"dummy: {text}\n".encode("utf-8", "surrogateescape"), 2))


def _run_verb(io: ProcessIo, words: list[str]) -> Program:
    verb = VERBS.get(words[0].rpartition("/")[2])
    if verb is None:
        yield from _say(io, f"{words[0]}: not found")
        return 127
    try:
        code = yield from verb(io, words[1:])
        if io.redirect is not None:
            _save(io, *io.redirect)
        return code
    except OSError as error:
        yield from _say(io, f"{words[0]}: {error.filename}: {error.strerror}")
    except (ValueError, IndexError):
        yield from _say(io, f"{words[0]}: bad argument")
    except ForkDeniedError:
        yield from _say(io, f"{words[0]}: Resource temporarily unavailable")
    return 1


def _save(io: ProcessIo, path: str, append: bool) -> None:
    data = b"".join(io.collected)
    if append and io.files.locate(path)[2] is not None:
        data = io.files.node(path).data + data
    io.files.write(path, data, mode=None, parents=False)


def _run_statement(io: ProcessIo, body: list[tuple[str, bool]]) -> Program:
    words: list[str] = []
    io.redirect, io.to_stderr, io.collected = None, False, []
    rest = iter(body)
    for text, operator in rest:
        if not operator:
            words.append(_expand(text, io.state.env))
        elif text == ">&2":
            io.to_stderr = True
        else:
            target, is_operator = next(rest, ("", True))
            if is_operator:
                yield from _say(io, f"syntax error near {text!r}")
                raise Ended(2)
            io.redirect = (_absolute(io, _expand(target, io.state.env)), text == ">>")
    return (yield from _run_verb(io, words or ["true"]))


def run_script(io: ProcessIo, script: str) -> Program:
    """The exit status of the last statement. Raises Ended and Killed."""
    try:
        statements = _statements(_tokens(script))
    except ValueError as error:
        yield from _say(io, f"syntax error near {str(error)!r}")
        return 2
    code = 0
    for joint, body in statements:
        if (joint == "&&" and code != 0) or (joint == "||" and code == 0):
            continue
        code = yield from _run_statement(io, body)
    return code


def run_argv(io: ProcessIo, argv: tuple[str, ...]) -> Program:
    """One verb, its words as they are."""
    return (yield from _run_verb(io, list(argv)))
