"""The mouse of a sandbox that is a whole machine: `sandbox.mouse`. Points are pixels from the top left corner.

A call is over when the machine was told, not when its programs have noticed. What fails midway lets go of all buttons.
"""

from __future__ import annotations

from opendsec.client._async.transport import Transport, target
from opendsec.errors import InvalidSpecError
from opendsec.model.screen import Action, ActionKind, Button, InputRequest, check_input
from opendsec.wire.contracts import Empty

DRAG_STEPS = 12
INPUT_TIMEOUT_S = 120.0


class Mouse:
    """`sandbox.mouse`. Methods raise InvalidSpecError for a point outside of the screen, and UnsupportedError when the
    guest cannot be pointed at a place (it knows no tablet: `move_by`, and buttons without a point, always work)."""

    def __init__(self, transport: Transport, sandbox_id: str) -> None:
        self._transport = transport
        self._where = target("sandboxes", sandbox_id, "input")

    async def move(self, x: int, y: int) -> None:
        """The pointer to a place."""
        await self._act(_to(x, y))

    async def move_by(self, x: int, y: int) -> None:
        """The pointer by so much, as a mouse without a tablet does; how far that is on the screen is the guest's
        business."""
        await self._act(Action(kind=ActionKind.MOVE_BY, x=x, y=y))

    async def click(self, x: int | None = None, y: int | None = None, *, button: Button | str = Button.LEFT) -> None:
        """Press and let go, at a place or where the pointer is. `button`: left, middle, right."""
        await self._act(*_at(x, y), *_click(button))

    async def double_click(
        self, x: int | None = None, y: int | None = None, *, button: Button | str = Button.LEFT
    ) -> None:
        """Twice, fast."""
        await self._act(*_at(x, y), *_click(button), *_click(button))

    async def down(self, button: Button | str = Button.LEFT) -> None:
        """Press and hold."""
        await self._act(Action(kind=ActionKind.DOWN, button=_button(button)))

    async def up(self, button: Button | str = Button.LEFT) -> None:
        """Let go."""
        await self._act(Action(kind=ActionKind.UP, button=_button(button)))

    async def drag(
        self,
        start: tuple[int, int],
        end: tuple[int, int],
        *,
        button: Button | str = Button.LEFT,
        steps: int = DRAG_STEPS,
    ) -> None:
        """Press at `start`, move to `end` in `steps` steps, let go there."""
        path = [
            _to(
                start[0] + (end[0] - start[0]) * step // max(1, steps),
                start[1] + (end[1] - start[1]) * step // max(1, steps),
            )
            for step in range(max(1, steps) + 1)
        ]
        chosen = _button(button)
        await self._act(
            path[0],
            Action(kind=ActionKind.DOWN, button=chosen),
            *path[1:],
            Action(kind=ActionKind.UP, button=chosen),
        )

    async def scroll(self, down: int = 0, right: int = 0, *, x: int | None = None, y: int | None = None) -> None:
        """Turn the wheel by so many notches; negative is up, or left."""
        vertical = Button.WHEEL_DOWN if down > 0 else Button.WHEEL_UP
        sideways = Button.WHEEL_RIGHT if right > 0 else Button.WHEEL_LEFT
        notches = [*([vertical] * abs(down)), *([sideways] * abs(right))]
        await self._act(*_at(x, y), *(action for notch in notches for action in _click(notch)))

    async def _act(self, *actions: Action) -> None:
        if not actions:
            return
        request = check_input(InputRequest(actions=actions))
        await self._transport.call(
            "POST", self._where, Empty, value=request, idempotent=False, timeout_s=INPUT_TIMEOUT_S
        )


def _to(x: int, y: int) -> Action:
    return Action(kind=ActionKind.MOVE, x=x, y=y)


def _at(x: int | None, y: int | None) -> tuple[Action, ...]:
    if x is None and y is None:
        return ()
    return (Action(kind=ActionKind.MOVE, x=x, y=y),)


def _click(button: Button | str) -> tuple[Action, Action]:
    chosen = _button(button)
    return Action(kind=ActionKind.DOWN, button=chosen), Action(kind=ActionKind.UP, button=chosen)


def _button(text: Button | str) -> Button:
    try:
        return Button(text)
    except ValueError:
        raise InvalidSpecError(
            f"button: {text[:40]!r} is not of {', '.join(Button)}", detail={"field": "button"}
        ) from None
