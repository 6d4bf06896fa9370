"""Collecting: only what nobody needs goes, not before its time, and a publisher or a node that comes between wins."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opendsec.errors import ConflictError, ImageInvalidError, ImageNotFoundError
from opendsec.model.image import Image, ImageConfig, Layer, LayerRole
from opendsec.store import gc, staging
from opendsec.store.compose import pinned
from opendsec.store.gc import Facts, collect, keeping, unneeded_since
from opendsec.store.images import ImageStore
from opendsec.store.layout import layer_files, manifest_file
from opendsec.store.leases import Leases


@pytest.fixture
def store(tmp_path: Path) -> ImageStore:
    return ImageStore(tmp_path / "store")


def publish(
    store: ImageStore,
    name: str,
    *contents: bytes,
    base: str = "",
    toolkits: Sequence[str] = (),
    layers: Sequence[Layer] = (),
    role: LayerRole = LayerRole.BASE,
) -> Image:
    """Layers of two files each: `contents` are their data."""
    with store.staging() as work:
        staged = []
        for number, content in enumerate(contents):
            meta, data = work / f"{number}.meta", work / f"{number}.data"
            meta.write_bytes(b"meta of " + content)
            data.write_bytes(content)
            staged.append(store.stage_layer(meta, data, role=role))
        return store.publish(
            name, layers=[*layers, *staged], config=ImageConfig(), base=base, toolkits=toolkits, replace=True
        )


def content(store: ImageStore) -> set[str]:
    kinds = ("manifests", "blobs", "data", "tables")
    return {str(path.relative_to(store.root)) for kind in kinds for path in (store.root / kind / "sha256").iterdir()}


def files_of(image: Image) -> set[str]:
    return {manifest_file(image.digest), *(file for layer in image.layers for file in layer_files(layer))}


def age(store: ImageStore, seconds: float) -> None:
    """As if everything had happened so much earlier."""
    for directory in (store.layout.claims, store.layout.removed):
        for path in directory.iterdir():
            at = path.stat().st_mtime - seconds
            os.utime(path, (at, at))


def test_nothing_goes_before_its_time_and_the_time_is_when_the_name_went(store: ImageStore) -> None:
    image = publish(store, "x", b"1")
    age(store, 10_000)  # old files, published long ago
    store.remove("x")
    done = collect(store)
    assert (done.files, done.waiting) == ((), 4)
    assert done.next_in_s == pytest.approx(3600, abs=5)
    age(store, 3500)
    assert collect(store).files == ()
    age(store, 200)
    done = collect(store)
    assert set(done.files) == files_of(image)
    assert content(store) == set()


def test_a_dry_run_says_the_same_and_does_nothing(store: ImageStore) -> None:
    image = publish(store, "x", b"1")
    store.remove("x")
    told = collect(store, grace_s=0, dry_run=True)
    assert set(told.files) == files_of(image) == content(store)
    done = collect(store, grace_s=0)
    assert dataclasses.replace(told, dry_run=False) == done


def test_a_name_that_means_something_else_now(store: ImageStore) -> None:
    first = publish(store, "x", b"1")
    second = publish(store, "x", b"2")
    assert collect(store).files == ()
    age(store, 4000)
    assert set(collect(store).files) == files_of(first)
    assert content(store) == files_of(second)


def test_orphans_wait_from_when_they_were_first_seen(store: ImageStore, monkeypatch: pytest.MonkeyPatch) -> None:
    with store.staging() as work:
        (work / "layer").write_bytes(b"bytes")
        staged = store.stage_layer(work / "layer")
        os.link(work / "layer", store.blob_path(staged.layer.digest))
    path = store.blob_path(staged.layer.digest)
    os.utime(path, (0, 0))
    assert (collect(store).waiting, path.exists()) == (1, True)
    real = staging.file_system_time
    monkeypatch.setattr(gc, "file_system_time", lambda file: real(file) + 3000)
    assert (collect(store).waiting, path.exists()) == (1, True)
    monkeypatch.setattr(gc, "file_system_time", lambda file: real(file) + 3700)
    assert (collect(store).waiting, path.exists()) == (0, False)


def test_a_damaged_memory_starts_the_grace_period_anew(store: ImageStore) -> None:
    publish(store, "x", b"1")
    store.remove("x")
    store.layout.unreferenced.write_bytes(b"{broken")
    assert collect(store).files == ()


def test_what_is_named_by_digest_stays_with_all_it_needs(store: ImageStore) -> None:
    base = publish(store, "base", b"1")
    tool = publish(store, "tool", b"2", role=LayerRole.TOOLKIT)
    middle = publish(store, "middle", b"3", base=pinned(base))
    top = publish(store, "top", b"4", base=pinned(middle), toolkits=[pinned(tool)])
    for name in ("base", "tool", "middle"):
        with pytest.raises(ConflictError, match="is needed by"):
            store.remove(name)
        store.remove(name, force=True)
    collect(store, grace_s=0)
    assert content(store) == files_of(base) | files_of(tool) | files_of(middle) | files_of(top)
    assert store.compose("top").layers == (*base.layers, *middle.layers, *top.layers, *tool.layers)
    store.remove("top")
    collect(store, grace_s=0)
    assert content(store) == set()


def test_what_a_name_leads_to_is_refused_by_name(store: ImageStore) -> None:
    publish(store, "base", b"1")
    publish(store, "top", b"2", base="base")
    with pytest.raises(ConflictError, match="'base' is needed by top") as caught:
        store.remove("base")
    assert caught.value.detail["needed_by"] == ["top"]
    store.remove("base", force=True)
    with pytest.raises(ImageNotFoundError):
        store.compose("top")


def test_a_damaged_image_stops_no_removal(store: ImageStore) -> None:
    publish(store, "a", b"1")
    image = publish(store, "b", b"2")
    for path in (store.root / manifest_file(image.digest), store.layout.tag("b")):
        path.chmod(0o644)
        path.write_bytes(b"damaged")
        store.remove("a")
        publish(store, "a", b"1")
    assert store.remove("b").layers == ()
    assert [one.name for one in store.list()] == ["a"]


def test_a_reference_with_a_digest_must_lead_somewhere(store: ImageStore) -> None:
    with pytest.raises(ImageNotFoundError, match="base@sha256"):
        publish(store, "top", b"2", base=f"base@sha256:{'0' * 64}")
    assert store.list() == []


def test_with_a_name_that_leads_nowhere_nothing_is_collected(store: ImageStore) -> None:
    publish(store, "gone", b"1")
    store.remove("gone")
    image = publish(store, "x", b"2")
    (store.root / manifest_file(image.digest)).unlink()
    before = content(store)
    with pytest.raises(ImageInvalidError, match="what image 'x' needs cannot be known"):
        collect(store, grace_s=0)
    assert content(store) == before
    assert store.remove("x").digest == ""
    collect(store, grace_s=0)
    assert content(store) == set()


def test_one_at_a_time(store: ImageStore) -> None:
    with keeping(store), pytest.raises(ConflictError, match="another process"):
        collect(store)


def test_what_a_node_has_mounted_stays_until_it_is_unmounted_or_the_node_is_dead(
    store: ImageStore, tmp_path: Path
) -> None:
    image = publish(store, "x", b"1", b"2")
    leases = Leases(store.layout, tmp_path / "mounts")
    leases.take(image.layers[0])
    store.remove("x")
    collect(store, grace_s=0)
    assert content(store) == set(layer_files(image.layers[0]))
    done = collect(store, grace_s=0)
    assert done.leased_bytes == done.kept_bytes > 0
    assert store.publish("again", layers=[image.layers[0]], config=ImageConfig()).layers == (image.layers[0],)
    store.remove("again")
    os.utime(leases.file, (1e9, 1e9))
    collect(store, grace_s=0)
    assert content(store) == set()


def test_a_lease_that_cannot_be_read_may_need_anything(store: ImageStore) -> None:
    publish(store, "x", b"1")
    store.remove("x")
    (store.layout.nodes / "strange.json").write_text("{}")
    with pytest.raises(ImageInvalidError, match="lease cannot be read"):
        collect(store, grace_s=0)
    assert content(store)


def _between(monkeypatch: pytest.MonkeyPatch, step: str, action: Callable[[], object], *, after: bool = False) -> None:
    """Do something once, just before (or after) the first such step of the collection, whoever holds the lock."""
    real = getattr(gc, step)
    done: list[bool] = []

    def act() -> None:
        if not done:
            done.append(True)
            with monkeypatch.context() as here:
                here.setattr(staging, "_flock", lambda *_arguments, **_more: None)
                action()

    def around(*args: object) -> object:
        if after:
            answer = real(*args)
            act()
            return answer
        act()
        return real(*args)

    monkeypatch.setattr(gc, step, around)


STEPS = ["_sizes", "needed_by_tags", "unneeded_since", "_move_away"]


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("step", STEPS)
def test_a_publisher_that_comes_between_loses_nothing(
    store: ImageStore, monkeypatch: pytest.MonkeyPatch, step: str, after: bool
) -> None:
    """Also where locks reach nobody: the publisher does not wait for the lock that the collection holds."""
    publish(store, "old", b"1", b"2")
    store.remove("old")
    age(store, 10_000)
    _between(monkeypatch, step, lambda: publish(store, "new", b"1", b"2"), after=after)
    collect(store, grace_s=0)
    assert files_of(store.get("new")) == content(store)
    assert not list(store.layout.condemned.iterdir())


@pytest.mark.parametrize("step", STEPS)
def test_times_as_coarse_as_seconds(store: ImageStore, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    """The new claim has the very time of the old one."""
    publish(store, "old", b"1", b"2")
    store.remove("old")

    def again() -> None:
        publish(store, "new", b"1", b"2")
        for path in (*store.layout.claims.iterdir(), *store.layout.removed.iterdir()):
            os.utime(path, (1e9, 1e9))

    for path in store.layout.claims.iterdir():
        os.utime(path, (1e9, 1e9))
    _between(monkeypatch, step, again)
    collect(store, grace_s=0)
    assert files_of(store.get("new")) == content(store)


@pytest.mark.parametrize("step", STEPS)
def test_a_publisher_that_uses_a_layer_again_loses_nothing(
    store: ImageStore, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    image = publish(store, "old", b"1", b"2")
    store.remove("old")
    age(store, 10_000)
    _between(monkeypatch, step, lambda: publish(store, "new", b"3", layers=image.layers))
    collect(store, grace_s=0)
    assert files_of(store.get("new")) == content(store)


@pytest.mark.parametrize("step", STEPS)
def test_a_node_that_mounts_meanwhile_keeps_its_layers(
    store: ImageStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, step: str
) -> None:
    image = publish(store, "old", b"1")
    store.remove("old")
    _between(monkeypatch, step, lambda: Leases(store.layout, tmp_path).take(image.layers[0]))
    collect(store, grace_s=0)
    assert set(layer_files(image.layers[0])) <= content(store)


def test_what_a_killed_collection_had_moved_away_comes_back(store: ImageStore, monkeypatch: pytest.MonkeyPatch) -> None:
    image = publish(store, "x", b"1")
    store.remove("x")

    real = gc._Collection._condemn

    def die(run: gc._Collection, batch: Sequence[str]) -> tuple[int, list[str]]:
        real(run, batch)
        raise KeyboardInterrupt

    monkeypatch.setattr(gc._Collection, "_condemn", die)
    with pytest.raises(KeyboardInterrupt):
        collect(store, grace_s=0)
    monkeypatch.undo()
    assert len(list(store.layout.condemned.iterdir())) == 4
    publish(store, "y", b"1")
    collect(store)
    assert not list(store.layout.condemned.iterdir())
    assert content(store) == files_of(image)


def test_records_do_not_pile_up(store: ImageStore) -> None:
    for number in range(5):
        publish(store, "x", str(number).encode())
    age(store, 10_000)
    for name, at in ((".half.json.1", 1e9), ("dead.json", 1e9)):
        (store.layout.nodes / name).write_text('{"schema": 1, "host": "h", "layers": {}}')
        os.utime(store.layout.nodes / name, (at, at))
    (store.layout.nodes / ".half.json.2").touch()
    collect(store, grace_s=0)
    assert [path.name for path in store.layout.nodes.iterdir()] == [".half.json.2"]
    assert len(list(store.layout.claims.iterdir())) == 0
    assert len(list(store.layout.removed.iterdir())) == 0
    assert store.get("x").layers


_files = st.sampled_from([f"m{n}" for n in range(3)] + [f"f{n}" for n in range(6)])
_times = st.floats(0, 1000)


@given(
    content=st.dictionaries(_files, st.just(1)),
    needed=st.sets(_files),
    nameless=st.dictionaries(st.sampled_from(["m0", "m1", "m2"]), st.sets(_files)),
    lost=st.dictionaries(st.sampled_from(["m0", "m1", "m2"]), _times),
    seen=st.dictionaries(_files, _times),
)
def test_the_decision(
    content: dict[str, int],
    needed: set[str],
    nameless: dict[str, set[str]],
    lost: dict[str, float],
    seen: dict[str, float],
) -> None:
    nameless = {name: files | {name} for name, files in nameless.items() if name in content and name not in needed}
    facts = Facts(content=content, needed=needed, nameless=nameless, lost_at=lost, seen_at=seen, now=500.0)
    since = unneeded_since(facts)
    assert since.keys() == content.keys() - needed
    assert all(at <= 500 for at in since.values())
    for manifest, files in nameless.items():
        assert since[manifest] >= min(500.0, lost.get(manifest, seen.get(manifest, 500.0)))
        assert all(
            since[file] >= min(500.0, lost.get(manifest, seen.get(manifest, 500.0))) for file in files & since.keys()
        )
    for file in since.keys() - {one for files in nameless.values() for one in files}:
        assert since[file] == min(500.0, seen.get(file, 500.0))
