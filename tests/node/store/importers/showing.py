"""Import, and look at what a sandbox would get: the layers of the store under one overlay."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from opendsec.linux import mount
from opendsec.model.image import Image, Layer
from opendsec.store.images import ImageStore
from opendsec.store.importers import ImportRequest, import_image
from opendsec.store.importers.source import parse_source


def imported(store: ImageStore, name: str, source: object, **more: Any) -> Image:
    """Import from a source as a user says it."""
    return import_image(store, ImportRequest(name=name, source=parse_source(str(source)), **more))


@contextmanager
def shown(store: ImageStore, layers: Sequence[Layer]) -> Iterator[Path]:
    """The layers, lowest first, mounted from the store's files and laid over each other; mounted nowhere."""
    with ExitStack() as opened:
        fds = []
        for layer in reversed(layers):
            devices = () if layer.data is None else (store.data_path(layer.data.digest),)
            fds.append(mount.erofs(store.blob_path(layer.mounted.digest), devices=devices))
            opened.callback(os.close, fds[-1])
        if len(fds) > 1:
            fds.insert(0, mount.overlay(fds))
            opened.callback(os.close, fds[0])
        yield Path(f"/proc/self/fd/{fds[0]}")


def leftovers(store: ImageStore) -> list[str]:
    """Files of a store that belong to an image, or to work that should be over."""
    kept = ("lock", "claims", "conversions")
    paths = [path.relative_to(store.root) for path in store.root.rglob("*") if not path.is_dir()]
    return sorted(str(path) for path in paths if path.parts[0] not in kept)
