"""`opendsec image gc`, `fsck` and `merge`: collect what nobody needs, check what is there, make chains short."""

from __future__ import annotations

import re
from dataclasses import asdict
from typing import Annotated

import typer

from opendsec.cli.output import Json, note, print_json, print_line, size
from opendsec.errors import InvalidSpecError
from opendsec.host.image_group import app, errors_shown, open_store, progress_shown, state_directory
from opendsec.store.build_steps import forget_build_steps
from opendsec.store.fsck import Checked, check
from opendsec.store.gc import Collected, collect
from opendsec.store.importers.conversions import Conversions
from opendsec.store.loading.direct import DirectLoader
from opendsec.store.merge import MOST, opened_by, settle
from opendsec.store.portability import probe_directory

_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86_400}
_SPAN = re.compile(r"([0-9]+)([smhd]?)\Z")


@app.command("gc")
def collect_garbage(
    grace: Annotated[str, typer.Option(help="Keep what has been unneeded for less: 90s, 30m, 1h, 2d.")] = "1h",
    lease: Annotated[str, typer.Option(help="Count a node as dead after so much silence.")] = "1d",
    build_steps: Annotated[
        str,
        typer.Option("--build-steps", metavar="AGE", help="First forget steps of builds older than this."),
    ] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be deleted.")] = False,
    as_json: Json = False,
) -> None:
    """Delete what no image needs, no node has mounted, and nobody has just published."""
    with errors_shown(as_json), progress_shown("collecting") as on_progress:
        store = open_store()
        age_s = seconds(build_steps, field="build-steps") if build_steps else None
        steps = () if age_s is None else forget_build_steps(store, older_s=age_s, dry_run=dry_run)
        for name in steps:
            note(f"{'would forget' if dry_run else 'forgot'} {name}")
        done = collect(
            store,
            grace_s=seconds(grace, field="grace"),
            lease_s=seconds(lease, field="lease"),
            dry_run=dry_run,
            on_progress=on_progress,
        )
        if not dry_run:
            Conversions(store).sweep()
    if as_json:
        print_json(asdict(done))
        return
    for file in done.files if dry_run else ():
        print_line(f"would delete {file}")
    for line in collected_lines(done):
        print_line(line)


@app.command("fsck")
def check_store(
    repair: Annotated[
        bool, typer.Option("--repair", help="Take damaged files out of the way; write tables that follow from data.")
    ] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Look at presence and sizes, not at bytes of layers.")] = False,
    as_json: Json = False,
) -> None:
    """Check every image, layer and byte of the store, and what its file system offers. Exit status 1 for any fault."""
    with errors_shown(as_json), progress_shown("checking") as on_progress:
        store = open_store()
        checked = check(store, quick=quick, repair=repair, on_progress=on_progress)
        offered = probe_directory(store.layout.staging)
    lacking = [one for one in offered if not one.ok and one.needed]
    if as_json:
        fields = asdict(checked) | {"sound": checked.sound, "file_system": [asdict(one) for one in offered]}
        print_json(fields)
    else:
        _show(checked)
        for one in offered:
            if not one.ok:
                note(f"file system: {one.sentence}")
    if lacking or not checked.sound:
        raise typer.Exit(1)


@app.command("merge")
def merge_layers(
    name: Annotated[str, typer.Argument(help="Name of the image.")],
    most: Annotated[int, typer.Option(min=1, help="Leave an image alone that has no more layers of its own.")] = MOST,
    as_json: Json = False,
) -> None:
    """Let an image with many layers have fewer: neighbours of one role become one, the smallest first."""
    with errors_shown(as_json), progress_shown(f"image {name}") as on_progress:
        store = open_store()
        before = len(store.get(name).layers)
        open_layer = opened_by(DirectLoader(store, state_directory() / "cache" / "metadata"))
        image = settle(store, name, open_layer, most=most, on_progress=on_progress)
    if as_json:
        print_json(asdict(image) | {"layers_before": before})
    else:
        count = len(image.layers)
        print_line(f"image {name}: {image.digest}, {count} layer{'s' if count != 1 else ''} (it had {before})")


def _show(checked: Checked) -> None:
    for one in checked.findings:
        of = f" (images: {', '.join(one.images)})" if one.images else ""
        done = f"; {one.repair.value}" if one.repair else ""
        print_line(f"{one.fault.value} {one.file}: {one.sentence}{of}{done}")
    looked = "looked at" if checked.quick else "read"
    verdict = "sound" if checked.sound else "not sound"
    print_line(f"{verdict}: {checked.images} images, {looked} {checked.files} files, {size(checked.size_bytes)}")


def collected_lines(done: Collected) -> list[str]:
    """What a collection did, for people."""
    verb = "would delete" if done.dry_run else "deleted"
    lines = [f"{verb} {len(done.files)} files, {size(done.size_bytes)}"]
    if done.waiting:
        soon = f", the first in {done.next_in_s / 60:.0f} min" if done.next_in_s is not None else ""
        lines.append(
            f"waiting {done.waiting} files, {size(done.waiting_bytes)}, for the end of their grace period{soon}"
        )
    lines.append(f"needed {done.kept} files, {size(done.kept_bytes)}")
    if done.leased_bytes:
        lines.append(f"of those, {size(done.leased_bytes)} only by nodes that have them mounted")
    return lines


def seconds(text: str, *, field: str) -> float:
    """`90s`, `30m`, `1h`, `2d`, or seconds alone. InvalidSpecError naming the field."""
    match = _SPAN.match(text)
    if match is None:
        raise InvalidSpecError(
            f"{field}: {text[:40]!r} is no span of time", detail={"field": field}, remedy="write 90s, 30m, 1h or 2d"
        )
    return float(int(match[1]) * _UNITS[match[2]])
