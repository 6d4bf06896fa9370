"""`opendsec image ls`, `inspect`, `tree`, `diff`, `tag`, `compose` and `rm`: of a platform, or of this machine's store.

With `--json`, `tree` and `diff` print one value a line, as they come.
"""

from __future__ import annotations

import stat
from collections import Counter
from typing import Annotated

import typer

from opendsec.cli import options
from opendsec.cli.image_group import Images, app, with_images
from opendsec.cli.output import Json, note, print_json, print_line, print_table, size, when
from opendsec.model.file import FileKind
from opendsec.model.image import BUILD_CACHE, Machine
from opendsec.model.image_view import Change, Difference, ImageDetails, ImageSummary, StartLayer, TreeEntry

Image = Annotated[str, typer.Argument(metavar="IMAGE", help="A name, or name@sha256:… for what it meant once.")]
NewName = Annotated[str, typer.Argument(metavar="NAME", help="The name to give.")]
Replace = Annotated[bool, typer.Option("--replace", help="Also when the name means another image.")]

_KIND_BITS = {
    FileKind.FILE: stat.S_IFREG,
    FileKind.DIRECTORY: stat.S_IFDIR,
    FileKind.SYMLINK: stat.S_IFLNK,
    FileKind.CHAR_DEVICE: stat.S_IFCHR,
    FileKind.BLOCK_DEVICE: stat.S_IFBLK,
    FileKind.FIFO: stat.S_IFIFO,
    FileKind.SOCKET: stat.S_IFSOCK,
}
_SIGNS = {Change.ADDED: "A", Change.CHANGED: "M", Change.REMOVED: "D"}


@app.command("ls")
def list_images(
    context: typer.Context,
    prefix: Annotated[str, typer.Argument(metavar="PREFIX", help="Only names that begin so.")] = "",
    everything: Annotated[bool, typer.Option("--all", "-a", help="Also steps of builds.")] = False,
    as_json: Json = False,
) -> None:
    """List images. SHARED are the bytes that other images are started with as well."""

    async def main(images: Images) -> int:
        steps_too = everything or prefix.startswith(BUILD_CACHE)
        found = [one async for one in images.list(prefix=prefix) if steps_too or not one.name.startswith(BUILD_CACHE)]
        if as_json:
            print_json(found)
        else:
            columns = ("NAME", "ROLE", "DIGEST", "SIZE", "SHARED", "CREATED", "FROM")
            print_table(columns, [_row(summary) for summary in found])
        return 0

    with_images(context, main, as_json=as_json)


def _row(summary: ImageSummary) -> tuple[str, ...]:
    if summary.problem:
        return summary.name, "damaged", "", "", "", "", summary.problem
    roles = "+".join(role.value for role in summary.roles) or "references"
    below = " ".join(part for part in (summary.base and f"on {summary.base}", *summary.toolkits) if part)
    return (
        summary.name,
        roles,
        summary.digest[7:19],
        size(summary.size_bytes),
        size(summary.shared_bytes),
        when(summary.created_at),
        below or summary.source,
    )


@app.command("inspect")
def inspect(context: typer.Context, image: Image, as_json: Json = False) -> None:
    """Show what is known about an image: what it is made of, what it shares, and how much a start of it really reads.

    SIZE is of its own layers, START SIZE of all that a sandbox is started with.
    """

    async def main(images: Images) -> int:
        details = await images.inspect(image)
        if as_json:
            print_json(details)
        else:
            print_table(("IMAGE", details.name), rows_of(details))
        return 0

    with_images(context, main, as_json=as_json)


def rows_of(details: ImageDetails) -> list[tuple[str, str]]:
    """Name and value of everything that is known."""
    config = details.config
    rows = [("digest", details.digest), ("created", when(details.created_at)), ("source", details.source)]
    rows += [("problem", details.problem)] if details.problem else []
    rows += [("base", details.base)] if details.base else []
    rows += [("toolkit", reference) for reference in details.toolkits]
    rows += [("size", size(details.size_bytes))]
    if details.start_layers:
        rows += [
            ("start size", size(details.start_size_bytes)),
            ("shared", _shared(details.shared_bytes)),
            ("start reads", _start_cost(details)),
            ("start digest", details.start_digest),
        ]
    rows += [("part", f"{part.kind.value} {part.pinned}") for part in details.parts]
    rows += [("layer", _layer(one)) for one in details.start_layers]
    rows += [("machine", _machine(config.machine))] if config.machine is not None else []
    rows += [("user", config.user or "root"), ("workdir", config.workdir)]
    rows += [("env", f"{key}={value}") for key, value in config.env.items()]
    rows += [("entrypoint", part) for part in config.entrypoint] + [("cmd", part) for part in config.cmd]
    rows += [("label", f"{key}={value}") for key, value in config.labels.items()]
    rows += [("used by", name) for name in details.used_by]
    if details.used_by_count is None:
        return rows
    more = details.used_by_count - len(details.used_by)
    return [*rows, ("used by", f"and {more} more")] if more > 0 else rows


def _shared(amount: int | None) -> str:
    return "not known: the store is remote" if amount is None else f"{size(amount)} with other images"


def _machine(machine: Machine) -> str:
    extras = "".join([", TPM" * machine.tpm, ", guest agent" * machine.agent])
    return (
        f"{machine.firmware.value}, {machine.graphics.value} graphics, {machine.devices.value} devices, "
        f"{machine.memory_mb} MiB, {machine.cpus} CPU"
        f"{extras}; disk of {size(machine.virtual_bytes)}, {machine.format.value}"
    )


