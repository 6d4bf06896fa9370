"""Packing what a sandbox has written into an image, while the sandbox goes on.

    turn → stand still (backend) → walk and write the layer (a thread) → go on → hash, sync, publish (the same thread)

The sandbox stands still only while its files are read. Packs of one sandbox come one after the other, and few at once
on a node, because each keeps a core busy. A pack belongs to the node, not to the request that asked for it: a client
that leaves changes nothing, and the same request with the same idempotency key follows it or hears its result again.

A sandbox that ends while it is packed ends the pack: nothing is published then. An edge that dies leaves a directory in
the store's staging area, which the next process that opens the store removes, and a sandbox that stands still, which
the next edge lets go on.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace

from opendsec import errors
from opendsec.backends.base import Capability, Changes, DiskChanges, Handle
from opendsec.edge import lifecycle
from opendsec.edge.long_work import KnownWork, LongWork, Words
from opendsec.edge.sandbox import Sandbox
from opendsec.model.ids import check_image_name
from opendsec.model.image import Image, ImageConfig, Layer, LayerRole
from opendsec.model.node import SandboxState
from opendsec.store.below import Below
from opendsec.store.compose import pinned, split_reference
from opendsec.store.disk_changes import pack_change
from opendsec.store.images import ImageStore, StagedLayer
from opendsec.store.packing import Selection, homes_in, on_top, pack_layer, select
from opendsec.store.progress import Progress
from opendsec.store.scrub import Scrub, check_patterns
from opendsec.wire.contracts import PackEvent, PackRequest, PackResult

AT_ONCE = 2
WORDS = Words(noun="pack", done="packed")


class Pack(LongWork[PackResult, PackEvent]):
    """One pack: where it stands, and how it ended."""

    def __init__(self, sandbox: Sandbox, request: PackRequest) -> None:
        super().__init__(sandbox, WORDS, PackEvent)
        self.request = request
        self.given_up = False

    @property
    def wanted(self) -> bool:
        """Whether it may go on. Asked from its thread, too."""
        return not self.given_up and self.sandbox.life.end_reason is None

    def tell(self, progress: Progress) -> None:
        """From its thread. Raises GivenUpError when there is nothing to go on for."""
        super().tell(progress)
        if not self.wanted:
            raise GivenUpError


class GivenUpError(Exception):
    """The sandbox ends, or the edge: nothing is to be published."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Made:
    """What the thread has made."""

    image: str
    name: str
    digest: str
    changed: bool
    selection: Selection | None
    """None: of a disk, in which nobody looks for files."""
    layer: str = ""
    layer_bytes: int = 0
    crash_consistent: bool = False


