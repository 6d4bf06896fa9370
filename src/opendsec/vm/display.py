"""What somebody sees and does at a machine: its picture, and events of mouse and keyboard, over QEMU's monitor.

A guest decides what its screen is like, at any moment; so sizes are those of the picture itself, and a picture has a
bound. Keys are pressed at a pace guests can follow: their queues are short, and what does not fit is lost in silence.
Whatever a sequence presses, and does not hold to its end because something failed, is let go.
"""

from __future__ import annotations

import asyncio
import os
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from opendsec.errors import InvalidSpecError, NodeError, UnsupportedError
from opendsec.model.keymap import QCODES, Stroke, strokes
from opendsec.model.screen import Action, ActionKind, ScreenSize
from opendsec.vm.q35 import Q35Machine
from opendsec.vm.qmp import MonitorError

MAX_PICTURE_BYTES = 128 * 1024 * 1024
"""Of one PNG; more than the largest picture the display adapters here can hold."""
KEY_S = 0.02
"""Between two events of a keyboard: a PS/2 keyboard remembers 16 bytes, and a BIOS 16 keys."""
_PNG = struct.Struct(">8sI4sII")
_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_ABSOLUTE_MOST = 0x7FFF

Event = dict[str, Any]


async def take_picture(machine: Q35Machine) -> tuple[bytes, ScreenSize]:
    """What its display shows now, as PNG. Raises NodeError, SandboxLostError."""
    with _memory_file() as (reader, writer):
        async with machine.monitor() as qmp:
            number = await qmp.add_fd(writer)
            try:
                await qmp.execute("screendump", {"filename": f"/dev/fdset/{number}", "format": "png"})
            except MonitorError as error:
                raise NodeError(f"QEMU takes no picture of the screen: {error}", retryable=True) from error
            finally:
                await qmp.execute("remove-fd", {"fdset-id": number})
        size = os.fstat(reader).st_size
        if size > MAX_PICTURE_BYTES:
            raise NodeError(f"the picture has {size} bytes, more than {MAX_PICTURE_BYTES}")
        png = await asyncio.to_thread(os.pread, reader, size, 0)
    return png, size_of_png(png)


def size_of_png(png: bytes) -> ScreenSize:
    """From its header. Raises NodeError for what is no PNG."""
    if len(png) < _PNG.size or not png.startswith(_SIGNATURE) or png[12:16] != b"IHDR":
        raise NodeError("QEMU's picture is no PNG", retryable=True)
    *_, width, height = _PNG.unpack_from(png)
    return ScreenSize(width=width, height=height)


@contextmanager
def _memory_file() -> Iterator[tuple[int, int]]:
    """A file without a name, to read and to write: QEMU wants a descriptor that can only be written."""
    reader = os.memfd_create("picture", os.MFD_CLOEXEC)
    try:
        writer = os.open(f"/proc/self/fd/{reader}", os.O_WRONLY | os.O_CLOEXEC)
        try:
            yield reader, writer
        finally:
            os.close(writer)
    finally:
        os.close(reader)


async def act(machine: Q35Machine, actions: Sequence[Action]) -> None:
    """Do them in their order. They were checked (`check_input`).

    Raises UnsupportedError (the guest has no driver for a tablet, so there is no pointing at a place), InvalidSpecError
    (a place outside of the screen), NodeError, SandboxLostError.
    """
    size: ScreenSize | None = None
    if any(action.kind is ActionKind.MOVE for action in actions):
        _, size = await take_picture(machine)
        _check_inside(actions, size)
        await _require_tablet(machine)
    hand = _Hand(machine, size)
    try:
        for action in actions:
            await hand.do(action)
    except BaseException:
        await asyncio.shield(hand.let_go())
        raise


