"""What a store tells about its images: pages of summaries, and all about one.

What was read of a directory is kept in memory: manifests never change, and a name is read again only when its tag was
replaced. So asking again costs one listing of the tags, however many images there are. A remote store is asked for just
what a page or an image needs, so what other images share with it is not known. Threads may share one.

An image that is damaged, or refers to what is missing, is told with its problem; it hides no other.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Protocol

from opendsec.errors import ImageError, ImageNotFoundError, OpenDSecError
from opendsec.model.image import Image, ImageConfig, Layer
from opendsec.model.image_view import MAX_USED_BY, ImageDetails, ImageSummary, StartCost, StartLayer
from opendsec.store.compose import MAX_DEPTH, split_reference, to_look_at
from opendsec.store.images import ImageStore

REMOTE_AT_ONCE = 16
"""Images of a remote store that are read at once for a page."""

StartCostOf = Callable[[Image], StartCost | None]
"""What a start of a composition reads, when one was recorded."""


def never_recorded(_image: Image) -> StartCost | None:
    """No start was."""
    return None


class Remote(Protocol):
    """A store that can only be read, name by name (`store.loading.remote`)."""

    def get(self, name: str) -> Image:
        """As `ImageStore.get`."""

    def names(self) -> list[str]:
        """As `ImageStore.names`."""


class Catalogue:
    """One store, as it is told about."""

    def __init__(self, store: ImageStore | Remote, *, start_cost: StartCostOf = never_recorded) -> None:
        self._store = store
        self._start_cost = start_cost
        self._lock = threading.Lock()
        self._stamps: dict[str, tuple[int, int]] = {}
        self._images: dict[str, Image] = {}
        self._problems: dict[str, str] = {}
        """Why what a name means cannot be read."""
        self._pinned: dict[str, Image] = {}
        """Images that are named with their digest, under such references."""
        self._users: Counter[str] | None = None
        """For each layer, how many images are started with it; None: to be counted anew."""

    def page(self, *, after: str = "", limit: int, prefix: str = "") -> tuple[tuple[ImageSummary, ...], str]:
        """Summaries of up to `limit` images, by name, from the first behind `after`; and what to give as `after` for
        the next page, "" when there is none."""
        if not isinstance(self._store, ImageStore):
            return self._remote_page(self._store, after=after, limit=limit, prefix=prefix)
        with self._lock:
            images, users = self._refreshed(self._store)
            names = sorted(name for name in images if name > after and name.startswith(prefix))
            summaries = tuple(_summary(images[name], users, self._problems.get(name, "")) for name in names[:limit])
        return summaries, names[limit - 1] if len(names) > limit else ""

    def _remote_page(
        self, store: Remote, *, after: str, limit: int, prefix: str
    ) -> tuple[tuple[ImageSummary, ...], str]:
        names = [name for name in store.names() if name > after and name.startswith(prefix)]
        with ThreadPoolExecutor(REMOTE_AT_ONCE) as pool:
            found = pool.map(lambda name: _looked_at(store, name), names[:limit])
            summaries = tuple(_summary(one[0], None, one[1]) for one in found if one is not None)
        return summaries, names[limit - 1] if len(names) > limit else ""

    def summary(self, name: str) -> ImageSummary:
        """What a page tells of one name. ImageNotFoundError."""
        if not isinstance(self._store, ImageStore):
            return _summary(self._store.get(name), None, "")
        with self._lock:
            images, users = self._refreshed(self._store)
            if name in images:
                return _summary(images[name], users, self._problems.get(name, ""))
        raise ImageNotFoundError(f"no image {name!r} in the store", detail={"image": name})

    def details(self, reference: str) -> ImageDetails:
        """All about the image a name, or `name@sha256:…`, means. ImageNotFoundError, ImageInvalidError."""
        image = self._store.get(reference)
        users: Counter[str] | None = None
        used_by: list[str] = []
        if isinstance(self._store, ImageStore):
            with self._lock:
                images, users = self._refreshed(self._store)
                used_by = sorted(name for name, one in images.items() if _names(one, image))
        details = ImageDetails(
            name=split_reference(image.name)[0],
            digest=image.digest,
            created_at=image.created_at,
            source=image.source,
            config=image.config,
            layers=image.layers,
            base=image.base,
            toolkits=image.toolkits,
            size_bytes=size_of(image.layers),
            used_by=tuple(used_by[:MAX_USED_BY]),
            used_by_count=None if users is None else len(used_by),
        )
        try:
            whole = to_look_at(self._store.get, reference)
        except OpenDSecError as error:
            return replace(details, problem=str(error))
        return _with_start(details, whole, users, self._start_cost(whole))

    def _refreshed(self, store: ImageStore) -> tuple[dict[str, Image], Counter[str]]:
        """All images as they are now. The lock is held."""
        stamps = store.stamps()
        stale = [name for name, stamp in stamps.items() if self._stamps.get(name) != stamp]
        gone = self._stamps.keys() - stamps.keys()
        for name in (*stale, *gone):
            self._images.pop(name, None)
            self._problems.pop(name, None)
        for name in stale:
            self._look_at(name)
        self._stamps = stamps
        if stale or gone or self._users is None:
            self._users = Counter(digest for one in self._images.values() for digest in self._started_with(one))
        return self._images, self._users

    def _look_at(self, name: str) -> None:
        found = _looked_at(self._store, name)
        if found is not None:
            self._images[name], problem = found
            if problem:
                self._problems[name] = problem

    def _started_with(self, image: Image) -> set[str]:
        """Digests of the layers an image is started with, as far as what it refers to is there."""
        found = {layer.digest for layer in image.layers}
        below = [one for one in map(self._known, image.toolkits) if one is not None]
        base = self._known(image.base)
        while base is not None and len(below) < MAX_DEPTH + len(image.toolkits):
            below.append(base)
            base = self._known(base.base)
        found.update(layer.digest for one in below for layer in one.layers)
        return found

    def _known(self, reference: str) -> Image | None:
        """The image of a reference, if there is one."""
        name, digest = split_reference(reference)
        image = self._images.get(name)
        if not digest or (image is not None and image.digest == digest):
            return image
        if reference not in self._pinned:
            try:
                self._pinned[reference] = self._store.get(reference)
            except ImageError:
                return None
        return self._pinned[reference]


def size_of(layers: Sequence[Layer]) -> int:
    """Bytes of all their files."""
    return sum(layer.size_bytes for layer in layers)


def size_of_metadata(layers: Sequence[Layer]) -> int:
    """Bytes a node copies before it starts anything: metadata, and layers of one file whole."""
    return sum(layer.mounted.size_bytes for layer in layers)


def _names(one: Image, other: Image) -> bool:
    """Whether an image refers to the other, by name alone or with its digest."""
    wanted = split_reference(other.name)[0]
    references = (split_reference(reference) for reference in (one.base, *one.toolkits) if reference)
    return any(name == wanted and digest in ("", other.digest) for name, digest in references)


def _looked_at(store: ImageStore | Remote, name: str) -> tuple[Image, str] | None:
    """The image of a name and what is wrong with it; None when the name was removed just now."""
    try:
        return store.get(name), ""
    except ImageNotFoundError:
        return None
    except ImageError as error:
        return Image(name=name, digest="", layers=(), config=ImageConfig(), created_at=0.0), error.message


def _shared(layers: Sequence[Layer], users: Counter[str] | None) -> int | None:
    """Bytes of the layers that more than one image is started with."""
    return None if users is None else size_of([layer for layer in layers if users[layer.digest] > 1])


def _summary(image: Image, users: Counter[str] | None, problem: str) -> ImageSummary:
    return ImageSummary(
        name=image.name,
        digest=image.digest,
        created_at=image.created_at,
        source=image.source,
        roles=tuple(dict.fromkeys(layer.role for layer in image.layers)),
        layer_count=len(image.layers),
        size_bytes=size_of(image.layers),
        shared_bytes=_shared(image.layers, users),
        base=image.base,
        toolkits=image.toolkits,
        problem=problem,
    )


def _with_start(
    details: ImageDetails, whole: Image, users: Counter[str] | None, cost: StartCost | None
) -> ImageDetails:
    return replace(
        details,
        config=whole.config,
        start_digest=whole.digest,
        parts=whole.parts,
        start_layers=tuple(
            StartLayer(layer=layer, images=None if users is None else users[layer.digest]) for layer in whole.layers
        ),
        start_size_bytes=size_of(whole.layers),
        shared_bytes=_shared(whole.layers, users),
        metadata_bytes=size_of_metadata(whole.layers),
        start_cost=cost,
    )
