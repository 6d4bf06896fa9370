"""The keyboard of a sandbox that is a whole machine: `sandbox.keyboard`.

A call is over when the machine was told, not when its programs have noticed: give a window its focus first. What fails
midway lets go of all keys.
"""

from __future__ import annotations

from opendsec.client._async.transport import Transport, target
from opendsec.model.screen import Action, ActionKind, InputRequest, check_input, check_text
from opendsec.wire.contracts import Empty

PIECE = 400
"""Characters of one request: a key takes about 40 ms, with shift 80, so that each is over within a minute."""
INPUT_TIMEOUT_S = 300.0


class Keyboard:
    """`sandbox.keyboard`. Names of keys: one character each, or `enter`, `tab`, `esc`, `ctrl`, `alt`, `shift`, `super`,
    `up`, `f1`, … (docs/reference/fullvm.md has all)."""

    def __init__(self, transport: Transport, sandbox_id: str) -> None:
        self._transport = transport
        self._where = target("sandboxes", sandbox_id, "input")

    async def type(self, text: str, *, layout: str = "us") -> None:
        """Type it on a keyboard with that layout (`us`, `de`, `fr`), which must be the one the guest has set.

        Raises InvalidSpecError before anything is typed when a character is on no key of the layout. Newline is enter.
        """
        check_text(text, layout)
        for start in range(0, len(text), PIECE):
            await self._act(Action(kind=ActionKind.TYPE, text=text[start : start + PIECE], layout=layout))

    async def press(self, *keys: str) -> None:
        """All keys down one after the other, and up again: `press("ctrl", "c")`, `press("enter")`."""
        await self._act(Action(kind=ActionKind.PRESS, keys=keys))

    async def down(self, *keys: str) -> None:
        """Press and hold."""
        await self._act(Action(kind=ActionKind.DOWN, keys=keys))

    async def up(self, *keys: str) -> None:
        """Let go."""
        await self._act(Action(kind=ActionKind.UP, keys=keys))

    async def _act(self, action: Action) -> None:
        request = check_input(InputRequest(actions=(action,)))
        await self._transport.call(
            "POST", self._where, Empty, value=request, idempotent=False, timeout_s=INPUT_TIMEOUT_S
        )
