"""`opendsec run` and `exec`: the words of a command inside pass through untouched, and our own options may stand on
either side of the image or sandbox.

Without `--`, whatever follows the image belongs to the command (`run debian ls -l`). With it, what stands between the
image and `--` is ours if it begins as an option does: `run debian --toolkit rg -- rg -n word`.
"""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand

SETTINGS = {"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False}
"""What follows the first argument is not looked at."""
ALL_INSIDE = "opendsec.all_inside"
"""In a context's `meta`: does -- stand right before the first argument?"""


class PassingOn(TyperCommand):
    """A command of the command line whose last words are another command."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Called with all words."""
        _, behind, _ = self.make_parser(ctx).parse_args(list(args))
        ctx.meta[ALL_INSIDE] = args[: len(args) - len(behind)][-2:-1] == ["--"]
        return super().parse_args(ctx, options_first(list(args), behind))


def options_first(args: list[str], behind: list[str]) -> list[str]:
    """The words with our options before the first argument; `behind`: those that stand behind it."""
    if not behind or behind[0] == "--" or not behind[0].startswith("-") or "--" not in behind:
        return args
    *head, target = args[: len(args) - len(behind)]
    end = behind.index("--")
    return [*head, *behind[:end], target, *behind[end:]]
