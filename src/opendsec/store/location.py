"""Which store a setting means: the one place where its text is understood.

    (empty)         `<state directory>/store`
    /a/directory    a directory on any file system that offers what `opendsec.store.portability` asks for

It refuses everything else by name. Stores behind HTTP or S3 (`loading.remote`) are only read, by edges: who changes a
store needs it as a directory.
"""

from __future__ import annotations

from pathlib import Path

from opendsec.errors import InvalidSpecError
from opendsec.store.images import ImageStore

SETTING = "OPENDSEC_STORE"


def store_directory(text: str, state_dir: Path) -> Path:
    """The root a setting names. InvalidSpecError naming the setting."""
    if not text:
        return state_dir / "store"
    root = Path(text)
    if not root.is_absolute() or "://" in text:
        raise InvalidSpecError(
            f"{SETTING}: {text[:200]!r} is no absolute path of a directory",
            detail={"field": SETTING},
            remedy="name the directory here; stores behind http:// or s3:// can only be read, by an edge",
        )
    return root


def open_location(text: str, state_dir: Path) -> ImageStore:
    """The store a setting names, made if it is not there. Trees on their way to layers stay on this node.

    Raises InvalidSpecError, DiskFullError, HostCapabilityError (no file locks there), OSError.
    """
    return ImageStore(store_directory(text, state_dir), scratch=state_dir / "scratch")
