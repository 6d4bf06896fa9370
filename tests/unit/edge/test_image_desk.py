"""A store that cannot be read is a fault of the node, told as one; and a listing that is left ends."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path

import pytest

from opendsec.edge.image_desk import BATCH_LINES, ImageDesk
from opendsec.errors import NodeError
from opendsec.store.images import ImageStore
from opendsec.store.loading.direct import DirectLoader
from opendsec.store.mounts import LayerMounts

pytestmark = pytest.mark.anyio


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[ImageDesk]:
    store = ImageStore(tmp_path / "store")
    layers = LayerMounts(DirectLoader(store, tmp_path / "copies"), tmp_path / "layers")
    with ImageDesk(store, layers) as made:
        yield made


async def test_a_store_that_cannot_be_read_is_the_nodes_fault(desk: ImageDesk, tmp_path: Path) -> None:
    assert await desk.page(prefix="", limit=10, after="") == ((), "")
    shutil.rmtree(tmp_path / "store")
    with pytest.raises(NodeError) as caught:
        await desk.page(prefix="", limit=10, after="")
    assert caught.value.retryable
    assert caught.value.detail["path"] == str(tmp_path / "store/tags")


async def test_a_stream_that_fails_tells_what_failed_and_one_that_is_left_ends(desk: ImageDesk) -> None:
    ended = threading.Event()

    def numbers(count: int) -> Iterator[int]:
        try:
            yield from range(count)
            raise OSError(5, "Input/output error", "/layer")
        finally:
            ended.set()

    batches: list[bytes] = []

    async def read_all() -> None:
        async for batch in desk._streamed(lambda: numbers(BATCH_LINES)):
            batches.append(batch)  # noqa: PERF401 - what came before the failure is looked at

    with pytest.raises(NodeError, match="Input/output error"):
        await read_all()
    assert b"".join(batches).count(b"\n") == BATCH_LINES
    assert ended.is_set()
    ended.clear()
    async with aclosing(desk._streamed(lambda: numbers(10 * BATCH_LINES))) as lines:
        assert (await anext(lines)).count(b"\n") <= BATCH_LINES
        assert not ended.is_set()
    assert ended.wait(60)


async def test_a_stream_may_outlive_the_desk(tmp_path: Path) -> None:
    store = ImageStore(tmp_path / "store")
    layers = LayerMounts(DirectLoader(store, tmp_path / "copies"), tmp_path / "layers")
    with ImageDesk(store, layers) as desk:
        lines = desk._streamed(lambda: range(10 * BATCH_LINES))
        await anext(lines)
    await lines.aclose()
