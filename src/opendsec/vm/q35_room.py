"""The room QEMU runs in: its own namespaces, a root that holds its installation read-only and nothing else, no rights.

A shell makes it, as root, out of a tmpfs that goes with the namespace; then everything is given up and QEMU is
executed, so that no byte a guest had a hand in is ever read by root. The shell waits at a gate until its caller has put
it into its control groups. Beside QEMU a TPM's emulator may run, in the same room. A step that fails ends it, and its
words take the place of QEMU's.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from opendsec.linux import process
from opendsec.store.programs import find_program

GATE_FD = 9
TPM_SERVER_FD = 8
_FIRST_COPY = 600
"""Copies of descriptors on their way lie above all numbers they are to have."""
_SCRIPT = r"""
set -eu
read -r _ <&9
exec 9<&-
room=$1 uid=$2 resolvers=$3 tpm=$4 kvm=$5
shift 5
mount -t tmpfs -o mode=0755,size=4m,nosuid room "$room"
cd "$room"
mkdir usr etc dev tmp
mount --bind /usr usr
mount -o remount,bind,ro,nosuid,nodev usr
for each in bin sbin lib lib32 lib64 libx32; do
  if [ -L "/$each" ]; then cp -P "/$each" .
  elif [ -d "/$each" ]; then
    mkdir "$each"
    mount --bind "/$each" "$each"
    mount -o remount,bind,ro,nosuid,nodev "$each"
  fi
done
cp /etc/ld.so.cache etc/
cp "$resolvers" etc/resolv.conf
mknod -m 666 dev/null c 1 3
mknod -m 444 dev/urandom c 1 9
mknod -m 444 dev/random c 1 8
if [ "$kvm" = yes ]; then mknod -m 600 dev/kvm c 10 232 && chown "$uid:$uid" dev/kvm; fi
chmod 1777 tmp
drop="setpriv --reuid=$uid --regid=$uid --clear-groups --no-new-privs --bounding-set=-all --inh-caps=-all"
if [ -n "$tpm" ]; then
  mkdir tpm && chown "$uid:$uid" "$tpm" && mount --bind "$tpm" tpm
  chroot . $drop swtpm socket --tpm2 --tpmstate dir=/tpm,mode=0600 --ctrl type=unixio,clientfd=8 \
    --flags startup-clear --terminate </dev/null &
  exec 8>&-
fi
exec chroot . $drop "$@"
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What a room is made of."""

    root: Path
    """An empty directory the room is mounted on, in its own namespace."""
    host_id: int
    """User and group QEMU runs as; nobody else's."""
    resolvers: Path
    """The resolv.conf inside."""
    tpm_state: Path | None = None
    """Directory of the emulated TPM, which will belong to that user. None: no TPM."""
    kvm: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Entered:
    """The process, waiting at the gate."""

    pid: int
    pidfd: int
    gate: int
    """Written to when it may go on; closed, it ends."""


def enter(room: Room, argv: Sequence[str], *, fds: Mapping[int, int], words: int) -> Entered:
    """Start it; it stands still at the gate. `fds`: descriptors of QEMU and ours; `words`: where it complains.

    The caller reaps the pid. Raises OSError, HostCapabilityError.
    """
    reader, writer = os.pipe2(os.O_CLOEXEC)
    null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
    shell = ["--net", "--mount", "--ipc", "--uts", "--propagation", "private", "--", "/bin/sh", "-c", _SCRIPT, "room"]
    given = [
        str(room.root),
        str(room.host_id),
        str(room.resolvers),
        "" if room.tpm_state is None else str(room.tpm_state),
        "yes" if room.kvm else "no",
    ]
    try:
        with _far_away({0: null, 1: words, 2: words, GATE_FD: reader, **fds}) as copies:
            pid, pidfd = process.spawn(
                Path(find_program("unshare")), argv=[*shell, *given, *argv], fds=copies, env=_environment()
            )
    except BaseException:
        os.close(writer)
        raise
    finally:
        os.close(reader)
        os.close(null)
    return Entered(pid=pid, pidfd=pidfd, gate=writer)


def _environment() -> dict[str, str]:
    return {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8"}


@contextmanager
def _far_away(fds: Mapping[int, int]) -> Iterator[dict[int, int]]:
    """Copies whose numbers nobody is to have: a descriptor is never overwritten before it was copied."""
    copies: dict[int, int] = {}
    try:
        for target, source in fds.items():
            copies[target] = fcntl.fcntl(source, fcntl.F_DUPFD_CLOEXEC, _FIRST_COPY)
        yield copies
    finally:
        for copy in copies.values():
            os.close(copy)
