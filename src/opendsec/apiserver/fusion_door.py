"""How clients of SandboxFusion come in, which send no API key and can be told an address at most.

Three ways, for its paths alone:
    http://:odk_…@host:8700            HTTP libraries make an `Authorization: Basic` of it
    http://host:8700/fusion/odk_…      the key is a part of the path; it is taken out before anything is logged
    OPENDSEC_RUN_CODE_PROJECT=name     whoever sends no key at all is a runner of that project; off unless set
A wrong key is refused, also where none is needed.
"""

from __future__ import annotations

import base64
import binascii
import secrets

from opendsec.apiserver.fusion import REFUSED, RUN_CODE
from opendsec.apiserver.iam import Principal
from opendsec.model.access import Role
from opendsec.server.asgi import ASGIApp, Receive, Scope, Send, header
from opendsec.server.auth import Verify, same_token

PREFIX = "/fusion/"
_PATHS = frozenset({RUN_CODE, *REFUSED})
_AUTHORIZATION = b"authorization"


class FusionDoor:
    """`verify`: of every key. `anonymous_project`: "" lets nobody in without one."""

    def __init__(self, verify: Verify, *, anonymous_project: str = "") -> None:
        self._verify = verify
        self._project = anonymous_project
        self._ticket = f"anonymous-{secrets.token_urlsafe(32)}"

    async def verify(self, token: str) -> object:
        """The principal of a key, or of the ticket of those who have none."""
        if self._project and same_token(token, self._ticket):
            return Principal(key_id="anonymous", project=self._project, role=Role.RUNNER)
        return await self._verify(token)

    def before(self, app: ASGIApp) -> ASGIApp:
        """`app`, with these clients' requests as everybody else's look."""

        async def opened(scope: Scope, receive: Receive, send: Send) -> None:
            await app(self._seen(scope) if scope["type"] == "http" else scope, receive, send)

        return opened

    def _seen(self, scope: Scope) -> Scope:
        path: str = scope["path"]
        if path.startswith(PREFIX):
            key, _, rest = path[len(PREFIX) :].partition("/")
            known = f"/{rest}" if f"/{rest}" in _PATHS else f"{PREFIX}key/{rest}"
            return _with(scope, key, path=known)
        if path not in _PATHS:
            return scope
        given = header(scope, _AUTHORIZATION)
        if given is None:
            return _with(scope, self._ticket) if self._project else scope
        password = _basic(given)
        return scope if password is None else _with(scope, password)


def _basic(value: str) -> str | None:
    """The password of a Basic authorization, or what is there in its place."""
    scheme, _, encoded = value.partition(" ")
    if scheme.lower() != "basic":
        return None
    try:
        user, _, password = base64.b64decode(encoded, validate=True).decode("utf-8").partition(":")
    except (binascii.Error, UnicodeDecodeError):
        return None
    return password or user


def _with(scope: Scope, key: str, *, path: str | None = None) -> Scope:
    """The same request with this key."""
    kept = [pair for pair in scope["headers"] if pair[0] != _AUTHORIZATION]
    token = b"Bearer " + key.encode("latin-1", "replace")
    fresh = {**scope, "headers": [*kept, (_AUTHORIZATION, token)]}
    if path is not None:
        fresh["path"] = path
        fresh["raw_path"] = path.encode("utf-8", "surrogateescape")
    return fresh
