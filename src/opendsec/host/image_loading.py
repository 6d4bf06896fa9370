"""`opendsec image sync`, `prefetch` and `profile`: images for other stores, and chunks before anybody asks for them.

Prefetching is done by the loader process of this machine; where layers are read directly there is none. Recording looks
at what is in memory of the layers this machine's platform has mounted, whatever loads them.
"""

from __future__ import annotations

import os
import shlex
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from opendsec.cli.output import Json, note, print_json, print_line, size
from opendsec.cli.passing_on import SETTINGS, PassingOn
from opendsec.errors import InvalidSpecError, NodeError, UnsupportedError
from opendsec.host.image_group import STATE_DIR, app, errors_shown, open_store, progress_shown
from opendsec.host.local import started
from opendsec.model.image import Image, Layer
from opendsec.store.chunks import CHUNK_BYTES
from opendsec.store.loading.base import LoaderKind
from opendsec.store.loading.control import ask
from opendsec.store.loading.fanotify_group import place_of
from opendsec.store.loading.fuse import ATTACH_S, DATA, SOCKET
from opendsec.store.loading.profiles import Profile
from opendsec.store.loading.recording import found_in_memory, keep_profile, profile_of
from opendsec.store.loading.remote import RemoteStore
from opendsec.store.loading.settings import read_loading
from opendsec.store.loading.sources import DirectoryFiles, blob_name, data_name, is_remote, open_files
from opendsec.store.loading.sync import sync_images
from opendsec.store.manifest import hex_of
from opendsec.store.progress import OnProgress, Progress

_LOOK_S = 0.2
NOTHING_READ = "the command read nothing of the image's layers, or they are of one file each; nothing was recorded"
"""Why a profile would be empty; such a one would say that a start reads nothing."""


@app.command("sync")
def sync(
    destination: Annotated[str, typer.Argument(help="A directory, or s3://bucket/prefix.")],
    names: Annotated[list[str] | None, typer.Argument(help="Images; all when none is named.")] = None,
    replace: Annotated[bool, typer.Option("--replace", help="Let names mean these images there.")] = False,
    as_json: Json = False,
) -> None:
    """Copy images, and those they refer to, to another store: data first, the name last."""
    with errors_shown(as_json), progress_shown("sync") as on_progress:
        store = open_store()
        done = sync_images(store, names or store.names(), destination, replace=replace, on_progress=on_progress)
    if as_json:
        print_json(asdict(done))
        return
    count = len(done.images)
    print_line(
        f"{count} image{'s' if count != 1 else ''} in {destination}: sent {size(done.sent_bytes)}, "
        f"{size(done.present_bytes)} were there already"
    )


@app.command("prefetch")
def prefetch(
    name: Annotated[str, typer.Argument(help="Name of the image.")],
    everything: Annotated[bool, typer.Option("--all", help="The whole image, not only what a start reads.")] = False,
    as_json: Json = False,
) -> None:
    """Bring what a start of an image reads to this machine's cache."""
    with errors_shown(as_json), progress_shown(f"image {name}") as on_progress:
        image = _look_up(name)
        socket = _loader_socket()
        with_profile = 0
        layers = _with_data(image)
        for layer in layers:
            answer = ask(socket, "prefetch", timeout_s=ATTACH_S, layer=_fields(layer), everything=everything)
            with_profile += bool(answer["has_profile"])
        present, total = _wait_loaded(socket, layers, on_progress)
    if as_json:
        print_json({"image": name, "layers": len(layers), "profiles": with_profile, "present_bytes": present})
        return
    print_line(f"image {name}: {size(present)} of {size(total)} are on this machine")
    if not everything and with_profile < len(layers):
        note(f"{len(layers) - with_profile} layers have no profile yet; `opendsec image profile` records one")


@app.command("profile", cls=PassingOn, context_settings=SETTINGS)
def profile(
    context: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME -- COMMAND...", help="An image, and what a start of it is.")],
    as_json: Json = False,
) -> None:
    """Start a sandbox, run a command in it, and remember what of the image that read, for later starts."""
    argv = context.args[1:] if context.args[:1] == ["--"] else list(context.args)
    with errors_shown(as_json):
        if not argv:
            raise InvalidSpecError("command: say what a start is: opendsec image profile NAME -- COMMAND")
        layers = _with_data(_look_up(name))
        status, profiles = _recorded(name, argv, layers)
        chunks = sum(len(profile.chunks) for profile in profiles)
        if status == 0:
            for layer in layers:
                for profile in profiles:
                    if profile.layer == layer.digest:
                        _keep(layer, profile)
    if as_json:
        print_json({"image": name, "status": status, "chunks": chunks})
    if problem := not_recorded(status, chunks):
        note(problem)
        raise typer.Exit(1)
    if not as_json:
        print_line(f"image {name}: a start reads about {size(chunks * CHUNK_BYTES)}")


