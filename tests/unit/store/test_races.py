"""Many processes publish, replace, compose, remove and collect at once, with the same content and the same names:
nothing published is lost, nothing half-written is seen.
"""

from __future__ import annotations

import multiprocessing
import random
from pathlib import Path

from opendsec.errors import ConflictError, ImageInvalidError, ImageNotFoundError
from opendsec.model.image import Image, ImageConfig, Layer
from opendsec.store.compose import pinned
from opendsec.store.fsck import check
from opendsec.store.gc import collect
from opendsec.store.images import ImageStore, StagedLayer

PROCESSES, TURNS, CONTENTS = 4, 260, 8


def content_of(number: int) -> bytes:
    return f"content {number}".encode() * 100


def stage(store: ImageStore, work: Path, number: int) -> StagedLayer:
    (work / f"{number}.meta").write_bytes(f"meta {number}".encode())
    (work / f"{number}.data").write_bytes(content_of(number))
    return store.stage_layer(work / f"{number}.meta", work / f"{number}.data")


def assert_whole(store: ImageStore, image: Image) -> None:
    for layer in image.layers:
        assert layer.data is not None
        assert store.blob_path(layer.mounted.digest).read_bytes().startswith(b"meta ")
        assert store.data_path(layer.data.digest).read_bytes().startswith(b"content ")
        assert store.table_path(layer.data.digest).stat().st_size == 32


class Life:
    """One process: names of its own, which nobody else touches, and names that all share."""

    def __init__(self, root: Path, seed: int, *, turns: int = TURNS) -> None:
        self.store = ImageStore(root)
        self.random = random.Random(seed)
        self.seed = seed
        self.turns = turns
        self.own: dict[str, str] = {}

    def run(self) -> None:
        for number in range(self.turns):
            turn = self.random.choice([self.publish, self.publish, self.again, self.remove, self.look, self.collect])
            turn()
            for name in self.own if number % 10 == 9 else list(self.own)[:1]:
                assert self.store.get(name).digest == self.own[name]
                assert_whole(self.store, self.store.compose(name))
        for name in list(self.own)[1:]:
            self.store.remove(name, force=True)

    def name(self) -> str:
        return f"own-{self.seed}-{self.random.randrange(3)}"

    def publish(self) -> None:
        name = self.random.choice([self.name(), self.name(), "common"])
        numbers = self.random.sample(range(CONTENTS), 2)
        base = self.random.choice(["", pinned(self.store.get(one)) if (one := next(iter(self.own), "")) else ""])
        with self.store.staging() as work:
            layers = [stage(self.store, work, number) for number in numbers]
            image = self.store.publish(name, layers=layers, config=ImageConfig(), base=base, replace=True)
        if name != "common":
            self.own[name] = image.digest

    def again(self) -> None:
        """A layer of whatever `common` means: it may be gone by then, and is said to be."""
        try:
            layer: Layer = self.store.get("common").layers[0]
            image = self.store.publish(self.name(), layers=[layer], config=ImageConfig(), replace=True)
        except (ImageNotFoundError, ImageInvalidError):
            return
        self.own[image.name] = image.digest

    def remove(self) -> None:
        name = self.random.choice([self.name(), "common"])
        try:
            self.store.remove(name, force=True)
        except ImageNotFoundError:
            assert name not in self.own
        self.own.pop(name, None)

    def look(self) -> None:
        for image in self.store.list():
            assert 1 <= len(image.layers) <= 2

    def collect(self) -> None:
        try:
            collect(self.store, grace_s=0)
        except ConflictError:
            return  # another one does


def _live(root: Path, seed: int) -> None:
    Life(root, seed).run()


def test_more_than_a_thousand_operations_at_once(tmp_path: Path) -> None:
    assert PROCESSES * TURNS > 1000
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_live, args=(tmp_path / "store", seed)) for seed in range(PROCESSES)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
        process.close()
    store = ImageStore(tmp_path / "store")
    assert {image.name.split("-")[0] for image in store.list()} <= {"own", "common"}
    assert check(store).findings == ()
    assert list((store.root / "staging").iterdir()) == []
    for image in store.list():
        store.remove(image.name, force=True)
    collect(store, grace_s=0)
    assert not list((store.root / "data/sha256").iterdir())
