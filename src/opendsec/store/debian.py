"""Build a Debian image with mmdebstrap: the plan (pure), the build, and what is taken out of the tree afterwards.

Packages come from where this machine gets them: the mirrors of the suite in its own apt configuration, else the
public ones. None of that stays in the image: it gets Debian's public addresses, no proxy, no host name, no resolver.
Time stamps are clamped to the date of the newest package index, so the same mirror state gives the same image.

A build runs in a mount and process namespace of its own, so a killed build leaves neither mounts nor processes behind.
SOURCE_DATE_EPOCH is deliberately not set: Python would then compile modules that re-read their source at every import.
"""

from __future__ import annotations

import email.utils
import json
import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from opendsec.errors import ImageInvalidError, ImageNotFoundError, InvalidSpecError, NodeError
from opendsec.model.image import Image, ImageConfig
from opendsec.store.apt_sources import collect_keys, own_sources, public_sources
from opendsec.store.durable import disk_full, remove_tree
from opendsec.store.images import ImageStore
from opendsec.store.layers import make_layer
from opendsec.store.manifest import digest_of
from opendsec.store.programs import ENVIRONMENT, Ended, find_program, run_program
from opendsec.store.progress import OnProgress, Progress, quietly

BASE_PACKAGES = (
    "python3",
    "python3-pip",
    "python3-venv",
    "git",
    "gcc",
    "libc6-dev",
    "make",
    "curl",
    "ca-certificates",
    "procps",
)
"""What the base image `debian` holds beyond the minimal system."""

RECIPE_LABEL = "opendsec.recipe"
RECIPE_VERSION = 1
"""Raise it when the same request must give another tree than before."""

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
TIMEOUT_S = 1800.0

_PACKAGE = re.compile(r"[a-z0-9][a-z0-9+.-]+(?:[:/=][A-Za-z0-9.+:~-]+)?\Z")
_SUITE = re.compile(r"[a-z][a-z0-9-]{1,40}\Z")
_MIRROR = re.compile(r"(?:https?|file|copy)://?[^\s\"']+\Z")
_UNWANTED = ("usr/share/man", "usr/share/info", "usr/share/groff", "usr/share/lintian", "usr/share/linda")
_EMPTIED = ("var/log", "var/cache/apt", "var/cache/ldconfig", "var/lib/apt/lists", "dev", "run", "tmp", "var/tmp")
_EMPTY_FILES = ("etc/hostname", "etc/hosts", "etc/resolv.conf")
_DPKG_OPTIONS = (
    "path-exclude=/usr/share/man/*",
    "path-exclude=/usr/share/info/*",
    "path-exclude=/usr/share/doc/*",
    "path-include=/usr/share/doc/*/copyright",
    "path-exclude=/usr/share/locale/*/LC_MESSAGES/*.mo",
)

