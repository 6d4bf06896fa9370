"""Draws what `benchmarks.burst` has measured, as the paper's figures 10 and 11 do: all arms over time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

COLOURS = {
    "on demand": "#0072b2",
    "cached": "#009e73",
    "unpack": "#d55e00",
    "layers": "#0072b2",
    "tar": "#d55e00",
}
"""Told apart by everybody."""
PANELS = (
    ("completed", "sandboxes completed", 1.0),
    ("read", "read from the store, GB", 1e9),
    ("written", "written to the disk, GB", 1e9),
)


def draw(result: dict[str, Any], folder: Path) -> list[Path]:
    """The files that were written: burst.svg, burst-tar.svg."""
    mpl.rcParams["svg.hashsalt"] = "opendsec"
    mpl.rcParams["svg.fonttype"] = "none"
    made = []
    for name, arms in (("burst.svg", ("on demand", "cached", "unpack")), ("burst-tar.svg", ("layers", "tar"))):
        present = [result["arms"][arm] for arm in arms if arm in result["arms"]]
        if present:
            made.append(_figure(present, folder / name, result["megabytes_s"]))
    return made


def _figure(arms: Sequence[dict[str, Any]], target: Path, megabytes_s: int) -> Path:
    figure = Figure(figsize=(12, 3.4), layout="constrained")
    panels: Sequence[Axes] = figure.subplots(1, 4)
    for axes, (key, label, unit) in zip(panels, PANELS, strict=False):
        for one in arms:
            samples = one["samples"]
            axes.plot(
                [row["at_s"] for row in samples],
                [row[key] / unit for row in samples],
                color=COLOURS[one["arm"]],
                label=f"{one['arm']}, {one['seconds']:.0f} s",
            )
        axes.set_xlabel("seconds")
        axes.set_title(label, fontsize=10)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    _latencies(panels[3], arms)
    panels[0].legend(fontsize=8)
    figure.suptitle(f"{len(arms[0]['task'])} sandboxes, store behind {megabytes_s} MB/s, cold", fontsize=10)
    figure.savefig(target, metadata={"Date": None})
    return target


def _latencies(axes: Axes, arms: Sequence[dict[str, Any]]) -> None:
    for one in arms:
        ordered = sorted(one["first"])
        axes.plot(
            ordered,
            [100 * (number + 1) / len(ordered) for number in range(len(ordered))],
            color=COLOURS[one["arm"]],
            label=one["arm"],
        )
    axes.set_xscale("log")
    axes.set_xlabel("seconds")
    axes.set_title("first command's result within, %", fontsize=10)
    axes.grid(alpha=0.3)
