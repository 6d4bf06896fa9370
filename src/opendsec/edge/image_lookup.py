"""What names of images mean to a create: never older than the create itself, and looked up once for a whole burst.

Who arrives while a lookup of the same names is under way waits for the next one, since that one may have read before a
name was changed; all who wait share it. So a create that follows a publish always gets what was published, and a
thousand creates at once cost two lookups. They happen in a few threads of their own: a store that does not answer
holds up those who ask it, and nothing else of the edge.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

from opendsec.edge.images import ImageSource
from opendsec.errors import NodeError
from opendsec.model.image import Image
from opendsec.model.spec import SandboxSpec

THREADS = 16
"""So many different names are looked up at once."""
_T = TypeVar("_T")
_Asked = tuple[str, str, tuple[str, ...] | None]
"""Image, workspace and toolkits of a spec."""


@dataclass(slots=True)
class _Turn:
    """Of one combination of names, while somebody asks for it."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    begun: int = 0
    """Lookups so far."""
    found_by: int = 0
    """The last one that found it."""
    found: Image | None = None
    waiting: int = 0


class ImageLookup:
    """One per node. `close` it."""

    def __init__(self, images: ImageSource) -> None:
        self._images = images
        self._turns: dict[_Asked, _Turn] = {}
        self._threads: ThreadPoolExecutor | None = None

    async def find(self, spec: SandboxSpec) -> Image:
        """All layers of a start. Raises as `ImageSource.compose` does."""
        asked = (spec.image, spec.workspace or "", spec.toolkits)
        turn = self._turns.setdefault(asked, _Turn())
        arrived = turn.begun
        turn.waiting += 1
        try:
            async with turn.lock:
                if turn.found is None or turn.found_by <= arrived:
                    await self._look_up(asked, turn)
                assert turn.found is not None
                return turn.found
        finally:
            turn.waiting -= 1
            if not turn.waiting:
                del self._turns[asked]

    async def names(self) -> list[str]:
        """Of all images, sorted. Raises as `ImageSource.names` does."""
        return await self._in_thread(self._images.names)

    def close(self) -> None:
        """Look nothing up any more; what hangs in a store is not waited for."""
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)

    async def _in_thread(self, work: Callable[[], _T]) -> _T:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="lookups")
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def _look_up(self, asked: _Asked, turn: _Turn) -> None:
        image, workspace, toolkits = asked
        turn.begun += 1
        try:
            compose = functools.partial(self._images.compose, image, workspace=workspace, toolkits=toolkits)
            turn.found = await self._in_thread(compose)
        except OSError as exc:
            raise NodeError(
                f"image {image!r} cannot be looked up, the store cannot be read: {exc}",
                detail={"image": image},
                remedy="see whether its file system is mounted and its servers answer; then try again",
                retryable=True,
            ) from exc
        turn.found_by = turn.begun
