"""Forget the images of steps of builds: whoever builds the same again takes the steps again.

Layers that finished images have stay; what nothing else needs goes with the next collection (`opendsec.store.gc`).
"""

from __future__ import annotations

import contextlib
import time

from opendsec.errors import ImageInvalidError, ImageNotFoundError
from opendsec.model.image import BUILD_CACHE
from opendsec.store.images import ImageStore


def forget_build_steps(store: ImageStore, *, older_s: float, dry_run: bool = False) -> tuple[str, ...]:
    """Remove the names of steps made longer than `older_s` seconds ago, and of damaged ones; which they were."""
    oldest = time.time() - older_s
    names = tuple(name for name in store.names() if name.startswith(BUILD_CACHE) and _made_before(store, name, oldest))
    for name in () if dry_run else names:
        with contextlib.suppress(ImageNotFoundError):  # Somebody else was quicker.
            store.remove(name, force=True)
    return names


def _made_before(store: ImageStore, name: str, oldest: float) -> bool:
    try:
        return store.get(name).created_at < oldest
    except ImageInvalidError:
        return True
    except ImageNotFoundError:
        return False
