"""What a user asks for: a sandbox specification. Never rewritten by us; defaults are filled in here, once.

`check_spec` is the only validator; every front door (SDK, apiserver, edge) calls it, so a bad field gets the same words
everywhere.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from opendsec.errors import InvalidSpecError, UnsupportedError
from opendsec.model.ids import check_image_name
from opendsec.model.screen import parse_size

MAX_BATCH = 32_768
"""Most sandboxes in one request (the published figure of DSec's largest job)."""

MAX_LABELS = 32
MAX_TOOLKITS = 32
_LABEL_KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,62}\Z")
_SNAPSHOT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}\Z")
_ENV_KEY = re.compile(r"[^=\x00]+\Z")
MAX_ENV_STRING = 131_071
"""Linux refuses one argument or environment string of 128 KiB or more (MAX_ARG_STRLEN, execve(2))."""


class BackendKind(StrEnum):
    """How a sandbox is isolated."""

    CONTAINER = "container"
    MICROVM = "microvm"
    FULLVM = "fullvm"
    FNCALL = "fncall"
    DUMMY = "dummy"


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """Caps, not reservations. None = no cap of its own (the node's default applies)."""

    memory_limit_mb: int | None = None
    """MiB, 4 or more."""
    cpu_cores_limit: float | None = None
    """Cores, 0.01 or more."""
    pids_limit: int | None = 1024
    """Processes and threads."""
    disk_limit_mb: int | None = None
    """MiB of the writable layer, 16 or more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lifetime:
    """When the platform ends the sandbox by itself. Seconds; None = never."""

    ttl_running_stop: float | None = 300.0
    """Idle time: reset by every operation, does not pass while a command runs."""
    ttl_max_stop: float | None = None
    """Since creation, whatever happens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxSpec:
    """One sandbox, as asked for."""

    image: str = ""
    """Needed unless there is a snapshot."""
    workspace: str | None = None
    """Reference to an image with the role workspace, laid over `image`: a repository and what its task needs."""
    toolkits: tuple[str, ...] | None = None
    """References to images with the role toolkit, laid over all that, lowest first. None: those the image asks for."""
    backend: BackendKind = BackendKind.CONTAINER
    resources: Resources = field(default_factory=Resources)
    lifetime: Lifetime = field(default_factory=Lifetime)
    network_rules: Mapping[str, bool] = field(default_factory=dict)
    """Empty: loopback only. `{"*": True}`: NAT'd IPv4.

    Names of services need a policy and are refused until there is one.
    """
    init_user: str | None = None
    """User of commands that name none: name, uid or uid:gid. None: the image's."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Added to the image's environment."""
    workdir: str | None = None
    """Absolute; None: the image's."""
    labels: Mapping[str, str] = field(default_factory=dict)
    screen: str | None = None
    """Size in pixels that a display is asked for, as `1920x1080`; None: 1280x800. Of machines with a display."""
    snapshot: str | None = None
    """Name of a snapshot the sandbox goes on from, memory and disk as they were. Image, workspace, toolkits,
    resources and screen are the source's then, and may not be given; `network_rules` must be what the source had;
    `env`, `init_user` and `workdir` are laid over the source's."""


def _bad(field_name: str, why: str) -> InvalidSpecError:
    return InvalidSpecError(f"{field_name}: {why}", detail={"field": field_name})


def check_memory_mb(value: int | None, field_name: str) -> None:
    """None, or 4 MiB to 64 TiB."""
    if value is not None and not 4 <= value <= 64 * 1024 * 1024:
        raise _bad(field_name, f"{value} is not between 4 and 67108864 MiB")


def _check_resources(res: Resources) -> None:
    check_memory_mb(res.memory_limit_mb, "memory_limit_mb")
    if res.cpu_cores_limit is not None and not 0.01 <= res.cpu_cores_limit <= 4096:
        raise _bad("cpu_cores_limit", f"{res.cpu_cores_limit} is not between 0.01 and 4096 cores")
    if res.pids_limit is not None and not 8 <= res.pids_limit <= 4_194_304:
        raise _bad("pids_limit", f"{res.pids_limit} is not between 8 and 4194304")
    if res.disk_limit_mb is not None and not 16 <= res.disk_limit_mb <= 16 * 1024 * 1024:
        raise _bad("disk_limit_mb", f"{res.disk_limit_mb} is not between 16 and 16777216 MiB")


def check_seconds(value: float | None, field_name: str) -> None:
    """None or a number of seconds above 0 and below 10 years.

    0 and negatives are refused, they never mean "unlimited".
    """
    if value is not None and not 0 < value < 315_360_000:
        raise _bad(field_name, f"{value} is not a positive number of seconds; use None for no limit")


def encode_text(text: str, field_name: str) -> bytes:
    """UTF-8, with surrogateescape for bytes that are none. Raises InvalidSpecError for what stands for no bytes at all,
    as JSON's `"\\ud800"` does.
    """
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        raise _bad(field_name, "holds half of a surrogate pair, which is no character") from None


def check_name(text: str, field_name: str, *, most: int) -> None:
    """1 to `most` characters without a NUL."""
    if not 0 < len(text) <= most:
        raise _bad(field_name, f"is empty or longer than {most} characters")
    if b"\x00" in encode_text(text, field_name):
        raise _bad(field_name, "holds a NUL")


