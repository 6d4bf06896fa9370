"""`opendsec doctor`: what this host can do, and where it cannot, why not and what helps.

Every answer comes from really trying (`linux.probe`). What the container backend cannot work without decides the exit
status; the rest costs a feature or density and is only said.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from opendsec import errors
from opendsec.host.backends_here import Verdict, verdicts, vm_answers
from opendsec.host.firecracker_commands import firecracker
from opendsec.host.kernel_commands import guest_kernel
from opendsec.linux import launch, probe
from opendsec.store.layout import Layout
from opendsec.store.loading.sources import is_remote
from opendsec.store.location import SETTING, store_directory
from opendsec.store.portability import probe_directory

STATE_DIR = "/var/lib/opendsec"


def native_programs() -> probe.Answer:
    """Are the launcher and the guest agent built?"""
    missing = [path.name for path in (launch.LAUNCHER_PATH, launch.GUEST_PATH) if not path.is_file()]
    if missing:
        return probe.Answer(
            name="native",
            ok=False,
            sentence=f"not built: {', '.join(missing)}",
            remedy="install the package again with gcc and make at hand, or run `make -C native install`",
        )
    return probe.Answer(name="native", ok=True, sentence="launcher and guest agent are built")


def image_store(setting: str, state_dir: Path) -> probe.Answer | None:
    """Does the file system of the store offer what a store needs? None when there is no directory to ask."""
    if is_remote(setting):
        return None
    try:
        root = store_directory(setting, state_dir)
        staging = Layout(root).staging
        lacking = [one for one in probe_directory(staging) if not one.ok] if staging.is_dir() else []
    except errors.InvalidSpecError as error:
        return probe.Answer(name="store", ok=False, sentence=error.message, remedy=error.remedy)
    except OSError as error:
        sentence = f"the image store {error.filename or setting} cannot be used: {error.strerror}"
        return probe.Answer(name="store", ok=False, sentence=sentence, remedy="mount it, writable for root")
    if not staging.is_dir():
        return None
    if lacking:
        words = "; ".join(one.sentence for one in lacking)
        sentence = f"the file system of the image store {root} lacks something: {words}"
        return probe.Answer(name="store", ok=False, sentence=sentence, remedy="see docs/reference/image-store.md")
    return probe.Answer(
        name="store", ok=True, sentence=f"the image store {root} lies on a file system that is fit for it"
    )


def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False) -> None:
    """Say what this host can do, and why not. Exit status 1 when container sandboxes cannot run here."""
    state_dir = Path(os.environ.get("OPENDSEC_STATE_DIR", STATE_DIR))
    store = image_store(os.environ.get(SETTING, ""), state_dir)
    answers = [*probe.probe_all(state_dir=state_dir), native_programs()]
    answers += [*vm_answers(state_dir), guest_kernel(), firecracker()]
    answers += [store] if store else []
    needed = {*probe.CONTAINER_NEEDS, "native"}
    broken = [answer.name for answer in answers if not answer.ok and answer.name in needed]
    if as_json:
        items = [asdict(answer) | {"needed": answer.name in needed} for answer in answers]
        backends = {one.backend.value: asdict(one) | {"ok": one.ok} for one in verdicts(answers)}
        print(json.dumps({"container": not broken, "backends": backends, "answers": items}))
    else:
        _show(answers, needed)
        _show_backends(verdicts(answers))
        Console(highlight=False).print(f"\n{summary(answers, broken)}")
    raise typer.Exit(1 if broken else 0)


def summary(answers: Sequence[probe.Answer], broken: Sequence[str]) -> str:
    """The last sentence, about containers: what decides the exit status, else what is lacking and costs less."""
    if broken:
        return f"Container sandboxes cannot run here before these are put right: {', '.join(broken)}."
    lacking = [answer.name for answer in answers if not answer.ok]
    extra = f" Each of these would add a feature, a backend or density: {', '.join(lacking)}." if lacking else ""
    return f"Container sandboxes can run here.{extra}"


def _show(answers: list[probe.Answer], needed: set[str]) -> None:
    table = Table("", "", "", box=None, pad_edge=False, show_header=False)
    for answer in answers:
        mark = "[green]yes[/]" if answer.ok else ("[red]NO[/]" if answer.name in needed else "[yellow]no[/]")
        text = escape(answer.sentence) + (f"\n→ {escape(answer.remedy)}" if answer.remedy else "")
        table.add_row(mark, escape(answer.name), text)
    Console(highlight=False).print(table)


def _show_backends(found: Sequence[Verdict]) -> None:
    table = Table("", "", "", box=None, pad_edge=False, show_header=False)
    for one in found:
        mark = "[red]NO[/]" if not one.ok else "[yellow]yes[/]" if one.degraded else "[green]yes[/]"
        table.add_row(mark, one.backend.value, escape(one.sentence))
    console = Console(highlight=False)
    console.print("\nBackends:")
    console.print(table)
