"""`python -m opendsec.edge`: one edge process. The composition root: settings from the environment, backends, store,
server.

    OPENDSEC_EDGE              name of this edge, 1 to 32 of a-z and 0-9 (local)
    OPENDSEC_STATE_DIR         state, on ext4, xfs or btrfs (/var/lib/opendsec)
    OPENDSEC_STORE             images: a directory, also one that several nodes share, http(s)://… or s3://bucket/prefix
                               (<state>/store)
    OPENDSEC_LOADER            how layers are read: auto, direct, fuse, fanotify (auto)
    OPENDSEC_STORE_TIMEOUT     seconds a read may wait for the store (30)
    OPENDSEC_START_WAIT_MS     how long a create waits at most for what its start reads (1000)
    OPENDSEC_RUN_DIR           sockets and mounts, on a tmpfs (/run/opendsec)
    OPENDSEC_EDGE_LISTEN       unix:/path or host:port (unix:<run>/edge-<name>.sock)
    OPENDSEC_EDGE_TOKEN        bearer token the apiserver sends; needed for host:port, 16 characters or more
    OPENDSEC_EDGE_BACKENDS     comma-separated, or auto: all but the dummy, each if it works here (auto);
                               `fncall` beside `dummy` answers calls from memory
    OPENDSEC_EDGE_VMM          what runs microVMs: firecracker, qemu, or auto: Firecracker where KVM does what it should
                               and it is installed, else QEMU (auto)
    OPENDSEC_EDGE_VM_DISK_MB, OPENDSEC_EDGE_VM_DISK_OPERATIONS, OPENDSEC_EDGE_VM_NETWORK_MB
                               of each microVM in a second at most, under Firecracker (0: no limit)
    OPENDSEC_FNCALL_IMAGE      image of calls that name none (debian)
    OPENDSEC_FNCALL_CONTAINERS containers for calls at once (4 for each processor, 8 at least)
    OPENDSEC_GPU_INVENTORY     a file that makes up GPUs for tests of placement; unset: what the driver says
    OPENDSEC_EDGE_CGROUP       top control group (opendsec; opendsec-1, -2, … for further platforms on this kernel)
    OPENDSEC_EDGE_STARTS       sandboxes started at once (16)
    OPENDSEC_EDGE_MAX_LIVE     sandboxes at most (3839)
    OPENDSEC_EDGE_MEMORY_FLOOR_MB, OPENDSEC_EDGE_DISK_FLOOR_MB    nothing is admitted below these (512, 1024)
    OPENDSEC_EDGE_KEEP_ENDED   seconds an ended sandbox's results can be asked for (3600)
    OPENDSEC_LOG_LEVEL         debug, info, warning, error (info)

SIGTERM stops the edge, never its sandboxes: the next edge of the same name adopts them.
"""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from opendsec import errors
from opendsec.backends.ground import Ground
from opendsec.edge.backends import Means, make_backends
from opendsec.edge.calls import carrying_out
from opendsec.edge.image_desk import ImageDesk
from opendsec.edge.images import AnyImage, ImageSource
from opendsec.edge.node import Node
from opendsec.edge.origins import Origins
from opendsec.edge.packing import Packing
from opendsec.edge.server import edge_app
from opendsec.edge.settings import EdgeSettings, read_settings
from opendsec.fncall.base import FnCalls
from opendsec.model.spec import BackendKind
from opendsec.server import logs
from opendsec.server.auth import Verify, constant_token
from opendsec.server.runner import listen, run, serve
from opendsec.store.images import ImageStore
from opendsec.store.leases import Leases
from opendsec.store.loading.base import Loader, LoaderKind
from opendsec.store.loading.direct import DirectLoader
from opendsec.store.loading.fanotify import FanotifyLoader
from opendsec.store.loading.fanotify_group import check_fanotify
from opendsec.store.loading.fetch import ChunkSource
from opendsec.store.loading.fuse import FuseLoader
from opendsec.store.loading.healing import Healing
from opendsec.store.loading.remote import PATIENCE_S, RemoteStore
from opendsec.store.loading.sources import is_remote, open_files
from opendsec.store.loading.starting import Starts
from opendsec.store.location import open_location
from opendsec.store.mounts import LayerMounts

RESERVED_DESCRIPTORS = 160
"""For the edge itself, starts and removals under way, and connections of callers."""
DESCRIPTORS_PER_SANDBOX = 3
"""The agent's connection, the journal, and one of a caller."""


