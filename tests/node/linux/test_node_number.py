"""Platforms of one kernel claim different numbers, and keep them as long as they need to."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from opendsec.linux import node_number
from opendsec.linux.cgroup import find_mounts
from opendsec.linux.node_number import NUMBERS, claim
from opendsec.linux.slots import SLOTS

pytestmark = [pytest.mark.anyio, pytest.mark.root, pytest.mark.cgroup]


@pytest.fixture
def tree(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A part of the v2 tree that is ours: claims outside are not seen."""
    monkeypatch.setattr(node_number, "_OWN_PATIENCE_S", 0.1)
    unified = find_mounts().unified
    assert unified is not None
    top = unified / f"opendsec-test-numbers-{os.getpid()}"
    top.mkdir()
    try:
        yield top
    finally:
        for folder, _, _ in os.walk(top, topdown=False):
            Path(folder).rmdir()


def sandbox_of(tree: Path, root: str) -> Path:
    """A live sandbox's control group."""
    group = tree / root / "latency" / "sbx"
    group.mkdir(parents=True)
    return group


async def test_everybody_has_another_number_and_nothing_in_common(tree: Path) -> None:
    with contextlib.ExitStack() as stack:
        claims = [stack.enter_context(await claim(tree, owner=f"/state/{number}")) for number in NUMBERS]
        assert [one.number for one in claims] == list(NUMBERS)
        for what in ("root", "links", "table", "prefix", "first_slot"):
            assert len({getattr(one, what) for one in claims}) == len(claims)
        assert claims[0].root == "opendsec"
        assert 2**28 + (claims[-1].first_slot + SLOTS) * 65_536 <= 2**32 - 65_536
        with pytest.raises(OSError, match="platforms use this kernel") as raised:
            await claim(tree, owner="/state/one-more")
        assert raised.value.errno == errno.EUSERS


async def test_a_restarted_edge_has_its_number_again(tree: Path) -> None:
    with await claim(tree, owner="/a") as first, await claim(tree, owner="/b") as second:
        assert (first.number, second.number) == (0, 1)
        sandbox_of(tree, second.root)
    with await claim(tree, owner="/b") as again, await claim(tree, owner="/c") as third:
        assert (again.number, third.number) == (1, 0)  # nothing of /a is left, so 0 is free


async def test_a_number_with_sandboxes_is_nobody_elses(tree: Path) -> None:
    with await claim(tree, owner="/a", root="chosen") as first:
        group = sandbox_of(tree, first.root)
    with await claim(tree, owner="/b") as second:
        assert second.number == 1
    group.rmdir()
    with await claim(tree, owner="/c") as third:
        assert third.number == 0


async def test_one_owner_runs_once(tree: Path) -> None:
    with await claim(tree, owner="/a"), pytest.raises(BlockingIOError):
        await claim(tree, owner="/a")
    (await claim(tree, owner="/a")).release()
    assert not list(tree.glob("opendsec.*"))