class Packing:
    """All packs of one edge. `store` is where images go."""

    def __init__(self, store: ImageStore, *, at_once: int = AT_ONCE) -> None:
        self._store = store
        self._at_once = asyncio.Semaphore(at_once)
        self._threads = ThreadPoolExecutor(at_once, thread_name_prefix="packs")
        self._known: KnownWork[Pack] = KnownWork(WORDS.noun)

    def begin(self, sandbox: Sandbox, request: PackRequest, *, key: str | None) -> Pack:
        """Start a pack, or find the one of this key. Raises InvalidSpecError, and ConflictError when it was another."""
        check_request(request)
        if sandbox.image_config.machine is not None:
            check_disk_request(request)
        place = self._known.place(sandbox, key)
        known = self._known.find(place, request)
        if known is not None:
            return known
        pack = Pack(sandbox, request)
        self._known.keep(place, pack)
        sandbox.spawn(self._run(pack, place), "pack")
        return pack

    async def _run(self, pack: Pack, place: tuple[str, str]) -> None:
        try:
            await pack.settle(self._in_turn(pack))
        finally:
            if pack.result is None:
                self._known.forget(place)

    async def _in_turn(self, pack: Pack) -> PackResult:
        async with pack.sandbox.turn, self._at_once, pack.sandbox.saving(Capability.PACK) as handle:
            return await self._packed(pack, handle)

    async def _packed(self, pack: Pack, handle: Handle) -> PackResult:
        began = time.monotonic()
        image = _source(pack.sandbox)
        paused = pack.sandbox.state is SandboxState.PAUSED
        try:
            made, frozen_s = await self._while_still(pack, handle, image)
        except GivenUpError:
            lifecycle.refuse_unless_running(pack.sandbox.life)
            raise errors.NodeError("the pack was given up; nothing was published", retryable=True) from None
        now = time.monotonic()
        return _result(made, frozen_s=0.0 if paused else frozen_s, duration_s=now - began)

    async def _while_still(self, pack: Pack, handle: Handle, image: Image) -> tuple[_Made, float]:
        """What was made, and for how long the sandbox stood still."""
        loop = asyncio.get_running_loop()
        read = asyncio.Event()
        async with AsyncExitStack() as still:
            began = time.monotonic()
            changes = await still.enter_async_context(pack.sandbox.backend.changes(handle, image=image))

            def on_read() -> None:
                loop.call_soon_threadsafe(read.set)

            making = loop.run_in_executor(self._threads, self._make, pack, changes, image, on_read)
            making.add_done_callback(lambda _: read.set())
            try:
                await read.wait()
                await still.aclose()
                frozen_s = time.monotonic() - began
                return await asyncio.shield(making), frozen_s
            finally:
                pack.given_up = True
                await still.aclose()
                await asyncio.wait({making})  # it has ended, or gives up within moments

    def _make(self, pack: Pack, changes: Changes | DiskChanges, image: Image, on_read: Callable[[], None]) -> _Made:
        """In a thread."""
        if isinstance(changes, DiskChanges):
            return self._make_of_disk(pack, changes, image, on_read)
        request = pack.request
        below = Below(changes.lower)
        env = (image.config.env, pack.sandbox.spec.env)
        homes = homes_in(changes.tree, below, more=[one["HOME"] for one in env if "HOME" in one])
        scrub = Scrub(scrub=request.scrub, keep=request.keep, defaults=request.defaults, homes=homes)
        looking = Progress(phase="looking at what has changed")
        selection = select(changes.tree, scrub, below, on_look=lambda: pack.tell(looking))
        if not selection.changed:
            on_read()
            return self._unchanged(pack, image, selection)
        with self._store.staging() as work:
            layer = pack_layer(
                self._store,
                work,
                changes.tree,
                selection,
                role=request.role,
                on_progress=pack.tell,
                on_read=on_read,
            )
            whole: Sequence[Layer | StagedLayer] = [layer]
            if not request.alone:
                whole = on_top(self._store, work, image, changes.lower, layer, on_progress=pack.tell)
            return self._published(pack, whole, layer.layer, image.config, selection=selection)

    def _make_of_disk(self, pack: Pack, changes: DiskChanges, image: Image, on_read: Callable[[], None]) -> _Made:
        """In a thread."""
        machine = image.config.machine
        assert machine is not None
        with self._store.staging() as work:
            packed = pack_change(self._store, work, changes.written, on_progress=pack.tell, on_read=on_read)
            if packed is None:
                return self._unchanged(pack, image, None)
            config = replace(image.config, machine=replace(machine, virtual_bytes=changes.written.size_bytes))
            made = self._published(pack, packed.chain, packed.layer, config, selection=None)
        return replace(made, crash_consistent=not changes.whole)

    def _published(
        self,
        pack: Pack,
        whole: Sequence[Layer | StagedLayer],
        layer: Layer,
        config: ImageConfig,
        *,
        selection: Selection | None,
    ) -> _Made:
        """`layer`: what was packed, among `whole`."""
        pack.tell(Progress(phase="publishing"))
        request = pack.request
        source = _source_text(pack.sandbox)
        made = self._store.publish(request.name, layers=whole, config=config, source=source, replace=request.replace)
        return _Made(
            image=pinned(made),
            name=made.name,
            digest=made.digest,
            changed=True,
            selection=selection,
            layer=layer.digest,
            layer_bytes=layer.size_bytes,
        )

    def _unchanged(self, pack: Pack, image: Image, selection: Selection | None) -> _Made:
        """The source image itself; a composition has no reference of its own, so it gets the name."""
        request, parts = pack.request, pack.sandbox.image_parts
        if request.alone:
            raise errors.ConflictError(
                "nothing has changed in the sandbox: there is no layer to make an image of",
                detail={"left_out": selection.left_out if selection is not None else 0},
            )
        if len(parts) == 1 and parts[0].digest == image.digest:
            return _Made(
                image=parts[0].pinned, name=parts[0].name, digest=image.digest, changed=False, selection=selection
            )
        made = self._store.publish(
            request.name,
            layers=image.layers,
            config=image.config,
            source=_source_text(pack.sandbox),
            replace=request.replace,
        )
        return _Made(image=pinned(made), name=made.name, digest=made.digest, changed=False, selection=selection)


