"""A layer of the store, checked and open for reading: mounted nowhere, so nothing is left when this process dies.

All of it is read once and compared with its digests first, since EROFS itself would show damaged bytes as if they were
right; the second reading, by whoever asked, comes from the page cache as far as memory reaches.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from opendsec.errors import DigestMismatchError
from opendsec.model.image import Layer
from opendsec.store.chunks import file_digest, make_table, table_digest
from opendsec.store.images import ImageStore
from opendsec.store.loading.direct import DirectLoader
from opendsec.store.mounts import open_erofs


@contextmanager
def opened_layer(store: ImageStore, layer: Layer, work: Path, *, on_check: Callable[[], None]) -> Iterator[int]:
    """A descriptor of the layer's root. `work`: a staging directory of the store.

    Raises DigestMismatchError (it is damaged), ImageInvalidError (the store has not got it whole), HostCapabilityError
    (it cannot be mounted here).
    """
    files = DirectLoader(store, work / "copies").attach(layer)
    on_check()
    _check_file(files.meta, layer)
    if files.data and layer.data and table_digest(make_table(files.data)) != layer.data.digest:
        raise damaged(layer)
    root = open_erofs(files.meta, data=files.data)
    try:
        yield root
    finally:
        os.close(root)


def _check_file(meta: Path, layer: Layer) -> None:
    if file_digest(meta) != layer.mounted.digest:
        raise damaged(layer)


def damaged(layer: Layer) -> DigestMismatchError:
    """The store's files of a layer are not what their names say."""
    return DigestMismatchError(
        f"layer {layer.digest} is damaged in the store: its bytes do not have its digest",
        detail={"layer": layer.digest},
        remedy="opendsec image fsck",
    )
