"""Which paths of a sandbox's writable layer do not go into an image: what building leaves behind. Pure.

A pattern is one of

    name           an entry of that name anywhere: `.bash_history`, `*.swp`
    /path          that path: `/tmp/*`, `/etc/hosts`
    ~/path         that path below any home directory: `~/.cache`

`*`, `?` and `[…]` match within one name, `**` any number of names. What a pattern matches is left out with all below
it, unless a pattern of `keep` matches it or something above or below it. Some rules look into a file: it is left out
only when it holds a secret.

It decides about names and bytes alone. What becomes of whiteouts and of directories that hide something is
`opendsec.store.packing`'s to decide.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from opendsec.errors import InvalidSpecError

HOMES = "/home"
"""Everything in it is a home directory."""
MAX_PATTERNS = 1000
MAX_PATTERN_CHARS = 4096
MAX_ALL_CHARS = 64 * 1024
"""Of the patterns of one field together: the sandbox stands still while they are compiled."""
LOOK_INTO_BYTES = 256 * 1024
"""Files larger than that are no configuration of a package manager and no key."""

HISTORY = (
    ".ash_history",
    ".bash_history",
    ".irb_history",
    ".lesshst",
    ".mysql_history",
    ".node_repl_history",
    ".psql_history",
    ".python_history",
    ".rediscli_history",
    ".sh_history",
    ".sqlite_history",
    ".viminfo",
    ".wget-hsts",
    ".zsh_history",
    "~/.local/share/fish/fish_history",
    "~/.local/state/python_history",
    "~/.ssh/known_hosts",
    "~/.ssh/known_hosts.old",
)
CACHES = (
    "__pycache__",
    "~/.cache",
    "~/.npm/_cacache",
    "~/.npm/_logs",
    "~/.npm/_npx",
    "~/.yarn/cache",
    "~/.local/share/Trash",
    "/var/lib/apt/lists/*",
    "/var/cache/apt/*.bin",
    "/var/cache/apt/archives/*",
    "/var/cache/debconf/*-old",
    "/var/cache/dnf/*",
    "/var/cache/apk/*",
)
CREDENTIALS = (
    ".git-credentials",
    ".netrc",
    ".pgpass",
    "~/.aws",
    "~/.azure",
    "~/.cargo/credentials",
    "~/.cargo/credentials.toml",
    "~/.config/gcloud",
    "~/.config/gh",
    "~/.config/git/credentials",
    "~/.config/glab-cli",
    "~/.config/hub",
    "~/.config/huggingface/token",
    "~/.config/rclone/rclone.conf",
    "~/.docker/config.json",
    "~/.gem/credentials",
    "~/.gnupg",
    "~/.huggingface/token",
    "~/.kube",
    "~/.vault-token",
)
LEFTOVERS = (
    ".*.sw[a-p]",
    "*.swp",
    "/run/*",
    "/tmp/*",  # noqa: S108 - a path inside
    "/var/lock/*",
    "/var/run/*",
    "/var/tmp/*",  # noqa: S108 - a path inside
)
PLATFORM = (
    "/etc/hostname",
    "/etc/hosts",
    "/etc/resolv.conf",
    "*.opendsec-????????????????",
    "/dev/*",
    "/proc/*",
    "/sys/*",
)
"""A sandbox has its own of these, above every layer of an image; and what an upload that was cut left."""
DEFAULTS = (*HISTORY, *CACHES, *CREDENTIALS, *LEFTOVERS)

_SECRETS: tuple[tuple[str, tuple[bytes, ...]], ...] = (
    (".npmrc", (b"_authToken", b"_auth", b"_password")),
    (".yarnrc.yml", (b"npmAuthToken", b"npmAuthIdent")),
    (".pypirc", (b"password",)),
    ("pip.conf", (b"@",)),
    ("~/.ssh/*", (b"PRIVATE KEY", b"PuTTY-User-Key-File")),
)
"""Files that are left out only when they hold one of these."""


class Verdict(Enum):
    """What the patterns say of one path."""

    PACK = "pack"
    LEAVE_OUT = "leave_out"
    LOOK = "look"
    """It depends on what is in it; ask `Scrub.holds_secret`."""


@dataclass(frozen=True, slots=True)
class _Matcher:
    """Many patterns as few lookups: whole names, one expression for names, one for paths by their first part, one for
    what follows a home directory."""

    names: frozenset[str]
    name_expression: re.Pattern[str] | None
    path_expressions: dict[str, re.Pattern[str]]
    any_path: re.Pattern[str] | None
    in_home: re.Pattern[str] | None
    homes: frozenset[str]
    homes_begin: frozenset[str]
    """First parts of their paths."""

    def matches(self, path: str, name: str) -> bool:
        """`path` begins with `/`."""
        if name in self.names or (self.name_expression is not None and self.name_expression.fullmatch(name)):
            return True
        first = path[1:].partition("/")[0]
        expression = self.path_expressions.get(first)
        if expression is not None and expression.fullmatch(path):
            return True
        if self.any_path is not None and self.any_path.fullmatch(path):
            return True
        if self.in_home is None or first not in self.homes_begin:
            return False
        return self._matches_in_a_home(self.in_home, path)

    def _matches_in_a_home(self, expression: re.Pattern[str], path: str) -> bool:
        at = path.find("/", 1)
        while at > 0:
            above = path[:at]
            if (above in self.homes or above.rpartition("/")[0] == HOMES) and expression.fullmatch(path, at):
                return True
            at = path.find("/", at + 1)
        return False


class Scrub:
    """Compiled patterns. `homes` are the absolute paths `~` stands for, beside all below /home. Matching takes time in
    proportion to pattern and path, whatever they are. Raises InvalidSpecError naming the field."""

    def __init__(
        self,
        *,
        scrub: Sequence[str] = (),
        keep: Sequence[str] = (),
        defaults: bool = True,
        homes: Sequence[str] = ("/root",),
    ) -> None:
        check_patterns(scrub, "scrub")
        check_patterns(keep, "keep")
        chosen = (*PLATFORM, *(DEFAULTS if defaults else ()), *scrub)
        where = frozenset(homes)
        self._scrub = _compile(chosen, where)
        self._keep = _compile(keep, where) if keep else None
        secrets = _SECRETS if defaults else ()
        self._looks = _compile((pattern for pattern, _ in secrets), where)
        self._secrets = tuple((_compile((pattern,), where), needles) for pattern, needles in secrets)

    def verdict(self, path: str) -> Verdict:
        """Of a path inside (`/root/.bash_history`), whatever is above it."""
        name = path.rpartition("/")[2]
        if self._scrub.matches(path, name):
            return Verdict.LEAVE_OUT
        return Verdict.LOOK if self._looks.matches(path, name) else Verdict.PACK

    def keeps(self, path: str) -> bool:
        """Whether `keep` names this very path."""
        return self._keep is not None and self._keep.matches(path, path.rpartition("/")[2])

    def holds_secret(self, path: str, content: bytes) -> bool:
        """Whether a file that was to be looked into is left out."""
        name = path.rpartition("/")[2]
        return any(
            matcher.matches(path, name) and any(needle in content for needle in needles)
            for matcher, needles in self._secrets
        )


def check_patterns(patterns: Sequence[str], field: str) -> None:
    """Raises InvalidSpecError naming the field and the pattern."""
    if len(patterns) > MAX_PATTERNS:
        raise InvalidSpecError(f"{field}: {len(patterns)} patterns, at most {MAX_PATTERNS}", detail={"field": field})
    chars = sum(map(len, patterns))
    if chars > MAX_ALL_CHARS:
        raise InvalidSpecError(
            f"{field}: {chars} characters in all, at most {MAX_ALL_CHARS}",
            detail={"field": field},
            remedy="name directories that stand for what is in them",
        )
    for pattern in patterns:
        why = _fault(pattern)
        if why:
            raise InvalidSpecError(f"{field}: {pattern[:80]!r} {why}", detail={"field": field, "pattern": pattern[:80]})


def _fault(pattern: str) -> str:
    if not pattern or len(pattern) > MAX_PATTERN_CHARS or "\0" in pattern:
        return f"is empty, longer than {MAX_PATTERN_CHARS} characters, or holds a NUL"
    if "/" in pattern and not pattern.startswith(("/", "~/")):
        return "holds a / and begins with neither / nor ~/: a pattern is a name, a path from the root, or ~/ and a path"
    parts = pattern.split("/")
    if any(part in ("", ".", "..") for part in parts[1:]):
        return "has an empty part, a . or a .. in it"
    if pattern in ("*", "**", "~", ".", ".."):
        return "would match everything"
    try:
        re.compile(_expression(pattern))
    except re.error as error:
        return f"has a bad expression in brackets: {error.msg}"
    return ""


def homes_of(passwd: str) -> tuple[str, ...]:
    """What `~` stands for beside all below /home: /root, and the home directories of people in this passwd(5)."""
    found = {"/root": None}
    for line in passwd.splitlines():
        fields = line.split(":")
        if len(fields) != 7 or not fields[2].isdecimal():
            continue
        home = fields[5].rstrip("/")
        parts = home.split("/")[1:]
        people = _is_person(fields[2])
        if people and home.startswith("/") and parts and not any(part in ("", ".", "..") for part in parts):
            found[home] = None
    return tuple(found)


def _is_person(uid: str) -> bool:
    number = int(uid) if len(uid) < 11 else 0  # whatever that is
    return number == 0 or 1000 <= number < 65_534


def _compile(patterns: Iterable[str], homes: frozenset[str]) -> _Matcher:
    names: set[str] = set()
    name_globs: list[str] = []
    by_first: dict[str, list[str]] = {}
    anywhere: list[str] = []
    in_home: list[str] = []
    for pattern in patterns:
        if "/" not in pattern:
            (name_globs.append if _is_glob(pattern) else names.add)(pattern)
        elif pattern.startswith("~/"):
            in_home.append(pattern[1:])
        else:
            first = pattern[1:].partition("/")[0]
            (anywhere if _is_glob(first) else by_first.setdefault(first, [])).append(pattern)
    return _Matcher(
        names=frozenset(names),
        name_expression=_any_of(name_globs),
        path_expressions={first: _some(_any_of(paths)) for first, paths in by_first.items()},
        any_path=_any_of(anywhere),
        in_home=_any_of(in_home),
        homes=homes,
        homes_begin=frozenset(home[1:].partition("/")[0] for home in (HOMES, *homes)),
    )


def _is_glob(text: str) -> bool:
    return any(character in text for character in "*?[")


def _any_of(patterns: Sequence[str]) -> re.Pattern[str] | None:
    return re.compile("|".join(_expression(one) for one in patterns), re.DOTALL) if patterns else None


def _some(pattern: re.Pattern[str] | None) -> re.Pattern[str]:
    assert pattern is not None
    return pattern


def _expression(pattern: str) -> str:
    """One glob as a regular expression for the whole text.

    Whatever stands before a further `*` or `**` is taken where it fits first and never looked at again (atomic groups):
    what fits later can do nothing that this could not, and a pattern of many stars costs no more than one of few.
    """
    *above, last = pattern.split("/")
    wild = [number for number, part in enumerate(above) if part == "**"]
    if last == "**":
        wild.append(len(above))
    out = "".join(f"{_part(part)}/" for part in above[: wild[0]]) if wild else ""
    starts = wild or [-1]
    for start, end in zip(starts, [*starts[1:], None], strict=True):
        parts = "".join(f"{_part(part)}/" for part in above[start + 1 : end])
        if not wild:
            return parts + _part(last)
        if end is not None:
            out += f"(?>(?:[^/]+/)*?{parts})"
        elif start == len(above):
            out += ".+"
        else:
            out += f"(?:[^/]+/)*{parts}" + _part(last)
    return out


def _part(part: str) -> str:
    """One name's pattern; see `_expression`."""
    texts = [""]
    at = 0
    while at < len(part):
        character = part[at]
        closing = part.find("]", at + 2) if character == "[" else -1
        if character == "*":
            texts.append("")
        elif character == "?":
            texts[-1] += "[^/]"
        elif closing > 0:
            inside = part[at + 1 : closing]
            negated = inside.startswith("!")
            body = re.sub(r"([\\\[\]^&~|])", r"\\\1", inside[negated:])
            texts[-1] += f"(?!/)[{'^' if negated else ''}{body}]"
            at = closing
        else:
            texts[-1] += re.escape(character)
        at += 1
    first, *others = texts
    if not others:
        return first
    return first + "".join(f"(?>[^/]*?{text})" for text in others[:-1]) + f"[^/]*{others[-1]}"