_MAN_PAGES_PLACE = 'mkdir -p "$1/usr/share/man/man1"'
"""Packages with alternatives (Java) link man pages into it, whether or not there are any, and fail without it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DebianRecipe:
    """What is asked for. Equal recipes give equal images as long as the mirror does not change."""

    suite: str = "bookworm"
    include: tuple[str, ...] = BASE_PACKAGES
    mirror: str = ""
    """Base address of one mirror; empty: this machine's own, else Debian's."""


def check_recipe(recipe: DebianRecipe) -> DebianRecipe:
    """The recipe itself when suite, packages and mirror can be such. InvalidSpecError naming the field."""
    if not _SUITE.match(recipe.suite):
        raise InvalidSpecError(f"suite {recipe.suite[:80]!r} is not a suite's name", detail={"field": "suite"})
    for package in recipe.include:
        if not _PACKAGE.match(package):
            raise InvalidSpecError(f"include: {package[:80]!r} is not a package's name", detail={"field": "include"})
    if recipe.mirror and not _MIRROR.match(recipe.mirror):
        raise InvalidSpecError(f"mirror {recipe.mirror[:80]!r} is not an address", detail={"field": "mirror"})
    return recipe


def recipe_digest(recipe: DebianRecipe) -> str:
    """Names the request: order and repetition of packages do not count."""
    fields = asdict(recipe) | {"include": sorted(set(recipe.include)), "version": RECIPE_VERSION}
    return digest_of(json.dumps(fields, sort_keys=True).encode())


def build_arguments(recipe: DebianRecipe, sources: Sequence[str], keys: Path, tree: Path) -> list[str]:
    """Arguments of mmdebstrap."""
    options = [f"--dpkgopt={option}" for option in _DPKG_OPTIONS]
    include = [f"--include={','.join(sorted(set(recipe.include)))}"] if recipe.include else []
    return [
        "--variant=minbase",
        "--mode=root",
        "--format=directory",
        "--verbose",
        "--skip=cleanup/apt/lists",
        f"--setup-hook={_MAN_PAGES_PLACE}",
        f"--keyring={keys}",
        *options,
        *include,
        recipe.suite,
        str(tree),
        *sources,
    ]


def image_config(recipe: DebianRecipe) -> ImageConfig:
    """The defaults of commands in such an image."""
    return ImageConfig(
        env={"PATH": PATH, "LANG": "C.UTF-8"},
        cmd=("bash",),
        labels={RECIPE_LABEL: recipe_digest(recipe)},
    )


def already_built(store: ImageStore, name: str, recipe: DebianRecipe) -> Image | None:
    """The image of that name if it came from the same recipe."""
    try:
        image = store.get(name)
    except ImageNotFoundError:
        return None
    return image if image.config.labels.get(RECIPE_LABEL) == recipe_digest(recipe) else None


def build_debian(
    store: ImageStore,
    name: str,
    recipe: DebianRecipe,
    *,
    proxies: Mapping[str, str] | None = None,
    rebuild: bool = False,
    replace: bool = False,
    on_progress: OnProgress = quietly,
) -> Image:
    """Make the image and publish it; an image of that name from the same recipe is returned as it is, unless `rebuild`.

    `proxies` are environment variables for the download only. Raises HostCapabilityError (a program is missing),
    InvalidSpecError, NodeError with mmdebstrap's words, DiskFullError, ConflictError (the name is taken).
    """
    check_recipe(recipe)
    present = already_built(store, name, recipe)
    if present is not None and not rebuild:
        return present
    with store.scratch() as scratch, store.staging() as work:
        tree = scratch / "tree"
        bootstrap(tree, recipe, proxies or {}, on_progress)
        on_progress(Progress(phase="cleaning the tree"))
        clean_tree(tree, recipe.suite)
        layer = make_layer(store, work, tree, on_progress=on_progress)
        on_progress(Progress(phase="publishing"))
        return store.publish(
            name,
            layers=[layer],
            config=image_config(recipe),
            source=f"mmdebstrap {recipe.suite}",
            replace=replace or rebuild,
        )


def bootstrap(tree: Path, recipe: DebianRecipe, proxies: Mapping[str, str], on_progress: OnProgress) -> None:
    """The system as mmdebstrap makes it, in a directory that is not there yet. Raises as `build_debian` does."""
    if os.geteuid() != 0:
        raise InvalidSpecError(
            "building a Debian image needs root", detail={"field": "user"}, remedy="run it with sudo"
        )
    mmdebstrap = find_program("mmdebstrap")
    isolated = [
        *(find_program("setpriv"), "--pdeathsig", "KILL"),
        *(find_program("unshare"), "--mount", "--propagation", "private", "--pid", "--fork", "--kill-child=KILL"),
    ]
    sources = [f"deb {recipe.mirror} {recipe.suite} main"] if recipe.mirror else own_sources(recipe.suite)
    keys = collect_keys(sources, tree.parent / "keys")
    ended = run_program(
        [*isolated, mmdebstrap, *build_arguments(recipe, sources, keys, tree)],
        timeout_s=TIMEOUT_S,
        environment={**ENVIRONMENT, **proxies},
        on_line=lambda line: on_progress(Progress(phase="installing packages", detail=line)),
    )
    if ended.status != 0:
        raise _bootstrap_failed(ended, tree)


def _bootstrap_failed(ended: Ended, tree: Path) -> Exception:
    text = "\n".join(line for line in ended.tail if line.startswith(("E:", "W:", "dpkg:", "Err:"))) or "\n".join(
        ended.tail[-5:]
    )
    if "No space left" in text or "You don't have enough free space" in text:
        return disk_full(tree.parent)
    return NodeError(
        f"mmdebstrap ended with status {ended.status}: {text[-1500:]}",
        detail={"program": "mmdebstrap", "status": ended.status},
        remedy="check the package names, and that this machine's apt can reach its mirror",
    )


def clean_tree(tree: Path, suite: str) -> None:
    """Take out what belongs to the build or to this machine, and clamp time stamps to the newest package index."""
    epoch = index_date(tree / "var/lib/apt/lists")
    for relative in _UNWANTED:
        remove_tree(tree / relative)
    for relative in _EMPTIED:
        for child in (tree / relative).iterdir() if (tree / relative).is_dir() else ():
            remove_tree(child)
    for pattern in ("etc/*-", "var/cache/debconf/*-old", "var/lib/dpkg/*-old", "var/lib/apt/extended_states.*"):
        for path in tree.glob(pattern):
            remove_tree(path)
    for relative in _EMPTY_FILES:
        remove_tree(tree / relative)
        (tree / relative).write_bytes(b"")
    (tree / "etc/apt/sources.list").write_text("".join(f"{line}\n" for line in public_sources(suite)))
    _write_shadow_days(tree / "etc/shadow", epoch // 86400)
    _clamp_times(tree, epoch)


def index_date(lists: Path) -> int:
    """Unix time of the newest Release file below apt's lists. ImageInvalidError when there is none."""
    dates = []
    for path in lists.glob("*Release"):
        for line in path.read_text(errors="replace").splitlines():
            if line.startswith("Date:"):
                dates.append(int(email.utils.parsedate_to_datetime(line[5:].strip()).timestamp()))
                break
    if not dates:
        raise ImageInvalidError("mmdebstrap left no package index, so the image cannot be dated")
    return max(dates)


def _write_shadow_days(shadow: Path, day: int) -> None:
    """Accounts made during the build carry today's date as that of their last password change."""
    lines = [line.split(":") for line in shadow.read_text().splitlines()]
    text = "".join(":".join([*fields[:2], str(day), *fields[3:]]) + "\n" for fields in lines)
    shadow.write_text(text)


def _clamp_times(tree: Path, epoch: int) -> None:
    for path in _walk(tree):
        status = os.lstat(path)
        if status.st_mtime > epoch or (stat.S_ISDIR(status.st_mode) and status.st_mtime_ns % 10**9):
            os.utime(path, (epoch, epoch), follow_symlinks=False)


def _walk(tree: Path) -> Iterator[str]:
    for directory, subdirectories, names in os.walk(tree, topdown=False):
        yield from (os.path.join(directory, name) for name in (*names, *subdirectories))  # noqa: PTH118 (names may be no text)
    yield str(tree)
