"""Where calls are tested: engines over real containers, and an image with compilers and interpreters.

The image is the machine's `debian` with one layer above it: files of packages that are installed here
(scripts/packages), so nothing is downloaded. Node comes as its program with the libraries it needs.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from pathlib import Path

from tests.capabilities import STATE_DIR

from opendsec.backends.container import ContainerBackend
from opendsec.fncall.engine import Engine
from opendsec.fncall.settings import FnCallSettings
from opendsec.linux.cgroup import choose_driver, find_mounts
from opendsec.model.image import Image, LayerRole
from opendsec.store.images import ImageStore
from opendsec.store.layers import make_layer
from opendsec.store.loading.direct import DirectLoader
from opendsec.store.mounts import LayerMounts

LANGUAGES = "languages"
CGROUP = f"opendsec-fncall-{os.getpid()}"
_OF_LIBC = ("ld-linux-x86-64", "ld-linux-aarch64", "libc", "libdl", "libm", "libpthread", "libresolv", "librt")
"""The image has its own, and they belong together."""
_NOT_NEEDED = ("jmods", "man", "docs", "include", "src.zip", "demo", "legal", "ct.sym.old")


def borrow(store: ImageStore, name: str) -> Image:
    """An image of this machine's store, by links to its files."""
    other = ImageStore(STATE_DIR / "store")
    image = other.get(name)
    for layer in image.layers:
        pairs = [(other.blob_path(layer.mounted.digest), store.blob_path(layer.mounted.digest))]
        if layer.data is not None:
            pairs += [(other.data_path(layer.data.digest), store.data_path(layer.data.digest))]
            pairs += [(other.table_path(layer.data.digest), store.table_path(layer.data.digest))]
        for source, target in pairs:
            if not target.exists():
                os.link(source, target)
    return store.publish(name, layers=image.layers, config=image.config, replace=True)


def make_languages(store: ImageStore) -> Image:
    """`debian` with g++, a JDK and node above it."""
    debian = borrow(store, "debian")
    with store.staging() as work:
        tree = work / "tree"
        for path in (*_of_packages("g++", "g++-12", "libstdc++-12-dev"), *_of_program("node")):
            _copy(path, tree)
        _copy_jdk(tree)
        layer = make_layer(store, work, tree, role=LayerRole.BASE)
        return store.publish(
            LANGUAGES, layers=[*debian.layers, layer], config=debian.config, source="test", replace=True
        )


def _of_packages(*names: str) -> list[Path]:
    listing = subprocess.run(["dpkg", "-L", *names], check=True, capture_output=True, text=True, timeout=120)
    paths = (Path(line) for line in listing.stdout.splitlines() if line and "/usr/share/" not in line)
    return [path for path in paths if path.is_symlink() or path.is_file()]


def _of_program(name: str) -> list[Path]:
    program = shutil.which(name, path="/usr/bin")
    if program is None:
        raise RuntimeError(f"tests need {name}: see scripts/packages")
    listing = subprocess.run(["ldd", program], check=True, capture_output=True, text=True, timeout=120)
    libraries = [Path(word) for line in listing.stdout.splitlines() for word in line.split() if word.startswith("/")]
    return [Path(program), *(library for library in libraries if library.name.split(".")[0] not in _OF_LIBC)]


def _copy(path: Path, tree: Path) -> None:
    """At the same place, below what links lead to (/lib is one in both)."""
    target = tree / os.path.realpath(path.parent).lstrip("/") / path.name
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(path, target, follow_symlinks=False)
    led_to = path.resolve()
    if path.is_symlink() and led_to.is_file():
        _copy(led_to, tree)


def _copy_jdk(tree: Path) -> None:
    home = Path(os.path.realpath("/usr/bin/javac")).parents[1]
    for source in (home, Path("/etc") / f"{home.name.removesuffix('-amd64')}"):
        if source.is_dir():
            target = tree / str(source).lstrip("/")
            shutil.copytree(source, target, symlinks=True, ignore=shutil.ignore_patterns(*_NOT_NEEDED))
    for program in ("java", "javac"):
        (tree / "usr/bin").mkdir(parents=True, exist_ok=True)
        (tree / "usr/bin" / program).symlink_to(home / "bin" / program)


@dataclass(slots=True)
class Ground:
    """What engines of a test module share."""

    store: ImageStore
    containers: ContainerBackend
    state: Path
    run: Path
    cgroup: str

    def settings(self, **changes: object) -> FnCallSettings:
        """Of an engine; two containers, kept for a while."""
        fields: dict[str, object] = {
            "edge": "test",
            "state_dir": self.state / "fncall",
            "run_dir": self.run / "fncall",
            "containers": 2,
        }
        return FnCallSettings(**(fields | changes))  # type: ignore[arg-type]

    async def begin_again(self) -> None:
        """As another process of the same edge would."""
        self.containers = _containers(self.containers._layers, self.state, self.run, self.cgroup)
        await self.containers.open()

    @contextlib.asynccontextmanager
    async def engine(self, **changes: object) -> AsyncIterator[Engine]:
        """An open engine."""
        engine = Engine(settings=self.settings(**changes), containers=self.containers, images=self.store)
        await engine.open()
        try:
            yield engine
        finally:
            await engine.close()


def _containers(layers: LayerMounts, state: Path, run: Path, cgroup: str) -> ContainerBackend:
    return ContainerBackend(layers=layers, state_dir=state, run_dir=run / "edge", cgroup_root=cgroup)


@contextlib.asynccontextmanager
async def ground(store: ImageStore, images: Iterable[Image], *, cgroup: str = CGROUP) -> AsyncIterator[Ground]:
    """Real containers in directories and control groups of their own."""
    state = Path(tempfile.mkdtemp(prefix="opendsec-fncall-", dir="/var/lib"))
    run = Path(tempfile.mkdtemp(prefix="ods-", dir="/run"))
    layers = LayerMounts(DirectLoader(store, state / "metadata"), run / "layers")
    made = Ground(store, _containers(layers, state, run, cgroup), state, run, cgroup)
    try:
        await made.containers.open()
        for image in images:
            layers.acquire(image)
        yield made
    finally:
        await made.containers.close()
        layers.unmount_all()
        choose_driver(find_mounts(), root=cgroup).remove_root()
        shutil.rmtree(state)
        shutil.rmtree(run)
