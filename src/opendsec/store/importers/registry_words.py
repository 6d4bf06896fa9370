"""What skopeo says when a registry does not give what was asked for, as errors of ours. Pure.

skopeo has one exit status for everything; its last line tells, in words of the registry's protocol (the error codes
of the OCI distribution specification), of HTTP, of TLS and of the network.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from opendsec.errors import (
    CapacityError,
    ConnectError,
    Detail,
    DigestMismatchError,
    DiskFullError,
    HostCapabilityError,
    ImageNotFoundError,
    NodeError,
    OpenDSecError,
    UnauthorizedError,
)

_PREFIX = re.compile(r'Error parsing image name "[^"]*": ')
_FULL = re.compile(r"no space left|disk quota exceeded", re.IGNORECASE)
_LIMITED = re.compile(r"toomanyrequests|too many requests|\b429\b", re.IGNORECASE)
_REFUSED = re.compile(
    r"unauthorized|authentication required|invalid username/password|access to the resource is denied"
    r"|\b401\b|\b403\b|forbidden|no basic auth credentials",
    re.IGNORECASE,
)
_UNKNOWN = re.compile(
    r"manifest unknown|name unknown|name_unknown|manifest_unknown|repository name not known|blob unknown|\b404\b",
    re.IGNORECASE,
)
_TLS = re.compile(r"x509|certificate|tls: |server gave HTTP response to HTTPS", re.IGNORECASE)
_DAMAGED = re.compile(r"digest did not match|does not match digest|digest mismatch|unexpected size", re.IGNORECASE)
_POLICY = re.compile(r"policy\.json|policy file|signature", re.IGNORECASE)
_UNREACHABLE = re.compile(
    r"connection refused|connection reset|no such host|timeout|unexpected EOF|\bEOF\b|network is unreachable"
    r"|no route to host|broken pipe|server misbehaving|\b50[0234]\b|pinging container registry|internal server error",
    re.IGNORECASE,
)


def registry_error(reference: str, status: int, tail: Sequence[str]) -> OpenDSecError:
    """The error for a skopeo that ended with `status` after these lines."""
    words = _last_words(tail)
    host = reference.partition("/")[0]
    detail = {"image": reference, "registry": host, "status": status}
    about = words.replace(reference, "").replace(host, "")  # Which may look like a word of the registry's.
    for pattern, make in _MEANINGS:
        if pattern.search(about):
            return make(reference, host, words, detail)
    return NodeError(f"skopeo ended with status {status}: {words}", detail=detail, retryable=False)


def _full(reference: str, _host: str, _words: str, detail: Detail) -> OpenDSecError:
    return DiskFullError(f"no space left for the layers of {reference}", detail=detail)


def _limited(_reference: str, host: str, words: str, detail: Detail) -> OpenDSecError:
    return CapacityError(
        f"the registry {host} takes no more requests for now: {words}",
        detail=detail,
        remedy="wait, or name an account with --creds-file or --authfile",
    )


def _untrusted(_reference: str, host: str, words: str, detail: Detail) -> OpenDSecError:
    return ConnectError(
        f"{host} cannot be trusted: {words}",
        detail=detail,
        retryable=False,
        remedy="install its certificate, or say --no-tls-verify for a registry of your own",
    )


def _refused(reference: str, host: str, words: str, detail: Detail) -> OpenDSecError:
    return UnauthorizedError(
        f"the registry {host} refuses {reference}: {words}",
        detail=detail,
        remedy="`skopeo login`, or name an account with --creds-file or --authfile; it may also not exist",
    )


def _unknown(reference: str, _host: str, words: str, detail: Detail) -> OpenDSecError:
    return ImageNotFoundError(f"no image {reference}: {words}", detail=detail)


def _damaged(reference: str, _host: str, words: str, detail: Detail) -> OpenDSecError:
    return DigestMismatchError(f"{reference}: the registry sent other bytes than it said: {words}", detail=detail)


def _unreachable(_reference: str, host: str, words: str, detail: Detail) -> OpenDSecError:
    return ConnectError(f"the registry {host} does not answer as it should: {words}", detail=detail)


def _forbidden_here(reference: str, _host: str, words: str, detail: Detail) -> OpenDSecError:
    return HostCapabilityError(
        f"skopeo may not take {reference}: {words}",
        detail={**detail, "probe": "skopeo"},
        remedy="apt-get install golang-github-containers-common, or set /etc/containers/policy.json",
    )


_MEANINGS = (
    (_FULL, _full),
    (_LIMITED, _limited),
    (_TLS, _untrusted),
    (_REFUSED, _refused),
    (_UNKNOWN, _unknown),
    (_DAMAGED, _damaged),
    (_UNREACHABLE, _unreachable),
    (_POLICY, _forbidden_here),
)
"""In this order: a refusal may say that there was no connection, a limit that something is forbidden."""


def _last_words(tail: Sequence[str]) -> str:
    """The last line that is an error, without time and level."""
    lines = [line for line in tail if "level=fatal" in line or "level=error" in line] or list(tail)[-1:]
    match = re.search(r'msg="(.*)"', lines[-1]) if lines else None
    text = match[1].replace('\\"', '"') if match else (lines[-1] if lines else "it said nothing")
    return _PREFIX.sub("", text)[-600:]