def check_request(request: PackRequest) -> None:
    """Raises InvalidSpecError naming the field."""
    check_image_name(request.name, field="name")
    if split_reference(request.name)[1]:
        raise errors.InvalidSpecError(f"name: {request.name!r} ends as a digest does", detail={"field": "name"})
    if request.role is LayerRole.DISK:
        raise errors.InvalidSpecError("role: what is packed is files, and no disk", detail={"field": "role"})
    check_patterns(request.scrub, "scrub")
    check_patterns(request.keep, "keep")


def check_disk_request(request: PackRequest) -> None:
    """Raises InvalidSpecError naming the field that a disk cannot be packed with: it is another operating system's,
    and nobody here looks into it."""
    given = {
        "scrub": (bool(request.scrub), "nobody looks for files in the disk of a full VM, so none are left out"),
        "keep": (bool(request.keep), "nobody looks for files in the disk of a full VM, so all are kept"),
        "alone": (request.alone, "what a full VM has written is of no use without the disk below it"),
        "role": (request.role in (LayerRole.BASE, LayerRole.TOOLKIT), "what a full VM has written becomes a disk"),
    }
    for name, (is_given, why) in given.items():
        if is_given:
            raise errors.InvalidSpecError(f"{name}: {why}", detail={"field": name}, remedy="leave it out")


def _source(sandbox: Sandbox) -> Image:
    """What it was started from, as its journal says."""
    if not sandbox.image_layers and not sandbox.image_parts:
        raise errors.UnsupportedError(
            "the sandbox was started by an earlier version, which did not write down its layers",
            remedy="start another one of the same image, and pack that",
        )
    return Image(
        name=sandbox.spec.image,
        digest=sandbox.image_digest,
        layers=sandbox.image_layers,
        config=sandbox.image_config,
        created_at=sandbox.created_at,
    )


def _source_text(sandbox: Sandbox) -> str:
    return f"pack of {sandbox.sandbox_id}, from {sandbox.spec.image}"


def _result(made: _Made, *, frozen_s: float, duration_s: float) -> PackResult:
    selection = made.selection
    result = PackResult(
        image=made.image,
        name=made.name,
        digest=made.digest,
        changed=made.changed,
        layer=made.layer,
        layer_bytes=made.layer_bytes,
        crash_consistent=made.crash_consistent,
        frozen_ms=round(frozen_s * 1000, 3),
        duration_s=round(duration_s, 4),
    )
    if selection is None:
        return result
    return replace(
        result,
        files=selection.files if made.changed else 0,
        bytes=selection.facts.size_bytes if made.changed else 0,
        left_out=selection.left_out,
        left_out_paths=selection.left_out_paths,
        fell_back=selection.fell_back,
        fell_back_paths=selection.fell_back_paths,
    )
