"""What manifests need: all files of their layers, and the manifests they name by digest with theirs.

A reference by name alone needs nothing here: the tag of that name does.
"""

from __future__ import annotations

from pathlib import Path

from opendsec.errors import ImageInvalidError
from opendsec.store.compose import split_reference
from opendsec.store.layout import Layout, files_of_layers, manifest_file
from opendsec.store.manifest import Manifest, decode_manifest, decode_tag, name_of_tag_file
from opendsec.store.snapshots import layers_of_snapshots


class Needed:
    """A growing set of files."""

    def __init__(self, layout: Layout) -> None:
        self.files: set[str] = set()
        self._layout = layout

    def add(self, digest: str) -> None:
        """The manifest of that digest and all it needs. FileNotFoundError, ImageInvalidError."""
        file = manifest_file(digest)
        if file in self.files:
            return
        manifest = decode_manifest(self._layout.content(file).read_bytes())
        self.files.add(file)
        self.add_content(manifest)

    def add_content(self, manifest: Manifest) -> None:
        """What a manifest needs, but for its own file."""
        self.files |= files_of_layers(manifest.layers)
        for digest in pinned_by(manifest):
            self.add(digest)


def pinned_by(manifest: Manifest) -> list[str]:
    """Digests of the manifests it names by digest."""
    found = (split_reference(one)[1] for one in (manifest.base, *manifest.toolkits))
    return [digest for digest in found if digest]


def tag_files(layout: Layout) -> list[Path]:
    """All tags, by name."""
    return sorted(path for path in layout.tags.iterdir() if not path.name.startswith("."))


def needed_by_tags(layout: Layout) -> set[str]:
    """All that any name needs now. ImageInvalidError naming the image when that cannot be known."""
    needed = Needed(layout)
    for path in tag_files(layout):
        _add_tag(needed, path)
    return needed.files


def needed_by_snapshots(layout: Layout) -> set[str]:
    """The layers of what saved sandboxes were started from. ImageInvalidError when that cannot be known."""
    return files_of_layers(layers_of_snapshots(layout.snapshots))


def _add_tag(needed: Needed, path: Path) -> None:
    name = name_of_tag_file(path.name)
    seen = ""
    while True:
        try:
            digest = decode_tag(path.read_bytes(), name=name).digest
        except FileNotFoundError:
            return  # removed meanwhile
        try:
            needed.add(digest)
        except FileNotFoundError as error:
            if digest != seen:  # it may have got another meaning meanwhile
                seen = digest
                continue
            raise _unknowable(name, "a manifest it needs is missing") from error
        except ImageInvalidError as error:
            raise _unknowable(name, error.message) from error
        return


def _unknowable(name: str, why: str) -> ImageInvalidError:
    return ImageInvalidError(
        f"what image {name!r} needs cannot be known: {why}; so nothing is collected",
        detail={"image": name},
        remedy=f"opendsec image fsck, then import it again or `opendsec image rm {name}`",
    )