def _check_inside(actions: Sequence[Action], size: ScreenSize) -> None:
    for action in actions:
        if action.kind is ActionKind.MOVE and not (
            0 <= (action.x or 0) < size.width and 0 <= (action.y or 0) < size.height
        ):
            raise InvalidSpecError(
                f"x: {action.x},{action.y} is outside of the screen, which has {size.width} x {size.height} pixels",
                detail={"field": "x", "width": size.width, "height": size.height},
            )


async def _require_tablet(machine: Q35Machine) -> None:
    async with machine.monitor() as qmp:
        mice = await qmp.execute("query-mice")
    if not any(mouse["current"] and mouse["absolute"] for mouse in mice):
        raise UnsupportedError(
            "the guest reads no tablet, so the pointer cannot be put at a place",
            detail={"capability": "input"},
            remedy="wait until its desktop is up; a guest without the driver understands `mouse.move_by` and "
            "buttons without a place",
        )


class _Hand:
    """Presses and remembers what is down. It takes the monitor for each event anew: a long text takes minutes, and
    whoever pauses the machine or looks at its screen meanwhile is not kept waiting.
    """

    def __init__(self, machine: Q35Machine, size: ScreenSize | None) -> None:
        self._machine = machine
        self._size = size
        self._down: list[Event] = []

    async def do(self, action: Action) -> None:
        match action.kind:
            case ActionKind.MOVE:
                assert self._size is not None
                await self._send(
                    _absolute("x", action.x or 0, self._size.width), _absolute("y", action.y or 0, self._size.height)
                )
            case ActionKind.MOVE_BY:
                await self._send(_relative("x", action.x or 0), _relative("y", action.y or 0))
            case ActionKind.DOWN | ActionKind.UP:
                down = action.kind is ActionKind.DOWN
                for event in _held(action):
                    await self._turn(event, down=down)
            case ActionKind.PRESS:
                await self._chord([QCODES[key] for key in action.keys])
            case ActionKind.TYPE:
                for character in action.text or "":
                    for stroke in strokes(character, action.layout) or ():
                        await self._chord(_with_modifiers(stroke))

    async def let_go(self) -> None:
        """Of all that is still down; a machine that is gone holds nothing."""
        while self._down:
            event = self._down.pop()
            await self._send({"type": event["type"], "data": {**event["data"], "down": False}})

    async def _chord(self, keys: Sequence[str]) -> None:
        for key in keys:
            await self._turn(_key(key), down=True)
        for key in reversed(keys):
            await self._turn(_key(key), down=False)

    async def _turn(self, event: Event, *, down: bool) -> None:
        if down:
            self._down.append(event)
        await self._send({"type": event["type"], "data": {**event["data"], "down": down}})
        if not down and event in self._down:
            self._down.remove(event)

    async def _send(self, *events: Event) -> None:
        try:
            # One that is being saved stands still for a while, and takes no input.
            async with self._machine.turn(), self._machine.monitor() as qmp:
                await qmp.execute("input-send-event", {"events": list(events)})
        except MonitorError as error:
            raise NodeError(f"the machine takes no input: {error}", retryable=True) from error
        await asyncio.sleep(KEY_S)


def _held(action: Action) -> list[Event]:
    if action.button is not None:
        return [{"type": "btn", "data": {"button": action.button.value}}]
    return [_key(QCODES[key]) for key in action.keys]


def _key(qcode: str) -> Event:
    return {"type": "key", "data": {"key": {"type": "qcode", "data": qcode}}}


def _with_modifiers(stroke: Stroke) -> list[str]:
    return [*(["shift"] * stroke.shift), *(["alt_r"] * stroke.altgr), stroke.key]


def _absolute(axis: str, at: int, length: int) -> Event:
    """The middle of a pixel, on the tablet's scale."""
    return {"type": "abs", "data": {"axis": axis, "value": (2 * at + 1) * (_ABSOLUTE_MOST + 1) // (2 * length)}}


def _relative(axis: str, by: int) -> Event:
    return {"type": "rel", "data": {"axis": axis, "value": by}}
