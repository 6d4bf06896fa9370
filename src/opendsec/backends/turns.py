"""One at a time with each sandbox: whoever starts, ends or relies on its machine holds its turn."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from opendsec.model.ids import SandboxId


@dataclass(slots=True)
class _Turn:
    """One sandbox's lock, and how many hold it or wait for it: with none it is forgotten."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    users: int = 0


class Turns:
    """Those of one backend."""

    def __init__(self) -> None:
        self._of: dict[SandboxId, _Turn] = {}

    def __len__(self) -> int:
        """Sandboxes somebody holds or waits for."""
        return len(self._of)

    @contextlib.asynccontextmanager
    async def of(self, sandbox_id: SandboxId) -> AsyncIterator[None]:
        """Its turn, once everybody before has had theirs."""
        turn = self._of.setdefault(sandbox_id, _Turn())
        turn.users += 1
        try:
            async with turn.lock:
                yield
        finally:
            turn.users -= 1
            if not turn.users:
                del self._of[sandbox_id]
