"""The fanotify group of a node, and who holds it: as long as one of them lives, no unfilled range is ever read.

    <run>/fanotify/group               the token of the group: another one means that reads were not asked about
    <run>/fanotify/<holder>            pid, start time and descriptor number of a process that holds it
    <run>/fanotify/attached/<hex>.json what is served
    <run>/fanotify/whole/<hex>         what is complete, so that nobody is asked about it any more

The kernel lets every waiting read through when the last holder goes. So there are four: the guardian, the filling
process and two keepers, which are programs of the system that sleep; each of the first two replaces the others. A new
one takes the descriptor from any that lives (pidfd_getfd(2)).

When all of them were killed at one instant, reads of unfilled ranges give zeros until the next guardian comes. It
cannot know what was read, so it trusts none of those files: whoever still has one open gets errors from it for good,
new files take their place, and layers are mounted anew (`Loader.generation`).
"""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
from dataclasses import dataclass
from pathlib import Path

from opendsec.errors import HostCapabilityError
from opendsec.linux import fanotify
from opendsec.linux.libc import pidfd_getfd
from opendsec.linux.probe import probe
from opendsec.linux.process import ProcessIdentity, has_ended, open_process, spawn

log = logging.getLogger(__name__)

FOLDER = "fanotify"
GROUP_FD = 100
GUARDIAN, FILLER = "guardian", "filler"
KEEPERS = ("keeper-1", "keeper-2")
HOLDERS = (GUARDIAN, FILLER, *KEEPERS)
LOST = ".lost-"
"""Files of a group that is no more, still open somewhere."""
_LINK = "anon_inode:[fanotify]"
# The holder is written down by the process itself before it becomes the program: it never holds the group unknown.
_KEEP = 'echo "$$ $(cut -d" " -f22 /proc/$$/stat) $2" > "$1.new" && mv "$1.new" "$1" && exec sleep infinity'


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where all of it lies on a node."""

    run: Path
    """<run>/fanotify"""
    files: Path
    """The sparse files, on ext4, XFS or btrfs."""

    @property
    def attached(self) -> Path:
        return self.run / "attached"

    def whole(self, name: str) -> Path:
        return self.run / "whole" / name

    def is_whole(self, name: str, inode: int) -> bool:
        """Whether exactly that file was found complete since the machine started."""
        try:
            return self.whole(name).read_text(encoding="ascii") == str(inode)
        except FileNotFoundError:
            return False

    def set_whole(self, name: str, inode: int) -> None:
        new = self.whole(f".{name}")
        new.write_text(str(inode), encoding="ascii")
        new.rename(self.whole(name))

    def make(self) -> None:
        """The directories."""
        for directory in (self.run, self.attached, self.run / "whole", self.files):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)


def place_of(run_dir: Path, state_dir: Path) -> Place:
    """Of a platform."""
    return Place(run=run_dir / FOLDER, files=state_dir / "cache" / "filled")


def check_fanotify(state_dir: Path) -> None:
    """HostCapabilityError with the reason when this host cannot load layers this way."""
    answer = probe("fanotify", state_dir=state_dir)
    if not answer.ok:
        raise HostCapabilityError(
            f"layers cannot be loaded by fanotify here: {answer.sentence}",
            detail={"probe": "fanotify"},
            remedy=f"OPENDSEC_LOADER=fuse, or: {answer.remedy}",
        )


def token_of(place: Place) -> str:
    """Of the group, while anybody holds it; else ""."""
    try:
        token = (place.run / "group").read_text(encoding="ascii")
    except FileNotFoundError:
        return ""
    return token if any(is_holding(place, name) for name in HOLDERS) else ""


def is_holding(place: Place, name: str) -> bool:
    """Whether that process lives."""
    pidfd = find_holder(place, name)
    if pidfd is not None:
        os.close(pidfd)
    return pidfd is not None


def find_holder(place: Place, name: str) -> int | None:
    """A pidfd of that process while it lives; the caller closes it."""
    words = _words(place, name)
    return open_process(ProcessIdentity(words[0], words[1])) if words else None


def write_holder(place: Place, name: str, identity: ProcessIdentity, group: int) -> None:
    """This process holds the group from now on."""
    new = place.run / f"{name}.new"
    new.write_text(f"{identity.pid} {identity.start_ticks} {group}\n", encoding="ascii")
    new.rename(place.run / name)


def _words(place: Place, name: str) -> tuple[int, int, int] | None:
    try:
        words = (place.run / name).read_text(encoding="ascii").split()
    except FileNotFoundError:
        return None
    if len(words) != 3 or not all(word.isdigit() for word in words):
        return None
    return int(words[0]), int(words[1]), int(words[2])


def take_group(place: Place) -> tuple[int, bool]:
    """The group, and whether it is a new one; then what an earlier one served is not trusted any more."""
    for name in HOLDERS:
        group = _from(place, name)
        if group is not None:
            return group, False
    group = fanotify.open_group()
    try:
        _distrust(place)
        (place.run / "group").write_text(secrets.token_hex(8), encoding="ascii")
    except BaseException:
        os.close(group)
        raise
    return group, True


def _from(place: Place, name: str) -> int | None:
    words, pidfd = _words(place, name), find_holder(place, name)
    if pidfd is None or words is None:
        return None
    try:
        group = pidfd_getfd(pidfd, words[2])
    except OSError:  # it ended meanwhile
        return None
    finally:
        os.close(pidfd)
    if str(Path(f"/proc/self/fd/{group}").readlink()) == _LINK:
        return group
    os.close(group)
    return None


def keep(place: Place, name: str, group: int) -> int:
    """Start a keeper; a pidfd. It is our child until we end."""
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    try:
        words = ["-c", _KEEP, "sh", str(place.run / name), str(GROUP_FD)]
        _, pidfd = spawn(Path("/bin/sh"), argv=words, fds={0: null, 1: null, 2: null, GROUP_FD: group})
    finally:
        os.close(null)
    return pidfd


def is_kept(pidfd: int | None) -> bool:
    """Whether that keeper lives."""
    return pidfd is not None and not has_ended(pidfd)


def is_in_use(path: Path) -> bool:
    """Whether anybody has the file open: a mount, or a process.

    The kernel itself knows (a lease for writing is only given to the sole opener); mounts in other namespaces and
    those that hang on open files alone count too.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    try:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def in_use(place: Place) -> list[str]:
    """Names of the served files that somebody has open. Only true while no filling process runs."""
    names = [path.stem for path in place.attached.glob("*.json")]
    return sorted(name for name in names if is_in_use(place.files / name))


def drop_unused(place: Place) -> None:
    """Forget what nobody has open: next time it is served again, or its room is given to others."""
    used = set(in_use(place))
    for path in place.attached.glob("*.json"):
        if path.stem not in used:
            place.whole(path.stem).unlink(missing_ok=True)
            path.unlink()
    for path in place.files.glob(f"{LOST}*"):
        if not is_in_use(path):
            path.unlink()


def _distrust(place: Place) -> None:
    """Nobody was asked about reads of incomplete files for a while: put them aside if they are in use."""
    for name in in_use(place):
        if not place.is_whole(name, (place.files / name).stat().st_ino):
            aside = place.files / f"{LOST}{name}-{secrets.token_hex(4)}"
            (place.files / name).rename(aside)
            log.error("reads_not_asked_about", extra={"fields": {"data": name, "aside": str(aside)}})