def check_labels(labels: Mapping[str, str]) -> None:
    """At most 32; keys 1-63 of letters, digits and ._/-; values up to 256 characters."""
    if len(labels) > MAX_LABELS:
        raise _bad("labels", f"{len(labels)} labels, at most {MAX_LABELS}")
    for key, value in labels.items():
        if not _LABEL_KEY.match(key):
            raise _bad("labels", f"key {key[:80]!r} is not 1 to 63 letters, digits or ._/-")
        if len(value) > 256:
            raise _bad("labels", f"value of {key!r} is longer than 256 characters")
        encode_text(value, "labels")


def check_env(env: Mapping[str, str], field_name: str = "env") -> None:
    """Names without '=' and NUL, values without NUL, each `NAME=value` below the kernel's 128 KiB."""
    for key, value in env.items():
        if not _ENV_KEY.match(key) or "\x00" in value:
            raise _bad(field_name, f"variable {key[:80]!r} has an empty name, '=' in its name, or a NUL")
        if len(encode_text(f"{key}={value}", field_name)) > MAX_ENV_STRING:
            raise _bad(field_name, f"variable {key[:80]!r} is longer than the kernel's 131071 bytes")


def check_path(path: str, field_name: str) -> None:
    """Absolute, no NUL, at most 4095 bytes (PATH_MAX)."""
    if not path.startswith("/"):
        raise _bad(field_name, f"{path[:80]!r} is not an absolute path")
    if "\x00" in path or len(encode_text(path, field_name)) > 4095:
        raise _bad(field_name, "a path has no NUL and at most 4095 bytes")


def _check_network(rules: Mapping[str, bool]) -> None:
    for name, allowed in rules.items():
        if name != "*":
            raise UnsupportedError(
                f"network_rules: service {name!r} is not known here",
                detail={"field": "network_rules", "service": name},
                remedy='named services need a network policy, which this version does not have; use {"*": True} or {}',
            )
        if not isinstance(allowed, bool):
            raise _bad("network_rules", f"the value of {name!r} is not true or false")


def _check_from_snapshot(spec: SandboxSpec, name: str) -> None:
    check_snapshot_name(name, field_name="snapshot")
    given = (
        ("image", bool(spec.image)),
        ("workspace", spec.workspace is not None),
        ("toolkits", spec.toolkits is not None),
        ("memory_limit_mb", spec.resources.memory_limit_mb is not None),
        ("cpu_cores_limit", spec.resources.cpu_cores_limit is not None),
        ("pids_limit", spec.resources.pids_limit != Resources().pids_limit),
        ("disk_limit_mb", spec.resources.disk_limit_mb is not None),
        ("screen", spec.screen is not None),
    )
    for field_name, is_given in given:
        if is_given:
            raise InvalidSpecError(
                f"{field_name}: is what it was when the snapshot {name!r} was made, and cannot be chosen anew",
                detail={"field": field_name},
                remedy="leave it out, or start from an image",
            )


def check_snapshot_name(name: str, *, field_name: str = "name") -> str:
    """The name itself: 1 to 128 of a-z, A-Z, 0-9, `.`, `_` and `-`, beginning with a letter or digit."""
    if not isinstance(name, str):
        raise _bad(field_name, "is not a string")
    if not _SNAPSHOT_NAME.match(name):
        raise _bad(
            field_name, f"{name[:80]!r} is not 1 to 128 letters, digits, `.`, `_` or `-`, the first a letter or digit"
        )
    return name


def _check_images(spec: SandboxSpec) -> None:
    check_image_name(spec.image)
    if spec.workspace is not None:
        check_image_name(spec.workspace, field="workspace")
    for toolkit in spec.toolkits or ():
        check_image_name(toolkit, field="toolkits")
    if len(spec.toolkits or ()) > MAX_TOOLKITS:
        raise _bad("toolkits", f"{len(spec.toolkits or ())} toolkits, at most {MAX_TOOLKITS}")


def check_spec(spec: SandboxSpec) -> SandboxSpec:
    """The spec itself if every field is good. Raises InvalidSpecError or UnsupportedError naming the field."""
    if spec.backend is BackendKind.FNCALL:
        raise UnsupportedError(
            "backend: fncall carries out calls and has no sandboxes",
            detail={"field": "backend"},
            remedy="send calls to POST /v1/fncalls (client.fncall, `opendsec fncall run`); use container for a sandbox",
        )
    if spec.snapshot is not None:
        _check_from_snapshot(spec, spec.snapshot)
    else:
        _check_images(spec)
    _check_resources(spec.resources)
    check_seconds(spec.lifetime.ttl_running_stop, "ttl_running_stop")
    check_seconds(spec.lifetime.ttl_max_stop, "ttl_max_stop")
    _check_network(spec.network_rules)
    check_env(spec.env)
    check_labels(spec.labels)
    if spec.screen is not None:
        parse_size(spec.screen)
    if spec.workdir is not None:
        check_path(spec.workdir, "workdir")
    if spec.init_user is not None:
        check_name(spec.init_user, "init_user", most=256)
    return spec
