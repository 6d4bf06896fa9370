"""What every route of the edge reads from a request: project, flags, numbers, deadlines; each refusal names the
field.
"""

from __future__ import annotations

import base64
import hashlib

from opendsec import errors
from opendsec.model.ids import SandboxId, new_sandbox_id
from opendsec.server.asgi import Scope, header
from opendsec.wire.contracts import HEADER_IDEMPOTENCY, HEADER_PROJECT, HEADER_RIGHTS, HEADER_TIMEOUT

DEFAULT_PROJECT = "default"
_PROJECT = HEADER_PROJECT.lower().encode("ascii")
_IDEMPOTENCY = HEADER_IDEMPOTENCY.lower().encode("ascii")
_RIGHTS = HEADER_RIGHTS.lower().encode("ascii")
_TIMEOUT = HEADER_TIMEOUT.lower().encode("ascii")


def project_of(scope: Scope) -> str | None:
    """The project of the caller; None when the header is missing, which is the operator, who sees every project."""
    return header(scope, _PROJECT)


def require_right(scope: Scope, right: str) -> None:
    """Raises ForbiddenError when the apiserver has not said that the caller may. The operator may everything."""
    if project_of(scope) is None:
        return
    if right not in (header(scope, _RIGHTS) or "").split(","):
        raise errors.ForbiddenError(
            f"this key may not {right}: it may run sandboxes, and neither pack nor change images",
            detail={"right": right},
            remedy="use a key with the role builder",
        )


def key_of(scope: Scope) -> str | None:
    """The idempotency key of the request, or None."""
    key = header(scope, _IDEMPOTENCY)
    if key is not None and not 0 < len(key) <= 255:
        raise errors.InvalidSpecError(
            f"{HEADER_IDEMPOTENCY}: is empty or longer than 255 characters", detail={"field": HEADER_IDEMPOTENCY}
        )
    return key


def timeout_of(scope: Scope) -> float | None:
    """Seconds the caller waits for a create, or None."""
    text = header(scope, _TIMEOUT)
    return None if text is None else number(text, HEADER_TIMEOUT, least=0.001)


def sandbox_id_for(scope: Scope, edge: str, given: SandboxId | None, *, index: int | None = None) -> SandboxId:
    """The id given by the apiserver; else one derived from the idempotency key, so that a repeat names the same
    sandbox; else a new one.
    """
    if given is not None:
        return given
    key = key_of(scope)
    if key is None:
        return new_sandbox_id(edge)
    named = "\x00".join((project_of(scope) or DEFAULT_PROJECT, key, "" if index is None else str(index)))
    digest = hashlib.sha256(named.encode("utf-8", "surrogatepass")).digest()
    return SandboxId(f"sbx-{edge}-{base64.b32encode(digest[:10]).decode('ascii').lower()}")


def flag(found: dict[str, str], name: str) -> bool:
    """`true` or `false`; missing is false."""
    text = found.pop(name, "false")
    if text not in ("true", "false"):
        raise errors.InvalidSpecError(f"{name}: {text[:40]!r} is neither true nor false", detail={"field": name})
    return text == "true"


def integer(found: dict[str, str], name: str, *, most: int = 2**63 - 1, base: int = 10) -> int | None:
    """A number from 0 on; None when missing."""
    text = found.pop(name, None)
    if text is None:
        return None
    try:
        value = int(text, base) if text.isascii() and text.isalnum() else -1
    except ValueError:
        value = -1
    if not 0 <= value <= most:
        raise errors.InvalidSpecError(f"{name}: {text[:40]!r} is not a number from 0 to {most}", detail={"field": name})
    return value


def number(text: str, name: str, *, least: float = 0.0, most: float = 315_360_000.0) -> float:
    """Seconds."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not least <= value <= most:
        raise errors.InvalidSpecError(f"{name}: {text[:40]!r} is not a number of seconds", detail={"field": name})
    return value


def nothing_else(found: dict[str, str]) -> None:
    """Every parameter must have been taken."""
    for name in found:
        raise errors.InvalidSpecError(f"{name[:80]}: no such parameter here", detail={"field": name[:80]})
