"""Who is asking: the bearer token of a request, compared in constant time.

A server passes one `Verify` to the front. It returns a principal (any value) or raises UnauthorizedError; it never says
which part of a token was wrong.
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable

from opendsec import errors
from opendsec.server.asgi import Scope, header

Verify = Callable[[str], Awaitable[object]]

_REMEDY = "send the header `Authorization: Bearer <key>`"
MAX_TOKEN = 512


def bearer_token(scope: Scope) -> str:
    """The token of the Authorization header. Raises UnauthorizedError when there is none."""
    value = header(scope, b"authorization")
    if value is None:
        raise errors.UnauthorizedError("no API key was given", remedy=_REMEDY)
    scheme, _, token = value.partition(" ")
    token = token.strip()
    if scheme.lower() != "bearer" or not token or len(token) > MAX_TOKEN:
        raise errors.UnauthorizedError("the Authorization header holds no bearer token", remedy=_REMEDY)
    return token


def same_token(given: str, expected: str) -> bool:
    """Equality in time that depends on the lengths only."""
    return hmac.compare_digest(given.encode("utf-8", "surrogatepass"), expected.encode("utf-8", "surrogatepass"))


def constant_token(expected: str) -> Verify:
    """A `Verify` for servers with one secret, such as an edge. The principal is True."""
    if len(expected) < 16:
        raise ValueError("a token has at least 16 characters")

    async def verify(token: str) -> object:
        if not same_token(token, expected):
            raise errors.UnauthorizedError("the token is wrong")
        return True

    return verify
