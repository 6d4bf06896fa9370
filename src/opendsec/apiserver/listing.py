"""Lists across edges: one edge after the other, by name, with a cursor that remembers where it stopped.

An edge that does not answer fails the listing with its name: a list that silently lacks sandboxes would be taken for
the truth.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from urllib.parse import quote, urlencode

import msgspec

from opendsec import errors
from opendsec.apiserver.edges import Edges
from opendsec.model.node import SandboxStatus
from opendsec.wire import codec
from opendsec.wire.contracts import SandboxPage

MAX_PAGE = 1000


def encode_cursor(edge: str, cursor: str) -> str:
    """Opaque to users."""
    return base64.urlsafe_b64encode(msgspec.json.encode([edge, cursor])).decode("ascii").rstrip("=")


def decode_cursor(text: str) -> tuple[str, str]:
    """Edge and its own cursor; two empty strings for a first page. Raises InvalidSpecError."""
    if not text:
        return "", ""
    try:
        padded = text + "=" * (-len(text) % 4)
        return msgspec.json.decode(base64.b64decode(padded, altchars=b"-_", validate=True), type=tuple[str, str])
    except (binascii.Error, ValueError, msgspec.DecodeError) as exc:
        raise errors.InvalidSpecError("cursor: not one this server gave out", detail={"field": "cursor"}) from exc


def check_filters(*, labels: Sequence[str], limit: int) -> None:
    """Raises InvalidSpecError naming the filter."""
    if not 1 <= limit <= MAX_PAGE:
        raise errors.InvalidSpecError(f"limit: {limit} is not between 1 and {MAX_PAGE}", detail={"field": "limit"})
    for label in labels:
        if "=" not in label or label.startswith("="):
            raise errors.InvalidSpecError(f"label: {label[:80]!r} is not key=value", detail={"field": "label"})


class Listing:
    """Merges what edges list."""

    def __init__(self, edges: Edges) -> None:
        self._edges = edges

    async def page(
        self,
        *,
        project: str,
        labels: Sequence[str],
        state: str,
        limit: int,
        cursor: str,
        usage: bool,
        request_id: str,
    ) -> SandboxPage:
        """Up to `limit` sandboxes. `state` is for the edges to understand; `usage`: with their memory in use."""
        check_filters(labels=labels, limit=limit)
        start, inner = decode_cursor(cursor)
        names = [name for name in sorted(self._edges.links) if name >= start]
        filters = [*(("label", label) for label in labels), ("state", state), ("usage", "true" if usage else "")]
        found: list[SandboxStatus] = []
        for position, name in enumerate(names):
            page = await self._edge_page(
                name,
                project=project,
                request_id=request_id,
                query=[*filters, ("limit", str(limit - len(found)))],
                cursor=inner if name == start else "",
            )
            found += page.items
            if page.cursor:
                return SandboxPage(items=tuple(found), cursor=encode_cursor(name, page.cursor))
            if len(found) >= limit and position + 1 < len(names):
                return SandboxPage(items=tuple(found), cursor=encode_cursor(names[position + 1], ""))
        return SandboxPage(items=tuple(found))

    async def _edge_page(
        self, name: str, *, project: str, request_id: str, query: list[tuple[str, str]], cursor: str
    ) -> SandboxPage:
        pairs = [(key, value) for key, value in [*query, ("cursor", cursor)] if value]
        target = "/v1/sandboxes?" + urlencode(pairs, quote_via=quote, errors="surrogateescape")
        _, body = await self._edges.links[name].call(
            "GET", target, project=project, request_id=request_id, repeatable=True
        )
        return codec.decode_answer(body, SandboxPage)
