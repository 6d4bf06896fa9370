"""Any image as a disk: nothing of it is lost or changed, and it boots with our agent as init."""

from __future__ import annotations

import os
import stat
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from tests.capabilities import STATE_DIR
from tests.contract.harness import FULLVM_NEEDS, PC_MEMORY_MIB, Place, Sandbox, disks, fullvm_place
from tests.images import make_busybox_image, make_part
from tests.node.store.importers.showing import shown
from tests.tree_facts import difference, tree_of

from opendsec.errors import ConflictError, DiskFullError, InvalidSpecError
from opendsec.linux.launch import GUEST_PATH
from opendsec.model.image import Image, ImageConfig, LayerRole
from opendsec.model.spec import Resources
from opendsec.store.disk_writing import MIB, ROOT_AT
from opendsec.store.images import ImageStore
from opendsec.store.layers import make_layer
from opendsec.store.programs import ENVIRONMENT
from opendsec.vm.disk_building import DiskRecipe, build_disk
from opendsec.vm.disk_kernels import DiskKernel, disk_kernel

pytestmark = [pytest.mark.anyio, *(getattr(pytest.mark, name) for name in FULLVM_NEEDS)]
OURS = ("lost+found", "etc", "dev", "proc", "sys", "run", "tmp")
ACL = bytes.fromhex("02000000 01000600ffffffff 02000400d2040000 04000400ffffffff 10000400ffffffff 20000400ffffffff")
CAPABILITY = bytes.fromhex("0100000200200000000000000000000000000000")


@pytest.fixture(scope="module")
def kernel() -> Iterator[DiskKernel]:
    with disk_kernel(STATE_DIR, environment=ENVIRONMENT, say=print) as found:
        yield found


