"""Make one layer of a store from a directory tree: metadata and data apart, hashed and on the disk.

Every layer is made here, whatever it comes from: an unpacked image, a directory, a bootstrap, or the writable layer of
a sandbox, whose whiteouts (character devices 0:0) and opaque directories (`trusted.overlay.opaque`) it keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from opendsec.model.image import LayerRole
from opendsec.store.erofs import TreeFacts, make_erofs, mkfs_version
from opendsec.store.following import Following, can_follow
from opendsec.store.images import ImageStore, StagedLayer
from opendsec.store.progress import OnProgress, quietly

_MAY_GO_BACK = (1, 10)
"""Version of mkfs.erofs from which on the data may not be written from the first byte to the last: all released ones
before it, up to 1.9.3, do so (lib/blobchunk.c)."""


def make_layer(
    store: ImageStore,
    work: Path,
    tree: Path,
    *,
    name: str = "layer",
    role: LayerRole = LayerRole.BASE,
    facts: TreeFacts | None = None,
    leave_out: Sequence[str] = (),
    leave_out_regexes: Sequence[str] = (),
    on_progress: OnProgress = quietly,
    on_read: Callable[[], None] = lambda: None,
) -> StagedLayer:
    """The tree as a staged layer; its files begin with `name` and lie in `work`, a staging directory of the store.

    `facts`, `leave_out`, `leave_out_regexes`: see `make_erofs`. `on_read` is called when the tree has been read and may
    change again. Raises DiskFullError, ImageInvalidError, HostCapabilityError.
    """
    meta, data = work / f"{name}.meta", work / f"{name}.data"
    with ExitStack() as stack:
        follow = mkfs_version() < _MAY_GO_BACK and can_follow(work)
        following = stack.enter_context(Following(data)) if follow else None
        split = make_erofs(
            meta,
            tree,
            data=data,
            facts=facts,
            leave_out=leave_out,
            leave_out_regexes=leave_out_regexes,
            on_progress=on_progress,
        )
        on_read()
        table = following.finish() if split and following is not None else None
    return store.stage_layer(meta, data if split else None, role=role, table=table)
