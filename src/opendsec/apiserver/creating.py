"""Starting one sandbox: choose an edge, write the key down, ask, go on to the next edge when this one is full.

Promises: with an idempotency key one request starts one sandbox, whatever is repeated or killed. Without one, a
sandbox the caller was not told about is deleted. A failure that left nothing frees the key, so the same key may be
tried again.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace

from opendsec import errors
from opendsec.apiserver.creations import Claim, Creations
from opendsec.apiserver.edges import Edges
from opendsec.apiserver.placement import may_try_elsewhere, order, refusal
from opendsec.apiserver.reclaim import Reclaimer
from opendsec.model.ids import SandboxId, edge_of, new_sandbox_id
from opendsec.model.spec import check_seconds
from opendsec.wire import codec
from opendsec.wire.contracts import HEADER_TIMEOUT, CreateRequest

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """For whom, and with which headers, something is started."""

    project: str
    request_id: str
    idempotency_key: str | None = None
    timeout: str | None = None

    @property
    def timeout_s(self) -> float:
        """How long the request may take; 0 when it does not say."""
        return float(self.timeout or 0)

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """What the edge is told besides project and request id."""
        shown = [(b"content-type", b"application/json")]
        if self.timeout is not None:
            shown.append((HEADER_TIMEOUT.encode("ascii"), self.timeout.encode("ascii")))
        return shown


def check_timeout(text: str | None) -> str | None:
    """The header's value if it is a positive number of seconds, or None. Raises InvalidSpecError."""
    if text is None:
        return None
    try:
        check_seconds(float(text), HEADER_TIMEOUT)
    except ValueError as exc:
        raise errors.InvalidSpecError(
            f"{HEADER_TIMEOUT}: {text[:40]!r} is not a number of seconds", detail={"field": HEADER_TIMEOUT}
        ) from exc
    return text.strip()


def digest(request: object) -> str:
    """Equal for equal requests, however they were spelled."""
    return hashlib.sha256(type(request).__name__.encode("ascii") + b"\0" + codec.encode(request)).hexdigest()


class Creating:
    """Starts single sandboxes."""

    def __init__(self, edges: Edges, creations: Creations, reclaimer: Reclaimer) -> None:
        self._edges = edges
        self._creations = creations
        self._reclaimer = reclaimer

    async def create(self, request: CreateRequest, caller: Caller) -> bytes:
        """The edge's SandboxStatus as JSON.

        Raises the edge's error, UnschedulableError, ConflictError or TransportError.
        """
        names = order(await self._edges.views(), seed=secrets.randbits(32))
        if not names:
            raise refusal({})
        first = new_sandbox_id(names[0])
        if caller.idempotency_key is None:
            return await self._create_untold(request, caller, names, first)
        async with self._creations.alone(caller.project, caller.idempotency_key):
            claim = await self._creations.claim(
                project=caller.project,
                key=caller.idempotency_key,
                body_digest=digest(request),
                sandbox_ids=(first,),
                timeout_s=caller.timeout_s,
            )
            if claim.completed:
                return await self._again(claim, caller)
            return await self._create_claimed(request, caller, names, claim)

    async def _create_untold(
        self, request: CreateRequest, caller: Caller, names: Sequence[str], first: SandboxId
    ) -> bytes:
        reasons: dict[str, errors.OpenDSecError] = {}
        for name in names:
            sandbox_id = first if name == names[0] else new_sandbox_id(name)
            told = False
            try:
                answer = await self._ask(request, caller, sandbox_id)
                told = True
                return answer
            except errors.OpenDSecError as exc:
                told = not outcome_unknown(exc)
                if not may_try_elsewhere(exc):
                    raise
                reasons[name] = exc
            finally:
                if not told:
                    await self._reclaimer.add(caller.project, [sandbox_id])
        raise refusal(reasons)

    async def _create_claimed(
        self, request: CreateRequest, caller: Caller, names: Sequence[str], claim: Claim
    ) -> bytes:
        start = edge_of(claim.sandbox_ids[0])
        reasons: dict[str, errors.OpenDSecError] = {}
        for name in (start, *(other for other in names if other != start)):
            if name != start:
                claim = await self._creations.move(claim, (new_sandbox_id(name),))
            try:
                answer = await self._ask(request, caller, claim.sandbox_ids[0])
            except errors.OpenDSecError as exc:
                if outcome_unknown(exc):
                    raise  # it may be running: the key keeps standing for it
                if isinstance(exc, errors.ConnectError):
                    # An earlier request with this key may have reached that edge before it went away.
                    await self._reclaimer.add(caller.project, claim.sandbox_ids)
                if not may_try_elsewhere(exc):
                    await self._creations.forget(claim)
                    raise
                reasons[name] = exc
                continue
            return await self._complete(claim, answer, caller)
        await self._creations.forget(claim)
        raise refusal(reasons)

    async def _complete(self, claim: Claim, answer: bytes, caller: Caller) -> bytes:
        if await self._creations.complete(claim):
            return answer
        # Another apiserver moved the key to another edge meanwhile: its sandbox counts, this one goes.
        await self._reclaimer.add(caller.project, claim.sandbox_ids)
        raise errors.ConflictError(
            "another request with this key is being carried out elsewhere",
            remedy="repeat the request in a moment",
            retryable=True,
        )

    async def _ask(self, request: CreateRequest, caller: Caller, sandbox_id: SandboxId) -> bytes:
        link = self._edges.of(sandbox_id)
        self._edges.placed(link.name, 1)
        _, answer = await link.call(
            "POST",
            "/v1/sandboxes",
            project=caller.project,
            body=codec.encode(replace(request, sandbox_id=sandbox_id)),
            request_id=caller.request_id,
            headers=caller.headers,
            repeatable=True,  # the id makes it so
        )
        return answer

    async def _again(self, claim: Claim, caller: Caller) -> bytes:
        sandbox_id = claim.sandbox_ids[0]
        try:
            _, answer = await self._edges.of(sandbox_id).call(
                "GET",
                f"/v1/sandboxes/{sandbox_id}",
                project=caller.project,
                request_id=caller.request_id,
                repeatable=True,
                sandbox_id=sandbox_id,
            )
        except errors.NotFoundError as exc:
            raise gone_again(sandbox_id) from exc
        return answer


def outcome_unknown(error: errors.OpenDSecError) -> bool:
    """Whether the sandbox may have been started although the edge did not say so."""
    return type(error) is errors.TransportError


def gone_again(sandbox_id: SandboxId) -> errors.SandboxExitedError:
    """A repeat for a sandbox that has ended so long ago that its edge forgot it: never started a second time."""
    return errors.SandboxExitedError(
        f"this key started {sandbox_id}, which has ended since",
        remedy="use a fresh key for a new sandbox",
        sandbox_id=sandbox_id,
    )
