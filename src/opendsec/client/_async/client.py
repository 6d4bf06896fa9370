"""The client: one platform, one key, one pool of connections. Everything else is reached from here."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from opendsec.client._async.batch import batch_items
from opendsec.client._async.connection import Lane
from opendsec.client._async.fncalls import Outcome, call_outcomes
from opendsec.client._async.images import Images
from opendsec.client._async.keys import Keys
from opendsec.client._async.sandbox import Sandbox
from opendsec.client._async.snapshots import Snapshots
from opendsec.client._async.transport import Transport, target
from opendsec.client.concurrency import async_interruption, async_last_words
from opendsec.client.fncall_args import DSecFnCallArgs, longest_s
from opendsec.client.kinds import check_class, is_number, must
from opendsec.client.run_args import DSecContainerRunArgs, DSecFullVMRunArgs, DSecMicroVMRunArgs, DSecRunArgs
from opendsec.client.settings import find_endpoint
from opendsec.errors import InvalidSpecError, OpenDSecError, SandboxExitedError
from opendsec.model.fncall import FnCallResult
from opendsec.model.ids import edge_of
from opendsec.model.node import SandboxState, SandboxStatus
from opendsec.model.spec import MAX_BATCH, check_seconds
from opendsec.wire import contracts
from opendsec.wire.contracts import AbandonRequest, BatchRequest, CreateRequest, Empty, SandboxPage

DEFAULT_TIMEOUT_S = 60.0
BATCH_TIMEOUT_S = 3600.0
RECLAIMED_REPEATS = 3
TAKE_BACK_S = 5.0
MIN_TIMEOUT_S = 0.001
"""The shortest the platform takes."""


@dataclass(frozen=True, slots=True)
class Started:
    """One sandbox of `run_many` is ready."""

    index: int
    """0 … count-1."""
    sandbox: Sandbox


@dataclass(frozen=True, slots=True)
class Failed:
    """One sandbox of `run_many` could not be started; nothing of it is left."""

    index: int
    error: OpenDSecError


class DSecClient:
    """A client of one OpenDSec platform.

    `api_url`: `http://…`, `https://…` or `unix:/path`; None: OPENDSEC_API_URL, else the platform `opendsec up` runs
    here.
    `api_key`: None: OPENDSEC_API_KEY, else the local platform's key.
    `timeout`: seconds for each call that names none, repeats included; for streams, the longest silence.
    `max_connections`: at once; None: 4096, or what the process's descriptor limit allows.

    One client belongs to one event loop. Use it as `async with DSecClient() as client`, or `open` and `close` it.
    Raises ConnectError when no platform is known, InvalidSpecError for a bad address.
    """

    def __init__(
        self,
        api_url: str | None = None,
        api_key: str | None = None,
        *,
        timeout: float = DEFAULT_TIMEOUT_S,
        max_connections: int | None = None,
    ) -> None:
        check_seconds(timeout, "timeout")
        endpoint = find_endpoint(api_url, api_key)
        self._transport = Transport(endpoint, timeout_s=timeout, max_connections=max_connections)
        self.images = Images(self._transport)
        """The images of the platform."""
        self.keys = Keys(self._transport)
        """API keys and projects, for admins."""
        self.snapshots = Snapshots(self._transport)
        """The snapshots of your project."""

    def __repr__(self) -> str:
        return f"DSecClient({self.api_url!r})"

    @property
    def api_url(self) -> str:
        """Where the platform is."""
        return self._transport.endpoint.url

    async def open(self) -> Self:
        """Check that the platform answers; returns the client itself. Raises ConnectError at once when nothing
        listens."""
        deadline = self._transport.deadline(None)
        body = await self._transport.open("GET", "/healthz", deadline=deadline)
        await body.read_all(contracts.MAX_JSON_BODY, deadline=deadline)
        return self

    async def close(self) -> None:
        """Close all connections. Sandboxes and commands go on."""
        await self._transport.aclose()

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def run_container(
        self,
        args: DSecContainerRunArgs,
        *,
        timeout: float | None = None,
        idempotency_key: str | None = None,
    ) -> Sandbox:
        """Start a sandbox and return it when it is ready for commands. It lives until it is stopped or a TTL passes.

        `timeout`: seconds for all of it; the platform gives up at the same time, and leaves nothing.
        `idempotency_key`: calls with one key and the same arguments start one sandbox, also from several processes.
        When the calling task is cancelled, a sandbox that was being started is ended, unless the key is yours.

        Raises InvalidSpecError or UnsupportedError naming the field, ImageNotFoundError, CapacityError, StartError,
        ConflictError (same key, other arguments), DeadlineError, TransportError.
        """
        check_class(args, DSecContainerRunArgs)
        return await self.run(args, timeout=timeout, idempotency_key=idempotency_key)

    async def run_microvm(
        self,
        args: DSecMicroVMRunArgs,
        *,
        timeout: float | None = None,
        idempotency_key: str | None = None,
    ) -> Sandbox:
        """As `run_container`, with a kernel of its own below the sandbox; from an image, or from a snapshot.

        Raises what `run_container` raises; BackendUnavailableError when no node of the platform runs microVMs,
        SnapshotInvalidError when no node can read the snapshot.
        """
        check_class(args, DSecMicroVMRunArgs)
        return await self.run(args, timeout=timeout, idempotency_key=idempotency_key)

    async def run_fullvm(
        self,
        args: DSecFullVMRunArgs,
        *,
        timeout: float | None = None,
        idempotency_key: str | None = None,
    ) -> Sandbox:
        """As `run_container`, for a machine with a screen that starts whatever its disk holds.

        Raises as `run_microvm`.
        """
        check_class(args, DSecFullVMRunArgs)
        return await self.run(args, timeout=timeout, idempotency_key=idempotency_key)

    async def run(
        self, args: DSecRunArgs, *, timeout: float | None = None, idempotency_key: str | None = None
    ) -> Sandbox:
        """Start a sandbox of whatever kind the arguments are for; as `run_container`, `run_microvm`, `run_fullvm`."""
        check_seconds(timeout, "timeout")
        request = CreateRequest(spec=args.to_spec())
        deadline = self._transport.deadline(timeout)
        attempt = 0
        while True:
            key = _own_key() if idempotency_key is None else idempotency_key
            left_s = max(MIN_TIMEOUT_S, deadline - time.monotonic())
            try:
                return await self._create(request, key, create_timeout_s=left_s, timeout_s=left_s)
            except SandboxExitedError:
                # A server that died while it answered left a sandbox nobody had been told of: it was ended, and the
                # repeat learns so. Nobody else can mean that sandbox under a key of our own: ask for another one.
                if idempotency_key is not None or attempt >= RECLAIMED_REPEATS or time.monotonic() >= deadline:
                    raise
            except async_interruption():
                if idempotency_key is None:
                    await self._take_back(request, key)
                raise
            await self._transport.pause_before_repeat(attempt)
            attempt += 1

    @asynccontextmanager
    async def sandbox(
        self, args: DSecRunArgs, *, timeout: float | None = None, idempotency_key: str | None = None
    ) -> AsyncIterator[Sandbox]:
        """Like `run`, for a block: the sandbox is stopped when the block is left, whatever happened in it."""
        sandbox = await self.run(args, timeout=timeout, idempotency_key=idempotency_key)
        async with sandbox.stopping():
            yield sandbox

    @asynccontextmanager
    async def container(
        self,
        args: DSecContainerRunArgs,
        *,
        timeout: float | None = None,
        idempotency_key: str | None = None,
    ) -> AsyncIterator[Sandbox]:
        """Like `run_container`, for a block: the sandbox is stopped when the block is left, whatever happened in it.

        Example: `async with client.container(DSecContainerRunArgs(container_image="debian")) as sandbox: ...`
        """
        check_class(args, DSecContainerRunArgs)
        async with self.sandbox(args, timeout=timeout, idempotency_key=idempotency_key) as sandbox:
            yield sandbox

    @asynccontextmanager
    async def microvm(
        self,
        args: DSecMicroVMRunArgs,
        *,
        timeout: float | None = None,
        idempotency_key: str | None = None,
    ) -> AsyncIterator[Sandbox]:
        """Like `run_microvm`, for a block, as `container`."""
        check_class(args, DSecMicroVMRunArgs)
        async with self.sandbox(args, timeout=timeout, idempotency_key=idempotency_key) as sandbox:
            yield sandbox

    @asynccontextmanager
    async def fullvm(
        self,
        args: DSecFullVMRunArgs,
        *,
        timeout: float | None = None,
        idempotency_key: str | None = None,
    ) -> AsyncIterator[Sandbox]:
        """Like `run_fullvm`, for a block, as `container`."""
        check_class(args, DSecFullVMRunArgs)
        async with self.sandbox(args, timeout=timeout, idempotency_key=idempotency_key) as sandbox:
            yield sandbox

    async def run_many(
        self,
        args: DSecRunArgs,
        count: int,
        *,
        timeout: float | None = None,
        idempotency_key: str | None = None,
    ) -> AsyncGenerator[Started | Failed, None]:
        """Start `count` sandboxes of any kind in one request; yields Started or Failed once for each, as they become
        ready, in any order.

        `timeout`: seconds for all of them, default one hour. Raises what `run_container` raises when the whole
        request fails. Whoever stops iterating early, or gets such an error, keeps what was yielded; the rest is ended,
        unless the key is yours: then all stay, and the same call tells about them again. Close the iterator
        (`contextlib.aclosing`) to have that done at once and not when it is collected.
        """
        must(is_number(count, int), "count", "a whole number")
        if not 1 <= count <= MAX_BATCH:
            raise InvalidSpecError(f"count: {count} is not between 1 and {MAX_BATCH}", detail={"field": "count"})
        check_seconds(timeout, "timeout")
        seconds = BATCH_TIMEOUT_S if timeout is None else timeout
        request = BatchRequest(spec=args.to_spec(), count=count)
        key = _own_key() if idempotency_key is None else idempotency_key
        items = batch_items(self._transport, request, _create_headers(key, seconds), time.monotonic() + seconds)
        told: set[int] = set()
        try:
            async with aclosing(items):
                async for index, outcome in items:
                    told.add(index)
                    if isinstance(outcome, OpenDSecError):
                        yield Failed(index, outcome)
                    else:
                        yield Started(index, Sandbox(self._transport, outcome.sandbox_id))
        finally:
            if idempotency_key is None and len(told) < count:
                await self._abandon(key, told)

    async def fncall(self, args: DSecFnCallArgs, *, timeout: float | None = None) -> FnCallResult:
        """Carry out one short call in a warm container and return how it went, whatever the program did.

        `timeout`: seconds for all of it, waiting included; None: what its limits allow and a minute. A call leaves
        nothing behind; after a lost connection it is asked for again, so its program may run twice.

        Raises InvalidSpecError or UnsupportedError naming the field (a language or GPU the platform does not have),
        ImageNotFoundError, NotFoundError (the artifact), CapacityError, DeadlineError, NodeError, TransportError.
        """
        check_seconds(timeout, "timeout")
        spec = args.to_spec()
        seconds = longest_s(spec) if timeout is None else timeout
        return await self._transport.call(
            "POST",
            target("fncalls"),
            FnCallResult,
            value=spec,
            headers={contracts.HEADER_TIMEOUT: f"{max(MIN_TIMEOUT_S, seconds):.3f}"},
            timeout_s=seconds,
            lane=Lane.LONG,
        )

    async def fncall_many(
        self, calls: Iterable[DSecFnCallArgs], *, timeout: float | None = None
    ) -> AsyncGenerator[Outcome, None]:
        """Carry out many calls, thousands to a request; yields `(index, FnCallResult or error)` once for each, as they
        end, in any order. A call that is wrong fails alone.

        `timeout`: seconds for all of them, default one hour. Raises what `fncall` raises when a whole request fails.
        Whoever stops iterating early ends what runs and begins no more: close the iterator (`contextlib.aclosing`) to
        have that done at once. Reading slowly slows the calls down.
        """
        check_seconds(timeout, "timeout")
        deadline = time.monotonic() + (BATCH_TIMEOUT_S if timeout is None else timeout)
        async with aclosing(call_outcomes(self._transport, calls, deadline)) as outcomes:
            async for outcome in outcomes:
                yield outcome

    async def connect(self, sandbox_id: str) -> Sandbox:
        """A sandbox started earlier, by anybody of your project. Raises InvalidSpecError, NotFoundError."""
        edge_of(sandbox_id)
        sandbox = Sandbox(self._transport, sandbox_id)
        await sandbox.status()
        return sandbox

    async def list(
        self,
        *,
        labels: Mapping[str, str] | None = None,
        state: SandboxState | str | None = None,
        page_size: int = 200,
        usage: bool = False,
    ) -> AsyncIterator[SandboxStatus]:
        """All sandboxes of your project with all these labels and in this state, page by page.

        `usage`: with `memory_bytes`, what each uses now; it costs the platform some reads for each.
        """
        if state is not None and state not in set(SandboxState):
            raise InvalidSpecError(f"state: {state!r} is not of {', '.join(SandboxState)}", detail={"field": "state"})
        wanted = ("" if state is None else f"&state={state}") + ("&usage=true" if usage else "")
        pairs = [
            target("x", query={"label": f"{key}={value}"}).partition("?")[2] for key, value in (labels or {}).items()
        ]
        cursor = ""
        while True:
            query = "&".join(
                [*pairs, target("x", query={"limit": page_size, "cursor": cursor or None}).partition("?")[2]]
            )
            page = await self._transport.call("GET", f"{target('sandboxes')}?{query}{wanted}", SandboxPage)
            for status in page.items:
                yield status
            cursor = page.cursor
            if not cursor:
                return

    async def stop(self, sandbox_id: str, *, timeout: float | None = None) -> SandboxStatus:
        """Stop a sandbox by its id. May be repeated, in every state."""
        edge_of(sandbox_id)
        return await Sandbox(self._transport, sandbox_id).stop(timeout=timeout)

    async def _create(self, request: CreateRequest, key: str, *, create_timeout_s: float, timeout_s: float) -> Sandbox:
        headers = _create_headers(key, create_timeout_s)
        status = await self._transport.call(
            "POST", target("sandboxes"), SandboxStatus, value=request, headers=headers, timeout_s=timeout_s
        )
        return Sandbox(self._transport, status.sandbox_id)

    async def _take_back(self, request: CreateRequest, key: str) -> None:
        """The caller gave up: asked again with hardly any time, the platform removes what it is starting under this
        key, or names what it has started."""
        async with async_last_words(TAKE_BACK_S):
            try:
                sandbox = await self._create(request, key, create_timeout_s=MIN_TIMEOUT_S, timeout_s=TAKE_BACK_S)
                await sandbox.stop(timeout=TAKE_BACK_S)
            except OpenDSecError:
                return

    async def _abandon(self, key: str, keep: set[int]) -> None:
        """The rest of a batch of our own is not wanted."""
        request = AbandonRequest(keep=tuple(sorted(keep)))
        headers = {contracts.HEADER_IDEMPOTENCY: key}
        async with async_last_words(TAKE_BACK_S):
            try:
                where = target("sandbox-batches", "abandon")
                await self._transport.call("POST", where, Empty, value=request, headers=headers, timeout_s=TAKE_BACK_S)
            except OpenDSecError:  # the platform is away, or has never heard of it
                return


def _own_key() -> str:
    return f"{contracts.OWN_KEY_PREFIX}{secrets.token_hex(16)}"


def _create_headers(key: str, timeout_s: float) -> dict[str, str]:
    if not key or len(key) > 255 or not key.isascii() or not key.isprintable():
        raise InvalidSpecError(
            "idempotency_key: is not 1 to 255 printable ASCII characters", detail={"field": "idempotency_key"}
        )
    return {contracts.HEADER_IDEMPOTENCY: key, contracts.HEADER_TIMEOUT: f"{timeout_s:.3f}"}
