"""`opendsec image …`, the client's half: commands that ask a platform, and those that ask a platform or this machine.

Which of both is one rule: with OPENDSEC_API_URL they ask that platform; without it, the store of this machine, whether
or not a platform runs here (but for a remote store, which only a platform reads: they ask the one that runs here).
This machine's half is `opendsec.host.image_group`; `opendsec.main` puts both into one group, and hands the store in as
the context's object. A module of commands registers them with `app` here and is named in `opendsec.cli.image_commands`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import NoReturn, Protocol, cast

import typer

from opendsec import DSecClient
from opendsec.cli.output import print_error
from opendsec.cli.session import with_opened
from opendsec.errors import OpenDSecError
from opendsec.model.image_view import Difference, ImageDetails, ImageSummary, TreeEntry

HELP = """Images: make, import, build, pack, list, compare, remove.

With OPENDSEC_API_URL, `ls`, `inspect`, `tree`, `diff`, `tag`, `compose` and `rm` ask that platform; without it, the
store of this machine, whether or not a platform runs here. If OPENDSEC_STORE is a remote one, they ask the platform
that runs here."""

app = typer.Typer(help=HELP, no_args_is_help=True)


class Images(Protocol):
    """What a platform (`opendsec.client`) and this machine's store (`opendsec.host.images_here`) both answer."""

    def list(self, *, prefix: str = "") -> AsyncIterator[ImageSummary]:
        """By name."""

    async def inspect(self, image: str) -> ImageDetails:
        """All about one."""

    def tree(self, image: str, path: str = "/", *, depth: int | None = None) -> AsyncIterator[TreeEntry]:
        """What a sandbox would see."""

    def diff(self, before: str, after: str, *, times: bool = True) -> AsyncIterator[Difference]:
        """What differs."""

    async def tag(self, name: str, image: str, *, replace: bool = False) -> ImageSummary:
        """Another name."""

    async def compose(
        self,
        name: str,
        base: str,
        *,
        workspace: str | None = None,
        toolkits: Sequence[str] | None = None,
        pin: bool = False,
        replace: bool = False,
    ) -> ImageSummary:
        """An image of references."""

    async def remove(self, name: str, *, force: bool = False) -> ImageSummary:
        """Forget a name."""


Here = Callable[[], AbstractAsyncContextManager[Images]]


def with_images(context: typer.Context, main: Callable[[Images], Awaitable[int]], *, as_json: bool) -> NoReturn:
    """Run `main` with the images this command is about, and leave with its status: 1 when it failed."""
    here = cast("Here | None", context.obj)
    try:
        with_opened(_platform if here is None else here, main)
    except OpenDSecError as error:
        print_error(error, as_json=as_json)
        raise typer.Exit(1) from error


@asynccontextmanager
async def _platform() -> AsyncIterator[Images]:
    async with DSecClient() as client:
        yield client.images