def _layer(one: StartLayer) -> str:
    known = f"{one.layer.digest} {one.layer.role.value} {size(one.layer.size_bytes)}"
    if one.images is None:
        return known
    return f"{known} in {one.images} image{'' if one.images == 1 else 's'}"


def _start_cost(details: ImageDetails) -> str:
    first = f"{size(details.metadata_bytes)} are copied to the node first"
    if details.start_cost is None:
        return f"not known: no start was recorded (`opendsec image profile`); {first}"
    cost = details.start_cost
    share = 100 * cost.read_bytes / max(cost.of_bytes, 1)
    return f"{size(cost.read_bytes)} of {size(cost.of_bytes)} ({share:.1f} %); {first}"


@app.command("tree")
def tree(
    context: typer.Context,
    image: Image,
    path: Annotated[str, typer.Argument(metavar="PATH", help="Where to begin.")] = "/",
    depth: Annotated[int | None, typer.Option(min=0, help="Levels below PATH; 0: PATH alone; else all.")] = None,
    as_json: Json = False,
) -> None:
    """Show what a sandbox that was just started from the image would see, without starting one."""

    async def main(images: Images) -> int:
        async for entry in images.tree(image, path, depth=depth):
            if as_json:
                print_json(entry)
            else:
                print_line(line_of(entry))
        return 0

    with_images(context, main, as_json=as_json)


def line_of(entry: TreeEntry) -> str:
    """As `ls -l` has it, with numbers for owners."""
    mode = stat.filemode(_KIND_BITS[entry.kind] | entry.mode)
    what = f"{entry.device[0]},{entry.device[1]}" if entry.device is not None else str(entry.size_bytes)
    target = f" -> {entry.target}" if entry.kind is FileKind.SYMLINK else ""
    mark = "+" if entry.xattrs else " "
    times = when(entry.mtime_ns // 1_000_000_000)
    return f"{mode}{mark} {entry.uid:>6} {entry.gid:>6} {what:>12} {times} {entry.path}{target}"


@app.command("diff")
def diff(
    context: typer.Context,
    before: Annotated[str, typer.Argument(metavar="BEFORE", help="An image.")],
    after: Annotated[str, typer.Argument(metavar="AFTER", help="Another one.")],
    no_times: Annotated[bool, typer.Option("--no-times", help="Leave out what differs in its time alone.")] = False,
    as_json: Json = False,
) -> None:
    """Show at which paths two images differ: A only in the second, D only in the first, M not the same in both."""

    async def main(images: Images) -> int:
        count: Counter[Change] = Counter()
        async for one in images.diff(before, after, times=not no_times):
            count[one.change] += 1
            if as_json:
                print_json(one)
            else:
                print_line(_change(one))
        if not as_json:
            note(", ".join(f"{count[change]} {change.value}" for change in Change))
        return 0

    with_images(context, main, as_json=as_json)


def _change(one: Difference) -> str:
    what = f"  ({', '.join(one.what)})" if one.what else ""
    return f"{_SIGNS[one.change]} {one.path}{what}"


@app.command("tag")
def tag(context: typer.Context, name: NewName, image: Image, replace: Replace = False, as_json: Json = False) -> None:
    """Give an image another name. Nothing is copied."""

    async def main(images: Images) -> int:
        _print_named(await images.tag(name, image, replace=replace), as_json=as_json)
        return 0

    with_images(context, main, as_json=as_json)


@app.command("compose")
def compose(
    context: typer.Context,
    name: NewName,
    base: Annotated[str, typer.Argument(metavar="BASE", help="Image it lies on.")],
    workspace: Annotated[str | None, typer.Option(metavar="IMAGE", help="Image that becomes its workspace.")] = None,
    toolkits: Annotated[
        list[str] | None, typer.Option("--toolkit", metavar="IMAGE", help="Lowest first; may repeat.")
    ] = None,
    no_toolkits: options.NoToolkits = False,
    pin: Annotated[bool, typer.Option("--pin", help="Keep what the names mean now for ever.")] = False,
    replace: Replace = False,
    as_json: Json = False,
) -> None:
    """Make an image that refers to others; nothing is copied.

    Names in it mean whatever they mean when a sandbox is started: replace a toolkit, and every image that names it is
    current.
    """
    chosen = options.chosen_toolkits(toolkits, no_toolkits)

    async def main(images: Images) -> int:
        made = await images.compose(
            name,
            base,
            workspace=workspace,
            toolkits=chosen,
            pin=pin,
            replace=replace,
        )
        _print_named(made, as_json=as_json)
        return 0

    with_images(context, main, as_json=as_json)


def _print_named(summary: ImageSummary, *, as_json: bool) -> None:
    if as_json:
        print_json(summary)
    else:
        print_line(f"image {summary.name}: {summary.digest}")


@app.command("rm")
def remove(
    context: typer.Context,
    names: Annotated[list[str], typer.Argument(metavar="NAME", help="Names of images.")],
    force: Annotated[bool, typer.Option("--force", help="Also what other images lie on or ask for.")] = False,
    as_json: Json = False,
) -> None:
    """Forget names of images. `gc` deletes what nobody needs then; running sandboxes keep theirs."""

    async def main(images: Images) -> int:
        removed = []
        for name in names:
            removed.append(await images.remove(name, force=force))
            if not as_json:
                print_line(f"removed {name}")
        if as_json:
            print_json(removed)
        return 0

    with_images(context, main, as_json=as_json)
