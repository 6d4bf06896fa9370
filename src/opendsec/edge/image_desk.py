"""What an edge does with the images of its store: tells about them, shows and compares their trees, names them.

All of it reads directories and files, so it happens in a few threads of its own: creates never wait for a long listing,
and the event loop never waits at all. Trees are read from the layers, which are mounted as for a sandbox.
"""

from __future__ import annotations

import asyncio
import functools
import threading
import time
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from types import TracebackType
from typing import ParamSpec, Self, TypeVar

from opendsec.errors import NodeError, UnsupportedError
from opendsec.model.image import Image
from opendsec.model.image_view import ImageDetails, ImageSummary
from opendsec.store.catalogue import Catalogue
from opendsec.store.compose import to_look_at
from opendsec.store.diff import differences
from opendsec.store.images import ImageStore
from opendsec.store.loading.remote import RemoteStore
from opendsec.store.loading.sources import open_files
from opendsec.store.mounts import LayerMounts
from opendsec.store.start_cost import recorded_starts
from opendsec.store.tagging import Composition, compose_image, tag_image
from opendsec.store.tree_view import ComposedTree, LayerTree
from opendsec.wire import codec
from opendsec.wire.contracts import TagRequest

P = ParamSpec("P")
T = TypeVar("T")

THREADS = 4
BATCH_LINES = 1000
BATCH_S = 0.2
"""A batch of lines is sent when it is so old, even when it is small."""


class ImageDesk:
    """A context manager; leaving it waits for no listing: those that are read end at their next line."""

    def __init__(self, store: ImageStore | RemoteStore, layers: LayerMounts) -> None:
        self._store = store
        self._layers = layers
        files = store.files if isinstance(store, RemoteStore) else open_files(str(store.root))
        self._catalogue = Catalogue(store, start_cost=recorded_starts(files))
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="images")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def page(self, *, prefix: str, limit: int, after: str) -> tuple[tuple[ImageSummary, ...], str]:
        """See `Catalogue.page`."""
        return await self._run(self._catalogue.page, prefix=prefix, limit=limit, after=after)

    async def details(self, reference: str) -> ImageDetails:
        """See `Catalogue.details`."""
        return await self._run(self._catalogue.details, reference)

    async def tag(self, request: TagRequest) -> ImageSummary:
        """See `store.tagging.tag_image`."""
        await self._run(
            tag_image, self._writable(), request.name, request.image, config=request.config, replace=request.replace
        )
        return await self._run(self._catalogue.summary, request.name)

    async def compose(self, name: str, wanted: Composition, *, replace: bool) -> ImageSummary:
        """See `store.tagging.compose_image`."""
        await self._run(compose_image, self._writable(), name, wanted, replace=replace)
        return await self._run(self._catalogue.summary, name)

    async def remove(self, name: str, *, force: bool) -> ImageSummary:
        """Forget a name; what it meant. See `ImageStore.remove`."""
        store = self._writable()
        summary = await self._run(self._catalogue.summary, name)
        await self._run(store.remove, name, force=force)
        return summary

    def _writable(self) -> ImageStore:
        """Raises UnsupportedError for a remote store."""
        if isinstance(self._store, RemoteStore):
            raise UnsupportedError(
                f"names cannot be changed in {self._store.files.address}: this node only reads that store",
                remedy="change them in a directory and bring it there with `opendsec image sync`",
            )
        return self._store

    def tree(self, reference: str, path: str, *, depth: int | None) -> AsyncGenerator[bytes]:
        """Lines of TreeEntry. Raises ImageNotFoundError, NotFoundError, and what mounting a layer does."""

        def lines() -> Iterator[object]:
            tree = self._tree(reference)
            return map(tree.entry, tree.walk(tree.find(path), depth=depth))

        return self._streamed(lines)

    def diff(self, before: str, after: str, *, times: bool) -> AsyncGenerator[bytes]:
        """Lines of Difference."""
        return self._streamed(lambda: differences(self._tree(before), self._tree(after), times=times))

    def _tree(self, reference: str) -> ComposedTree:
        image: Image = to_look_at(self._store.get, reference)
        fds = self._layers.acquire(image)
        layers = zip(reversed(image.layers), fds, strict=True)
        return ComposedTree([LayerTree(digest=layer.digest, fd=fd) for layer, fd in layers])

    async def _streamed(self, begin: Callable[[], Iterable[object]]) -> AsyncGenerator[bytes]:
        """Values as lines, a batch at a time, no faster than they are taken. Closed, it reads no further."""
        turn = threading.Lock()  # a batch may still be read when this is closed
        lines = _lines(begin)
        try:
            while batch := await self._run(_next_batch, lines, turn):
                yield batch
        finally:
            with suppress(RuntimeError):  # the desk is closed: nobody reads on
                self._pool.submit(_close, lines, turn)

    async def _run(self, work: Callable[P, T], *args: P.args, **given: P.kwargs) -> T:
        call = functools.partial(work, *args, **given)
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, call)
        except OSError as error:
            raise NodeError(
                f"the image store cannot be read: {error.strerror or error}",
                detail={"path": str(error.filename or "")},
                remedy="try again; if it stays so, look after the store and what loads its layers",
                retryable=True,
            ) from error


def _lines(begin: Callable[[], Iterable[object]]) -> Generator[bytes]:
    for value in begin():
        yield codec.encode(value) + b"\n"


def _next_batch(lines: Iterator[bytes], turn: threading.Lock) -> bytes:
    """b"" at the end."""
    with turn:
        batch: list[bytes] = []
        since = time.monotonic()
        for line in lines:
            batch.append(line)
            if len(batch) >= BATCH_LINES or time.monotonic() - since > BATCH_S:
                break
        return b"".join(batch)


def _close(lines: Generator[bytes], turn: threading.Lock) -> None:
    with turn, closing(lines):
        pass