def _recorded(name: str, argv: Sequence[str], layers: Sequence[Layer]) -> tuple[int, list[Profile]]:
    """Exit status of a command in a sandbox of its own, and what it read; no profiles where it read nothing."""
    from opendsec.sync import DSecClient, DSecContainerRunArgs

    trees = {layer: started(os.environ).run_dir / "layers" / hex_of(layer.digest) for layer in layers}
    with DSecClient() as client, client.container(DSecContainerRunArgs(container_image=name)) as sandbox:
        for tree in trees.values():
            _drop_pages(tree)
        result = sandbox.commands.run(list(argv))
        found = [_profile_of(layer, tree, shlex.join(argv)) for layer, tree in trees.items()]
    return result.exit_code if result.exit_code is not None else -1, [one for one in found if one is not None]


def _profile_of(layer: Layer, tree: Path, command: str) -> Profile | None:
    fd = os.open(tree, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return profile_of(layer, found_in_memory(fd), command=command, now=time.time())
    finally:
        os.close(fd)


def _keep(layer: Layer, profile: Profile) -> None:
    """For all nodes where the store can be written to, else for this one."""
    environment = _environment()
    state, run_dir = Path(environment.get("OPENDSEC_STATE_DIR", STATE_DIR)), Path(environment["OPENDSEC_RUN_DIR"])
    settings = read_loading(environment, state_dir=state)
    assert layer.data is not None
    name = hex_of(layer.data.digest)
    store = open_files(settings.address)
    root = Path(settings.address)
    meta = state / "cache" / "metadata" / hex_of(layer.mounted.digest)
    if settings.kind is LoaderKind.FUSE:
        data = run_dir / DATA / name
    elif settings.kind is LoaderKind.FANOTIFY:
        data = place_of(run_dir, state).files / name
    else:
        meta, data = root / blob_name(layer.mounted.digest), root / data_name(layer.data.digest)
    keep_profile(profile, layer, meta, data, store=store, local=DirectoryFiles(state / "cache"))


def not_recorded(status: int, chunks: int) -> str:
    """Why there is no profile after a command that ended with that status and read so many chunks; else empty."""
    if status != 0:
        return f"the command ended with status {status}; nothing was recorded"
    return "" if chunks else NOTHING_READ


def _look_up(name: str) -> Image:
    """All layers of a start, from the store the platform of this machine uses."""
    address = _environment().get("OPENDSEC_STORE", "")
    return RemoteStore(open_files(address)).compose(name) if is_remote(address) else open_store().compose(name)


def _environment() -> dict[str, str]:
    return started(os.environ).environment(os.environ)


def _loader_socket() -> Path:
    """UnsupportedError where this machine's layers need no loader."""
    environment = _environment()
    state = Path(environment.get("OPENDSEC_STATE_DIR", STATE_DIR))
    if read_loading(environment, state_dir=state).kind is LoaderKind.DIRECT:
        raise UnsupportedError(
            "layers of this machine are read directly from the store, so there is no cache to fetch to",
            remedy="OPENDSEC_LOADER=fuse opendsec up",
        )
    return Path(environment["OPENDSEC_RUN_DIR"]) / SOCKET


def _with_data(image: Image) -> list[Layer]:
    return [layer for layer in image.layers if layer.data is not None]


def _fields(layer: Layer) -> dict[str, object]:
    return asdict(layer)


def _wait_loaded(socket: Path, layers: Sequence[Layer], on_progress: OnProgress) -> tuple[int, int]:
    """Bytes on this machine, of how many, once nothing is being loaded any more. Raises what kept it from going on."""
    wanted = {layer.digest for layer in layers}
    waited = threading.Event()
    while True:
        found = [one for digest, one in ask(socket, "status", timeout_s=10.0)["layers"].items() if digest in wanted]
        present = sum(one["present_bytes"] for one in found)
        total = sum(one["size_bytes"] for one in found)
        on_progress(Progress(phase="fetching", done=present, total=total))
        problem = next((one["problem"] for one in found if one["problem"]), "")
        if problem:
            raise NodeError(f"not everything was fetched: {problem}", retryable=True)
        if not any(one["loading"] for one in found):
            return present, total
        waited.wait(_LOOK_S)


def _drop_pages(tree: Path) -> None:
    """Forget what is in memory of a mounted layer, so that the kernel asks for it again; what is mapped stays."""
    for directory, _, names in os.walk(tree):
        for name in names:
            path = Path(directory, name)
            if not path.is_file() or path.is_symlink():
                continue
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)
