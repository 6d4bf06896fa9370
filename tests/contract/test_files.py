"""Files on every backend: any name, atomic writes, whole trees, and no way out by a symbolic link."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from tests.contract.harness import Sandbox

from opendsec.guest.base import Guest, GuestError

pytestmark = pytest.mark.anyio

NAMES = ("plain", "with space", "new\nline", "emoji 🙂", "%2F", "'\"\\$`", "x" * 255, "-rf", "\udcff\udcfe")


async def chunks(*parts: bytes) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


async def read(guest: Guest, path: str, *, offset: int = 0, length: int | None = None) -> bytes:
    _, data = await guest.open_read(path, offset=offset, length=length)
    return b"".join([chunk async for chunk in data])


async def next_of(watch: AsyncIterator[tuple[str, str]]) -> tuple[str, str]:
    return await anext(watch)


@pytest.mark.parametrize("name", NAMES)
async def test_any_name(box: Sandbox, name: str) -> None:
    stat = await box.guest.write_file(f"/tmp/d/{name}", chunks(b"con", b"tent"), mode=0o640, parents=True)
    assert (stat.size, stat.mode & 0o7777, stat.kind) == (7, 0o640, "file")
    assert await read(box.guest, f"/tmp/d/{name}") == b"content"
    assert [entry.path for entry in await box.guest.list_dir("/tmp/d")] == [name]
    await box.guest.move(f"/tmp/d/{name}", "/tmp/moved")
    await box.guest.remove("/tmp/moved")
    assert await box.guest.list_dir("/tmp/d") == []


async def test_parts_of_a_large_file(box: Sandbox) -> None:
    data = bytes(range(256)) * 8192
    await box.guest.write_file("/tmp/large", chunks(*(data[at : at + 100_000] for at in range(0, len(data), 100_000))))
    assert await read(box.guest, "/tmp/large") == data
    assert await read(box.guest, "/tmp/large", offset=1_000_000, length=5) == data[1_000_000:1_000_005]
    assert await read(box.guest, "/tmp/large", offset=len(data)) == b""


async def test_a_cut_upload_leaves_the_old_file(box: Sandbox) -> None:
    await box.guest.write_file("/tmp/f", chunks(b"old"))

    async def broken() -> AsyncIterator[bytes]:
        yield b"new"
        raise ConnectionError("cut")

    with pytest.raises(ConnectionError):
        await box.guest.write_file("/tmp/f", broken())
    assert await read(box.guest, "/tmp/f") == b"old"
    assert [entry.path for entry in await box.guest.list_dir("/tmp")] == ["f"]


async def test_errors_carry_the_kernel_number(box: Sandbox) -> None:
    guest = box.guest
    await guest.mkdir("/tmp/d")
    await guest.write_file("/tmp/d/f", chunks(b""))
    for number, call in (
        (2, guest.stat("/tmp/none")),
        (2, guest.write_file("/tmp/none/f", chunks(b""))),
        (17, guest.mkdir("/tmp/d")),
        (39, guest.remove("/tmp/d")),
        (20, guest.list_dir("/tmp/d/f")),
        (21, guest.open_read("/tmp/d")),
        (17, guest.move("/tmp/d/f", "/tmp/d/f", overwrite=False)),
        (36, guest.stat("/tmp/" + "y" * 256)),
    ):
        with pytest.raises(GuestError) as refused:
            await call
        assert (refused.value.code, refused.value.errno) == ("file", number)


async def test_directories(box: Sandbox) -> None:
    await box.guest.mkdir("/tmp/a/b/c", parents=True)
    await box.guest.mkdir("/tmp/a/b/c", parents=True)
    await box.guest.chmod("/tmp/a", 0o700)
    stat = await box.guest.stat("/tmp/a")
    assert (stat.kind, stat.mode & 0o7777) == ("directory", 0o700)
    await box.guest.remove("/tmp/a", recursive=True)
    assert await box.guest.list_dir("/tmp") == []


async def test_a_tree_comes_back_as_it_was(box: Sandbox) -> None:
    for name in NAMES:
        await box.guest.write_file(f"/tmp/tree/sub dir/{name}", chunks(name.encode("utf-8", "replace")), parents=True)
    await box.guest.chmod("/tmp/tree/sub dir/plain", 0o751)
    packed = b"".join([chunk async for chunk in box.guest.pack("/tmp/tree")])
    count, size = await box.guest.unpack("/tmp/copy", chunks(*(packed[at : at + 7] for at in range(0, len(packed), 7))))
    assert (count, size) == (len(NAMES), sum(len(name.encode("utf-8", "replace")) for name in NAMES))
    again = b"".join([chunk async for chunk in box.guest.pack("/tmp/copy")])
    assert len(again) == len(packed)
    assert (await box.guest.stat("/tmp/copy/sub dir/plain")).mode & 0o7777 == 0o751


async def test_a_cut_tree_is_an_error(box: Sandbox) -> None:
    await box.guest.write_file("/tmp/tree/f", chunks(b"content"), parents=True)
    packed = b"".join([chunk async for chunk in box.guest.pack("/tmp/tree")])
    with pytest.raises(GuestError):
        await box.guest.unpack("/tmp/copy", chunks(packed[:-6]))


async def test_a_watch_names_what_changed(box: Sandbox) -> None:
    watch = box.guest.watch("/tmp")
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        first = group.create_task(next_of(watch))
        number = 0
        while not first.done():
            number += 1
            await box.guest.mkdir(f"/tmp/new {number}")
            await asyncio.sleep(0.01)
    event, path = first.result()
    assert event == "created"
    assert path.startswith("/tmp/new ")
    await watch.aclose()  # type: ignore[attr-defined]