async def main(settings: EdgeSettings) -> None:
    """Serve until SIGTERM."""
    only_dummy = set(settings.backends) <= {BackendKind.DUMMY, BackendKind.FNCALL}
    with ExitStack() as stack:
        store, layers = _store_and_layers(settings, stack)
        images: ImageSource = AnyImage() if only_dummy else store
        writable = None if only_dummy or isinstance(store, RemoteStore) else store
        desk = None if only_dummy else stack.enter_context(ImageDesk(store, layers))
        packing = None if writable is None else Packing(writable)
        origins = Origins(settings.node.state_dir, store if isinstance(store, ImageStore) else None)
        backends = make_backends(settings.backends, _means(settings, store, layers))
        async with (
            Node(settings.node, backends=backends, images=images, version=_version(), origins=origins) as node,
            _calls(settings, node, images) as calls,
        ):
            app = edge_app(
                node, version=_version(), verify=_verify(settings), packing=packing, desk=desk, fncalls=calls
            )
            await serve(app, listen(settings.listen))


@asynccontextmanager
async def _calls(settings: EdgeSettings, node: Node, images: ImageSource) -> AsyncIterator[FnCalls | None]:
    """The engine of calls, open; None where none is asked for."""
    if BackendKind.FNCALL not in settings.backends:
        yield None
        return
    dummy = BackendKind.CONTAINER not in settings.backends
    async with carrying_out(node, images, settings.calls, run_dir=settings.run_dir, dummy=dummy) as engine:
        yield engine


def _store_and_layers(settings: EdgeSettings, stack: ExitStack) -> tuple[ImageStore | RemoteStore, LayerMounts]:
    """Where images are looked up, and their layers as they are mounted here."""
    mount_root = settings.run_dir / "layers"
    copies = settings.state_dir / "cache" / "metadata"
    files = open_files(settings.loading.address, attempt_s=settings.loading.attempt_s)
    starts = Starts(files, settings.state_dir / "cache", wait_s=settings.loading.start_wait_s)
    stack.callback(starts.close)
    if is_remote(settings.loading.address):
        remote = RemoteStore(files, patience_s=min(PATIENCE_S, settings.loading.patience_s))
        stack.callback(remote.close)
        loader = _through_process(settings, copies)
        return remote, stack.enter_context(LayerMounts(loader, mount_root, starts=starts))
    store = open_location(settings.store, settings.state_dir)
    leases = Leases(store.layout, mount_root)
    if settings.loading.kind is not LoaderKind.DIRECT:
        loader = _through_process(settings, copies)
        layers = stack.enter_context(LayerMounts(loader, mount_root, leases=leases, starts=starts))
    else:
        direct = DirectLoader(store, copies)
        layers = stack.enter_context(LayerMounts(direct, mount_root, leases=leases, starts=starts))
        stack.enter_context(Healing(direct.data_of, layers.held, direct.renew).looking())
    stack.enter_context(leases.beating())
    return store, layers


def _through_process(settings: EdgeSettings, copies: Path) -> Loader:
    loading = settings.loading
    source = ChunkSource(open_files(loading.address, attempt_s=loading.attempt_s), patience_s=loading.patience_s)
    if loading.kind is LoaderKind.FANOTIFY:
        check_fanotify(settings.state_dir)
        return FanotifyLoader(source, settings.run_dir, settings.state_dir)
    return FuseLoader(source, copies, settings.run_dir)


def _means(settings: EdgeSettings, store: ImageStore | RemoteStore, layers: LayerMounts) -> Means:
    return Means(
        layers=layers,
        store=store.layout.root if isinstance(store, ImageStore) else None,
        state_dir=settings.node.state_dir,
        host_state_dir=settings.state_dir,
        run_dir=settings.run_dir / "edge" / settings.node.edge,
        ground=Ground(settings.node.state_dir, cgroup_root=settings.cgroup),
        vmm=settings.vmm,
        vm_rates=settings.vm_rates,
    )


def _verify(settings: EdgeSettings) -> Verify | None:
    return constant_token(settings.token) if settings.token else None


def _version() -> str:
    try:
        return version("opendsec")
    except PackageNotFoundError:
        return "0+unknown"


def _allow_many_files() -> int:
    """How many descriptors this process may have now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def within_descriptors(settings: EdgeSettings, descriptors: int) -> EdgeSettings:
    """The same with no more sandboxes than descriptors allow: an edge that has none left could not even end one."""
    most = max(1, (descriptors - RESERVED_DESCRIPTORS) // DESCRIPTORS_PER_SANDBOX)
    limits = replace(settings.node.limits, max_live=min(settings.node.limits.max_live, most))
    return replace(settings, node=replace(settings.node, limits=limits))


if __name__ == "__main__":
    try:
        chosen = read_settings(os.environ)
        logs.configure(chosen.log_level)
        run(main(within_descriptors(chosen, _allow_many_files())))
    except errors.OpenDSecError as exc:
        sys.exit(f"opendsec.edge: {exc}")
