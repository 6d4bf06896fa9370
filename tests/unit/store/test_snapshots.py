"""Snapshots in the store: whole or not there, whatever comes between; whose they are; and what they keep from going."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path

import pytest

from opendsec.errors import ConflictError, DiskFullError, InvalidSpecError, NotFoundError, SnapshotInvalidError
from opendsec.model.ids import SandboxId
from opendsec.model.image import ImageConfig
from opendsec.model.spec import BackendKind, SandboxSpec
from opendsec.store import snapshots as module
from opendsec.store.durable import remove_tree
from opendsec.store.fsck import Fault, check
from opendsec.store.gc import collect
from opendsec.store.images import ImageStore
from opendsec.store.layout import layer_files
from opendsec.store.snapshots import Snapshot, Snapshots, snapshots_of

BOX, OTHER = SandboxId("sbx-local-aaaaaaaaaaaaaaaa"), SandboxId("sbx-local-bbbbbbbbbbbbbbbb")


@pytest.fixture
def store(tmp_path: Path) -> ImageStore:
    return ImageStore(tmp_path / "store")


@pytest.fixture
def snapshots(store: ImageStore) -> Snapshots:
    return snapshots_of(store)


def draft(name: str = "warm", project: str = "default") -> Snapshot:
    return Snapshot(
        name=name,
        project=project,
        backend=BackendKind.DUMMY,
        spec=SandboxSpec(image="debian", backend=BackendKind.DUMMY, env={"RAW": "\udcff"}),
        source=BOX,
        binding="dummy 1",
        image_digest="sha256:" + "0" * 64,
        image_config=ImageConfig(),
        image_layers=(),
        image_parts=(),
        files={},
        created_at=12.5,
    )


def saved(root: Path, *, memory: bytes = b"memory" * 1000) -> Path:
    made = root / "made"
    (made / "disk").mkdir(parents=True)
    (made / "memory").write_bytes(memory)
    (made / "disk" / "data").write_bytes(b"data")
    return made


def nothing_is_left(store: ImageStore) -> None:
    assert [path for path in store.layout.snapshots.rglob("*") if path.is_file()] == []
    assert [path for path in store.layout.staging.iterdir() if not path.name.startswith(".")] == []


def test_what_was_published_is_found_whole(snapshots: Snapshots, tmp_path: Path) -> None:
    made = snapshots.publish(draft(), saved(tmp_path))
    found = snapshots.get("default", "warm")
    assert found == made
    assert found == replace(draft(), files=made.files)
    assert {name: file.size_bytes for name, file in found.files.items()} == {"memory": 6000, "disk/data": 4}
    path = snapshots.path("default", "warm")
    assert (path / "memory").read_bytes() == b"memory" * 1000
    assert oct((path / "memory").stat().st_mode & 0o777) == "0o444"
    snapshots.verify("default", "warm")
    (line,) = snapshots.summaries("default")
    assert (line.name, line.size_bytes, line.users, line.problem) == ("warm", 6004, 0, "")
    assert 0 < line.disk_bytes < 65536


def test_only_root_of_the_host_may_read_them(store: ImageStore) -> None:
    assert oct(store.layout.snapshots.stat().st_mode & 0o777) == "0o700"


def test_no_project_sees_anothers(snapshots: Snapshots, tmp_path: Path) -> None:
    snapshots.publish(draft(), saved(tmp_path))
    snapshots.publish(draft(project="other"), saved(tmp_path / "b"))
    assert snapshots.remove("other", "warm").name == "warm"
    assert snapshots.summaries("other") == []
    with pytest.raises(NotFoundError):
        snapshots.get("other", "warm")
    assert [one.name for one in snapshots.summaries("default")] == ["warm"]


def test_a_taken_name_stays(snapshots: Snapshots, tmp_path: Path) -> None:
    snapshots.publish(draft(), saved(tmp_path))
    with pytest.raises(ConflictError, match="already"):
        snapshots.publish(draft(), saved(tmp_path / "b", memory=b"other"))
    assert (snapshots.path("default", "warm") / "memory").stat().st_size == 6000


@pytest.mark.parametrize("name", ["../x", "", "a/b", ".", "x" * 200])
def test_names_are_checked(snapshots: Snapshots, name: str) -> None:
    with pytest.raises(InvalidSpecError):
        snapshots.get("default", name)
    with pytest.raises(InvalidSpecError):
        snapshots.remove("default", name)


class Crash(BaseException):
    """Nothing after it is done."""


@pytest.mark.parametrize(
    ("where", "what"),
    [
        ("sync_file", Crash),
        ("make_table", Crash),
        ("write_synced", Crash),
        ("sync_directory", Crash),
        ("write_synced", OSError(errno.ENOSPC, "full")),
        ("sync_file", OSError(errno.EDQUOT, "full")),
    ],
)
def test_what_ends_a_publish_leaves_nothing_or_all(
    store: ImageStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, what: type[Crash] | OSError
) -> None:
    def fail(*_args: object, **_named: object) -> None:
        raise what

    with monkeypatch.context() as patched:
        patched.setattr(module, where, fail)
        with pytest.raises(Crash if what is Crash else DiskFullError):
            snapshots_of(store).publish(draft(), saved(tmp_path))
    nothing_is_left(store)
    made = snapshots_of(store).publish(draft(), saved(tmp_path / "again"))
    assert snapshots_of(store).get("default", "warm") == made


@pytest.mark.parametrize(
    ("harm", "why"),
    [
        (lambda at: (at / "files" / "memory").unlink(), "memory is missing"),
        (lambda at: os.truncate(at / "files" / "memory", 5), "memory has 5 bytes, the manifest says 6000"),
        (lambda at: (at / "manifest.json").write_bytes(b"{"), "its manifest cannot be read"),
        (lambda at: (at / "manifest.json").write_bytes(b'{"version": 1}'), "its manifest cannot be read"),
    ],
)
def test_a_damaged_one_is_named_and_can_be_removed(
    snapshots: Snapshots, store: ImageStore, tmp_path: Path, harm: object, why: str
) -> None:
    snapshots.publish(draft(), saved(tmp_path))
    harm(store.layout.snapshots / "default" / "warm")  # type: ignore[operator]
    with pytest.raises(SnapshotInvalidError, match=why):
        snapshots.get("default", "warm")
    assert why in snapshots.summaries("default")[0].problem
    assert not check(store).sound
    snapshots.remove("default", "warm")
    nothing_is_left(store)


def test_no_byte_of_a_manifest_can_change_unseen(snapshots: Snapshots, store: ImageStore, tmp_path: Path) -> None:
    snapshots.publish(draft(), saved(tmp_path))
    path = store.layout.snapshots / "default" / "warm" / "manifest.json"
    good = path.read_bytes()
    path.chmod(0o644)
    for at in range(len(good)):
        path.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
        with pytest.raises(SnapshotInvalidError, match=r"'warm' is damaged.* manifest"):
            snapshots.get("default", "warm")
    for content in (good.partition(b"\n")[0], good + b"\n", good[:-1], b""):
        path.write_bytes(content)
        with pytest.raises(SnapshotInvalidError, match=r"'warm' is damaged.* manifest"):
            snapshots.get("default", "warm")
    assert not check(store, quick=True).sound
    path.write_bytes(good)
    snapshots.verify("default", "warm")


def test_other_bytes_of_the_same_size_are_found_by_a_check(
    snapshots: Snapshots, store: ImageStore, tmp_path: Path
) -> None:
    snapshots.publish(draft(), saved(tmp_path))
    file = snapshots.path("default", "warm") / "memory"
    file.chmod(0o644)
    file.write_bytes(b"M" * 6000)
    snapshots.get("default", "warm")
    with pytest.raises(SnapshotInvalidError, match="the bytes of memory"):
        snapshots.verify("default", "warm")
    assert check(store, quick=True).sound
    (finding,) = check(store).findings
    assert (finding.fault, finding.file) == (Fault.DAMAGED, "snapshots/default/warm")
    check(store, repair=True)
    assert check(store).sound


def test_links_are_refused(snapshots: Snapshots, store: ImageStore, tmp_path: Path) -> None:
    made = saved(tmp_path)
    (made / "link").symlink_to("/etc/passwd")
    with pytest.raises(SnapshotInvalidError, match="link is neither"):
        snapshots.publish(draft(), made)
    nothing_is_left(store)


def test_one_that_is_needed_stays_unless_forced(snapshots: Snapshots, store: ImageStore, tmp_path: Path) -> None:
    snapshots.publish(draft(), saved(tmp_path))
    for user in (BOX, OTHER, BOX):
        assert snapshots.use("default", "warm", user) == snapshots.path("default", "warm")
    assert snapshots.summaries("default")[0].users == 2
    snapshots.release("default", "warm", BOX)
    with pytest.raises(ConflictError, match=OTHER) as raised:
        snapshots.remove("default", "warm")
    assert raised.value.detail["needed_by"] == [OTHER]
    snapshots.get("default", "warm")
    with (snapshots.path("default", "warm") / "memory").open("rb") as reading:
        snapshots.remove("default", "warm", force=True)
        assert len(reading.read()) == 6000, "who has it open reads on"
    nothing_is_left(store)
    snapshots.release("default", "warm", OTHER)
    with pytest.raises(NotFoundError):
        snapshots.use("default", "warm", OTHER)


def test_a_user_that_comes_while_it_is_removed_keeps_it(
    snapshots: Snapshots, store: ImageStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshots.publish(draft(), saved(tmp_path))

    def nobody_yet(project: str, name: str) -> list[str]:
        return []

    monkeypatch.setattr(snapshots, "users", nobody_yet)
    snapshots.use("default", "warm", BOX)  # it left its file just after that look
    with pytest.raises(ConflictError, match=BOX):
        snapshots.remove("default", "warm")
    snapshots_of(store).verify("default", "warm")


def test_another_file_system_is_copied_from(store: ImageStore, monkeypatch: pytest.MonkeyPatch) -> None:
    made = saved(Path("/dev/shm") / f"ods-{os.getpid()}") if Path("/dev/shm").is_dir() else None
    assert made is not None
    try:
        snapshots_of(store).publish(draft(), made)
        snapshots_of(store).verify("default", "warm")
        assert (snapshots_of(store).path("default", "warm") / "disk" / "data").read_bytes() == b"data"
    finally:
        remove_tree(made.parent)


def test_its_layers_are_not_garbage(store: ImageStore, snapshots: Snapshots, tmp_path: Path) -> None:
    with store.staging() as work:
        (work / "meta").write_bytes(b"m" * 64)
        (work / "data").write_bytes(b"d" * 64)
        image = store.publish("base", layers=[store.stage_layer(work / "meta", work / "data")], config=ImageConfig())
    snapshots.publish(replace(draft(), image_layers=image.layers), saved(tmp_path))
    store.remove("base")
    for path in store.layout.claims.iterdir():
        path.unlink()
    collect(store, grace_s=0)
    assert all(store.layout.content(file).exists() for layer in image.layers for file in layer_files(layer))
    assert check(store).sound
    snapshots.remove("default", "warm")
    collect(store, grace_s=0)
    assert not any(store.layout.content(file).exists() for layer in image.layers for file in layer_files(layer))


def test_nothing_is_collected_while_it_is_not_known_what_one_needs(
    store: ImageStore, snapshots: Snapshots, tmp_path: Path
) -> None:
    snapshots.publish(draft(), saved(tmp_path))
    (store.layout.snapshots / "default" / "warm" / "manifest.json").write_bytes(b"?")
    with pytest.raises(Exception, match="so nothing is collected"):
        collect(store, grace_s=0)
