"""Where the platform is and with which key: the only file of the SDK that reads the environment.

Order: explicit arguments, then OPENDSEC_API_URL and OPENDSEC_API_KEY, then `local.json` in the run directory, which
`opendsec up` writes. A key found in `local.json` is never sent to another address than the one beside it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from opendsec.errors import ConnectError, InvalidSpecError, UnauthorizedError

DEFAULT_RUN_DIR = "/run/opendsec"
_START_IT = "start one on this machine with `opendsec up -d`, or set OPENDSEC_API_URL and OPENDSEC_API_KEY"


class LocalPlatform(msgspec.Struct, frozen=True):
    """The content of `local.json`."""

    api_url: str
    api_key: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """An address taken apart. Exactly one of `host` and `unix_path` is not empty."""

    url: str
    api_key: str
    tls: bool = False
    host: str = ""
    port: int = 0
    unix_path: str = ""
    prefix: str = ""
    """Path before /v1, without a slash at its end."""

    @property
    def authority(self) -> bytes:
        """Value of the Host header."""
        if self.unix_path:
            return b"localhost"
        host = f"[{self.host}]" if ":" in self.host else self.host
        default = 443 if self.tls else 80
        return (host if self.port == default else f"{host}:{self.port}").encode("ascii")


def parse_endpoint(url: str, api_key: str) -> Endpoint:
    """`http://…`, `https://…` or `unix:/path/to/socket` → Endpoint. Raises InvalidSpecError (field `api_url` or
    `api_key`)."""
    if any(not 32 < ord(letter) < 127 for letter in api_key):
        raise InvalidSpecError("api_key: holds spaces or characters outside ASCII", detail={"field": "api_key"})
    if url.startswith("unix:"):
        path = "/" + url.removeprefix("unix:").lstrip("/")
        return Endpoint(url=url, api_key=api_key, unix_path=path)
    try:
        parts = urlsplit(url)
        port = parts.port
        host = (parts.hostname or "").encode("idna").decode("ascii")
    except (ValueError, UnicodeError) as exc:
        raise _bad_url(url, str(exc)) from exc
    if parts.scheme not in {"http", "https"} or not host:
        raise _bad_url(url, "not http://host[:port], https://host[:port] or unix:/path")
    if parts.username or parts.query or parts.fragment:
        raise _bad_url(url, "holds a user, a query or a fragment")
    tls = parts.scheme == "https"
    return Endpoint(
        url=url,
        api_key=api_key,
        tls=tls,
        host=host,
        port=port or (443 if tls else 80),
        prefix=parts.path.rstrip("/"),
    )


def find_endpoint(
    api_url: str | None = None, api_key: str | None = None, *, environment: Mapping[str, str] | None = None
) -> Endpoint:
    """The platform to talk to. Raises ConnectError, with how to start one, when none is named anywhere."""
    environment = os.environ if environment is None else environment
    url = api_url or environment.get("OPENDSEC_API_URL", "")
    key = api_key if api_key is not None else environment.get("OPENDSEC_API_KEY")
    if url and key is not None:
        return parse_endpoint(url, key)
    local = _read_local(Path(environment.get("OPENDSEC_RUN_DIR") or DEFAULT_RUN_DIR) / "local.json", needed=not url)
    if local is None:
        return parse_endpoint(url, key or "")
    if url and url.rstrip("/") != local.api_url.rstrip("/"):
        return parse_endpoint(url, key or "")
    return parse_endpoint(local.api_url, local.api_key if key is None else key)


def _read_local(path: Path, *, needed: bool) -> LocalPlatform | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=LocalPlatform)
    except FileNotFoundError as exc:
        if not needed:
            return None
        raise ConnectError(
            f"no OpenDSec platform is known here: no address was given and {path} does not exist",
            remedy=_START_IT,
            retryable=False,
        ) from exc
    except PermissionError as exc:
        if not needed:
            return None
        raise UnauthorizedError(
            f"{path} belongs to another user", remedy="run as that user, or set OPENDSEC_API_URL and OPENDSEC_API_KEY"
        ) from exc
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise ConnectError(f"{path} is damaged: {exc}", remedy=_START_IT, retryable=False) from exc


def _bad_url(url: str, why: str) -> InvalidSpecError:
    return InvalidSpecError(f"api_url: {url!r}: {why}", detail={"field": "api_url"})
