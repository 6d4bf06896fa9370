"""A platform for one benchmark: its own directories and control groups, gone without a trace at the end.

    with started(options) as platform:
        async with platform.client() as client, platform.edge_client() as edge: ...

With `--api URL` a running platform is measured instead (key from --key or OPENDSEC_API_KEY); what needs the processes
of the platform is then left out.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.shared import cost
from tests.images import make_busybox_image

import opendsec
from opendsec.host import processes
from opendsec.host.local import APISERVER, EDGE, SUPERVISOR, Local
from opendsec.linux.cgroup import choose_driver, find_mounts
from opendsec.linux.mount import mountinfo
from opendsec.store.images import ImageStore

TIMEOUT_S = 600
LIBRARY = Path("/var/lib/opendsec/store")


def add_options(parser: argparse.ArgumentParser) -> None:
    """--image, --store, --api, --key."""
    parser.add_argument("--image", help="default: `debian` when it is in the store, else a small busybox image")
    parser.add_argument("--store", type=Path, default=LIBRARY, help="image store the image is taken from")
    parser.add_argument("--api", help="measure the platform at this URL instead of starting one")
    parser.add_argument("--key", help="its API key")


class StillRunningError(RuntimeError):
    """`down` failed: `opendsec down` with the run directory named on stderr tries again."""


@dataclass(slots=True)
class Platform:
    """What is measured. Without `local` it is somebody else's."""

    api_url: str
    api_key: str
    image: str
    local: Local | None = None
    groups: tuple[Path, ...] = ()
    """cgroup2 directories which together hold this process, the platform and all sandboxes."""
    places: tuple[Path, ...] = field(default=())
    """Directories that are this platform's alone."""

    def client(self) -> opendsec.DSecClient:
        """Through the apiserver."""
        return opendsec.DSecClient(self.api_url, self.api_key, timeout=120)

    def edge_client(self) -> opendsec.DSecClient:
        """Straight to the edge's socket."""
        assert self.local is not None
        return opendsec.DSecClient(f"unix:{self.local.edge_socket}", "", timeout=120)

    def args(self, **given: object) -> opendsec.DSecContainerRunArgs:
        """Arguments of one sandbox."""
        return opendsec.DSecContainerRunArgs(container_image=self.image, **given)  # type: ignore[arg-type]

    def pids(self, *, supervisor: bool = False) -> dict[str, int]:
        """This process, and those of the platform when it is ours: client, apiserver, edge, launcher."""
        found = {"client": os.getpid()}
        if self.local is None:
            return found
        for name in (APISERVER, EDGE, *((SUPERVISOR,) if supervisor else ())):
            pid = processes.pid_of(self.local, name)
            assert pid is not None
            found[name] = pid
        for child in cost.children(found[EDGE]):
            if cost.name(child).startswith("opendsec-launch"):
                found["launcher"] = child
        return found

    def cpu_s(self) -> float:
        """CPU of everything of ours so far: this process, the platform, all sandboxes; not the kernel's threads."""
        return cost.group_cpu_s(*self.groups)


@contextmanager
def started(options: argparse.Namespace, **settings: str) -> Iterator[Platform]:
    """A platform that is ready; `settings` are further environment variables of it."""
    if options.api:
        key = options.key or os.environ.get("OPENDSEC_API_KEY", "")
        yield Platform(options.api, key, options.image or "debian")
        return
    with ExitStack() as stack:
        name = f"opendsec-bench-{os.getpid()}-edge"
        state, run = stack.enter_context(_folder("/var/lib")), stack.enter_context(_folder(_tmpfs()))
        groups = stack.enter_context(groups_of(name))
        image = _choose_image(options, state)
        local = Local(state_dir=state, run_dir=run, listen=f"127.0.0.1:{_free_port()}")
        environment = local.environment({**os.environ, "OPENDSEC_EDGE_CGROUP": name, **settings})
        stack.callback(_down, environment)
        key = _up(environment)
        yield Platform(local.api_url, key, image, local, groups, (state / "edge", run))


def _tmpfs() -> str:
    """Where run directories lie: /run, as on real hosts, or another tmpfs where /run is none."""
    mounted = {entry.target: entry.fstype for entry in mountinfo()}
    return next((target for target in ("/run", "/dev/shm") if mounted.get(target) == "tmpfs"), "/run")


def _choose_image(options: argparse.Namespace, state: Path) -> str:
    library = ImageStore(options.store) if options.store.is_dir() else None
    names = {image.name for image in library.list()} if library else set()
    wanted: str = options.image or ("debian" if "debian" in names else "")
    if not wanted:
        return make_busybox_image(ImageStore(state / "store")).name
    if wanted not in names:
        sys.exit(f"no image {wanted!r} in {options.store}")
    (state / "store").symlink_to(options.store.resolve())
    return wanted


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def _folder(parent: str) -> Iterator[Path]:
    """A directory that is removed with all below it, but never through a mount somebody left in it."""
    folder = Path(tempfile.mkdtemp(prefix="opendsec-bench-", dir=parent))
    try:
        yield folder
    except StillRunningError:
        print(f"{folder} is kept: the platform in it could not be stopped", file=sys.stderr)
        raise
    except BaseException:
        _remove(folder)
        raise
    _remove(folder)


def _remove(folder: Path) -> None:
    left = [entry.target for entry in mountinfo() if Path(entry.target).is_relative_to(folder)]
    if left:
        print(f"left mounted, so {folder} is not removed: {', '.join(map(str, left))}", file=sys.stderr)
    elif folder.exists():  # `down` removes a run directory it has emptied
        shutil.rmtree(folder)


@contextmanager
def groups_of(name: str) -> Iterator[tuple[Path, ...]]:
    """This process in a group of its own, which its children inherit; the sandboxes' group is its sibling."""
    unified = find_mounts().unified
    if unified is None:
        sys.exit("benchmarks need a cgroup v2 tree")
    line = next(line for line in Path("/proc/self/cgroup").read_text("ascii").splitlines() if line.startswith("0::"))
    home, own = unified / line[3:].lstrip("/"), unified / f"{name}-and-caller"
    own.mkdir()
    (own / "cgroup.procs").write_text(str(os.getpid()))
    try:
        yield (own, unified / name)
    finally:
        (home / "cgroup.procs").write_text(str(os.getpid()))
        own.rmdir()
        choose_driver(find_mounts(), root=name).remove_root()


def _opendsec(environment: dict[str, str], *words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "opendsec.main", *words],
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    if done.returncode:
        sys.exit(f"opendsec {' '.join(words)} failed: {done.stdout}{done.stderr}")
    return done.stdout


def _up(environment: dict[str, str]) -> str:
    _opendsec(environment, "up", "-d")
    run = Path(environment["OPENDSEC_RUN_DIR"])
    key: str = json.loads((run / "local.json").read_bytes())["api_key"]
    return key


def _down(environment: dict[str, str]) -> None:
    try:
        print(_opendsec(environment, "down").strip(), flush=True)
    except SystemExit as exc:
        raise StillRunningError(str(exc)) from exc
