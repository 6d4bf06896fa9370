"""The images of this machine's store, as a platform would answer for its own: what `opendsec image ls` and its like use
when no platform was named.

Reads the store itself, so it works without a platform, and beside one. Trees are read from layers that are mounted
nowhere: nothing is left of them when the command ends, however it ends.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager, contextmanager

from opendsec.host.image_group import of_host, open_store, state_directory
from opendsec.model.image_view import Difference, ImageDetails, ImageSummary, TreeEntry
from opendsec.store.catalogue import Catalogue
from opendsec.store.compose import to_look_at
from opendsec.store.diff import differences
from opendsec.store.images import ImageStore
from opendsec.store.loading.direct import DirectLoader
from opendsec.store.loading.sources import is_remote, open_files
from opendsec.store.mounts import check_mountable, open_erofs
from opendsec.store.start_cost import recorded_starts
from opendsec.store.tagging import Composition, compose_image, tag_image
from opendsec.store.tree_view import ComposedTree, LayerTree

PAGE = 1000


def unless_a_platform_is_named() -> Callable[[], AbstractAsyncContextManager[ImagesHere]] | None:
    """This machine's store, unless OPENDSEC_API_URL says which platform to ask, or the store is no directory: then only
    a platform can read it."""
    asks = os.environ.get("OPENDSEC_API_URL") or is_remote(os.environ.get("OPENDSEC_STORE", ""))
    return None if asks else images_here


@asynccontextmanager
async def images_here() -> AsyncIterator[ImagesHere]:
    """System calls that fail raise errors of ours: for who is not root, with what to do."""
    try:
        yield ImagesHere(open_store())
    except OSError as error:
        if isinstance(error, BrokenPipeError):
            raise
        raise of_host(error) from error


class ImagesHere:
    """See `opendsec.client._async.images.Images`: the same questions, the same answers."""

    def __init__(self, store: ImageStore) -> None:
        self._store = store
        self._catalogue = Catalogue(store, start_cost=recorded_starts(open_files(str(store.root))))

    async def list(self, *, prefix: str = "") -> AsyncIterator[ImageSummary]:
        """By name."""
        after = ""
        while True:
            page, after = self._catalogue.page(after=after, limit=PAGE, prefix=prefix)
            for summary in page:
                yield summary
            if not after:
                return

    async def inspect(self, image: str) -> ImageDetails:
        """All about one."""
        return self._catalogue.details(image)

    async def tree(self, image: str, path: str = "/", *, depth: int | None = None) -> AsyncIterator[TreeEntry]:
        """What a sandbox would see."""
        with self._opened(image) as tree:
            for node in tree.walk(tree.find(path), depth=depth):
                yield tree.entry(node)

    async def diff(self, before: str, after: str, *, times: bool = True) -> AsyncIterator[Difference]:
        """What differs."""
        with self._opened(before) as old, self._opened(after) as new:
            for one in differences(old, new, times=times):
                yield one

    async def tag(self, name: str, image: str, *, replace: bool = False) -> ImageSummary:
        """Another name."""
        tag_image(self._store, name, image, replace=replace)
        return self._catalogue.summary(name)

    async def compose(
        self,
        name: str,
        base: str,
        *,
        workspace: str | None = None,
        toolkits: Sequence[str] | None = None,
        pin: bool = False,
        replace: bool = False,
    ) -> ImageSummary:
        """An image of references."""
        chosen = None if toolkits is None else tuple(toolkits)
        wanted = Composition(base=base, workspace=workspace or "", toolkits=chosen, pin=pin)
        compose_image(self._store, name, wanted, replace=replace)
        return self._catalogue.summary(name)

    async def remove(self, name: str, *, force: bool = False) -> ImageSummary:
        """Forget a name."""
        summary = self._catalogue.summary(name)
        self._store.remove(name, force=force)
        return summary

    @contextmanager
    def _opened(self, reference: str) -> Iterator[ComposedTree]:
        image = to_look_at(self._store.get, reference)
        check_mountable(image)
        loader = DirectLoader(self._store, state_directory() / "cache" / "metadata")
        with ExitStack() as stack:
            trees = []
            for layer in reversed(image.layers):
                files = loader.attach(layer)
                fd = open_erofs(files.meta, data=files.data)
                stack.callback(os.close, fd)
                trees.append(LayerTree(digest=layer.digest, fd=fd))
            yield ComposedTree(trees)