def strange_image(store: ImageStore) -> Image:
    """Two layers with all that a file can be."""
    with store.staging() as work:
        tree = work / "tree"
        (tree / "d/below").mkdir(parents=True)
        for name in ("set-id", "d/owned", "linked", "sparse", "gone", "name\nwith \udcff"):
            (tree / name).write_bytes(name.encode(errors="surrogateescape"))
        os.link(tree / "linked", tree / "d/linked too")
        os.truncate(tree / "sparse", 3 * MIB)
        os.chown(tree / "d/owned", 1234, 99)
        (tree / "set-id").chmod(0o6755)
        (tree / "d").chmod(0o1770)
        (tree / "link").symlink_to("/nowhere/at all")
        (tree / "long link").symlink_to("x" * 900)
        os.mkfifo(tree / "fifo")
        os.mknod(tree / "null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
        os.mknod(tree / "block", stat.S_IFBLK | 0o600, os.makedev(259, 300))
        os.setxattr(tree / "d/owned", "user.note", b"\0\xff")
        os.setxattr(tree / "set-id", "security.capability", CAPABILITY)
        os.setxattr(tree / "d", "system.posix_acl_access", ACL)
        os.setxattr(tree / "d", "trusted.note", b"kept")
        tree.chmod(0o750)
        for path in sorted(tree.rglob("*"), reverse=True):
            os.utime(path, (1_600_000_000, 1_600_000_001), follow_symlinks=False)
        layer = make_layer(store, work, tree)
        store.publish("below", layers=[layer], config=ImageConfig(), source="test")
    above = make_part(store, "above", {"/d/below/new": "new"}, role=LayerRole.BASE, removed=["/gone"])
    layers = [*store.get("below").layers, *above.layers]
    return store.publish("strange", layers=layers, config=ImageConfig(workdir="/d"), source="test")


@contextmanager
def mounted(place: Path, file: Path) -> Iterator[Path]:
    """The root partition of a disk."""
    raw, target = place / "raw", place / "mounted"
    subprocess.run(["qemu-img", "convert", "-O", "raw", str(file), str(raw)], check=True)
    target.mkdir()
    subprocess.run(["mount", "-o", f"ro,noload,offset={ROOT_AT}", str(raw), str(target)], check=True)
    try:
        yield target
    finally:
        subprocess.run(["umount", str(target)], check=True)


def seconds(tree: dict[str, tuple[object, ...]]) -> dict[str, tuple[object, ...]]:
    """Times as ext4 is given them; a layer made on top changes that of the root."""
    found = {}
    for name, (mode, owner, time_ns, *rest) in tree.items():
        assert isinstance(time_ns, int)
        found[name] = (mode, owner, None if name == "." else time_ns // 10**9, *rest)
    return found


@pytest.mark.loop
def test_every_file_is_as_in_the_image(store: ImageStore, disk: Path, kernel: DiskKernel) -> None:
    image = strange_image(store)
    made = build_disk(store, "d", DiskRecipe(image="strange", modules=False), kernel=kernel, agent=GUEST_PATH)
    assert made.config.workdir == "/d"
    assert made.config.labels["opendsec.from"] == image.digest
    assert kernel.facts.sha256 in made.config.labels["opendsec.kernel"]
    with mounted(disk, store.blob_path(made.layers[0].digest)) as found, shown(store, image.layers) as wanted:
        left, right = seconds(tree_of(wanted)), seconds(tree_of(found, skip=OURS))
        right = {name: facts for name, facts in right.items() if name.split("/")[0] not in OURS}
        assert difference(left, right) == ""
        assert (found / "etc/hostname").read_text() == "d\n"
    assert list((store.root / "staging").iterdir()) == []


def test_what_cannot_be_made_leaves_nothing(store: ImageStore, kernel: DiskKernel) -> None:
    make_busybox_image(store)

    def build(name: str, **recipe: object) -> None:
        asked = DiskRecipe(**{"image": "busybox", "modules": False, **recipe})  # type: ignore[arg-type]
        build_disk(store, name, asked, kernel=kernel, agent=GUEST_PATH)

    with pytest.raises(InvalidSpecError, match="size_mb: 140 is not between"):
        build("small", size_mib=140)
    build("d")
    with pytest.raises(InvalidSpecError, match="is a disk already"):
        build("again", image="d")
    with pytest.raises(ConflictError):
        build("d")
    assert [image.name for image in store.list()] == ["busybox", "d"]
    assert list((store.root / "staging").iterdir()) == []


@pytest.fixture
async def place() -> AsyncIterator[Place]:
    async with fullvm_place() as made:
        yield made


async def test_it_boots_with_its_kernel_s_modules_on_a_larger_disk(place: Place, kernel: DiskKernel) -> None:
    path, _ = disks()
    recipe = DiskRecipe(image="configured", memory_mb=PC_MEMORY_MIB)
    image = build_disk(
        ImageStore(path / "store"), "with-modules", recipe, kernel=kernel, agent=GUEST_PATH, replace_old=True
    )
    assert image.config.machine is not None
    least = image.config.machine.virtual_bytes // MIB + 1
    plan = replace(place.plan(resources=Resources(disk_limit_mb=least + 1000)), image=image)
    try:
        box = Sandbox(place.backend, plan, await place.backend.start(plan))
        script = "modprobe overlay && grep -c ^overlay /proc/modules; uname -r; hostname; cat /etc/resolv.conf"
        said = (await box.run(script)).stdout.decode()
        assert said == f"1\n{kernel.release}\nwith-modules\nnameserver 10.0.2.3\n"
        size_kib = int((await box.run("df -k / | tail -1 | awk '{print $2}'")).stdout)
        assert size_kib > (least + 1000 - ROOT_AT // MIB) * 1024 * 0.95
        assert (await box.run("ip -4 addr show eth0 | grep -o 10.0.2.15/24")).stdout == b"10.0.2.15/24\n"
        await place.backend.stop(box.running.handle, grace_s=30)
        serial = plan.state_dir / "serial.log"
        assert not serial.exists() or b"panic" not in serial.read_bytes()
    finally:
        await place.destroy(plan)


@pytest.mark.loop
@pytest.mark.parametrize(("room_mib", "modules"), [(12, False), (26, False), (40, False), (60, True)])
def test_a_full_disk_of_the_host_is_said(disk: Path, kernel: DiskKernel, room_mib: int, modules: bool) -> None:
    file, small = disk / "file", disk / "small"
    with file.open("wb") as image:
        image.truncate(room_mib * MIB)
    subprocess.run(["mkfs.ext4", "-q", "-m0", "-N2000", "-O", "^has_journal", str(file)], check=True)
    small.mkdir()
    subprocess.run(["mount", "-o", "loop", str(file), str(small)], check=True)
    try:
        store = ImageStore(small / "store")
        make_busybox_image(store)
        with pytest.raises(DiskFullError):
            build_disk(store, "d", DiskRecipe(image="busybox", modules=modules), kernel=kernel, agent=GUEST_PATH)
        assert [image.name for image in store.list()] == ["busybox"]
        assert list((store.root / "staging").iterdir()) == []
    finally:
        subprocess.run(["umount", str(small)], check=True)
