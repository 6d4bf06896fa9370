"""What this host can do: one named question each, answered by really trying, with a sentence and a remedy.

    for answer in probe_all(state_dir): print(answer.name, answer.ok, answer.sentence, answer.remedy)

Used by the tests' markers, `opendsec doctor` and the container backend's report. A probe leaves nothing behind, takes
at most a few seconds and never raises for what the host lacks: the failure is the answer. What needs a namespace is
tried in one of its own (unshare(1)); what needs a mount is mounted below `state_dir` for a moment, because file
systems differ (EROFS images cannot lie on tmpfs or overlayfs).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import platform
import re
import resource
import select
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from opendsec.linux import fanotify, libc
from opendsec.linux.cgroup import CgroupMounts, find_mounts
from opendsec.linux.process import ProgramError, run_sync, send_signal, spawn

PROGRAM_TIMEOUT_S = 10.0
MIN_KERNEL = (6, 12)
"""File-backed EROFS mounts appeared in 6.12."""
GOOD_PID_MAX = 131_072
GOOD_NOFILE = 16_384
GOOD_DISK_MB = 4096
_LOOP_CTL_GET_FREE = 0x4C82
"""linux/loop.h"""
_PACKAGES = {
    "grep": "grep",
    "ip": "iproute2",
    "mkfs.erofs": "erofs-utils",
    "mkfs.ext4": "e2fsprogs",
    "mmdebstrap": "mmdebstrap",
    "nft": "nftables",
    "unshare": "util-linux",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One question to this host. `remedy` is empty when `ok`, or when there is none but another host."""

    name: str
    ok: bool
    sentence: str
    remedy: str = ""


class _Missing(Exception):
    """The host lacks it: sentence and remedy."""

    def __init__(self, sentence: str, remedy: str = "") -> None:
        super().__init__(sentence)
        self.sentence = sentence
        self.remedy = remedy


def _program(name: str) -> str:
    path = shutil.which(name, path="/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")
    if path is None:
        raise _Missing(f"the program {name} is not installed", f"apt-get install {_PACKAGES[name]}")
    return path


def _try(*argv: str, stdin: bytes = b"") -> str:
    program = _program(argv[0])
    return run_sync([program, *argv[1:]], timeout_s=PROGRAM_TIMEOUT_S, stdin=stdin).stdout.decode("utf-8", "replace")


@contextlib.contextmanager
def _workplace(state_dir: Path) -> Iterator[Path]:
    """A directory on the state file system, gone afterwards."""
    place = state_dir
    while not place.exists():
        place = place.parent
    work = Path(tempfile.mkdtemp(prefix=".opendsec-probe-", dir=place))
    try:
        yield work
    finally:
        shutil.rmtree(work)


@contextlib.contextmanager
def _mounted(source: str, target: Path, fstype: str, options: str = "", flags: int = 0) -> Iterator[None]:
    target.mkdir(exist_ok=True)
    libc.mount(source, str(target), fstype, flags, options)
    try:
        yield
    finally:
        libc.umount2(str(target), libc.MNT_DETACH)


# ── the questions ───────────────────────────────────────────────────────────────────────────────────────────────────


def _root(state_dir: Path) -> str:
    if os.geteuid() != 0:
        raise _Missing(f"this process runs as user {os.geteuid()}", "run it as root")
    return "this process is root"


def _kernel(state_dir: Path) -> str:
    release = platform.release()
    found = re.match(r"(\d+)\.(\d+)", release)
    if found is None or (int(found[1]), int(found[2])) < MIN_KERNEL:
        wanted = ".".join(map(str, MIN_KERNEL))
        raise _Missing(
            f"Linux {release} is older than {wanted}, which brought file-backed EROFS mounts",
            f"boot a kernel of version {wanted} or newer (Debian: the backports kernel)",
        )
    return f"Linux {release}"


def _userns(state_dir: Path) -> str:
    if Path("/proc/sys/user/max_user_namespaces").read_text(encoding="ascii").strip() == "0":
        raise _Missing("user namespaces are switched off", "sysctl user.max_user_namespaces=100000")
    _try("unshare", "--user", "true")
    return "user namespaces work"


def _netns(state_dir: Path) -> str:
    _try("unshare", "--net", "true")
    return "network namespaces work"


def _overlay(state_dir: Path) -> str:
    with _workplace(state_dir) as work:
        for name in ("lower", "upper", "work"):
            (work / name).mkdir()
        (work / "lower/file").write_text("lower")
        options = f"lowerdir={work}/lower,upperdir={work}/upper,workdir={work}/work"
        with _mounted("overlay", work / "root", "overlay", options):
            (work / "root/file").unlink()
            if not (work / "upper/file").is_char_device():
                raise _Missing("overlayfs made no whiteout", "put the state directory on ext4, xfs or btrfs")
    return "overlayfs works on the state directory's file system"


def _erofs(state_dir: Path) -> str:
    with _workplace(state_dir) as work:
        (work / "tree").mkdir()
        (work / "tree/file").write_text("content")
        _try("mkfs.erofs", "--quiet", str(work / "image"), str(work / "tree"))
        try:
            with _mounted(str(work / "image"), work / "root", "erofs", flags=libc.MS_RDONLY):
                if (work / "root/file").read_text() != "content":
                    raise _Missing("an EROFS mount shows other content than was written")
        except OSError as error:
            raise _Missing(
                f"an EROFS image in {state_dir} cannot be mounted by file: {error.strerror}",
                "put the state directory on ext4, xfs or btrfs (not tmpfs, not overlayfs), kernel 6.12 or newer",
            ) from error
    return "EROFS images mount straight from a file"


@contextlib.contextmanager
def _mapped_userns() -> Iterator[int]:
    """A descriptor of a user namespace with a map; the process in it ends with the block."""
    ours, theirs = os.pipe()
    argv = ("--user", "--map-root-user", "sh", "-c", f"echo; exec sleep {PROGRAM_TIMEOUT_S:g}")
    pid, pidfd = spawn(Path(_program("unshare")), argv=argv, fds={1: theirs})
    os.close(theirs)
    try:
        if not os.read(ours, 1):
            raise _Missing("a user namespace cannot be given a map of users")
        userns = os.open(f"/proc/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
        try:
            yield userns
        finally:
            os.close(userns)
    finally:
        os.close(ours)
        send_signal(pidfd)
        os.close(pidfd)
        os.waitpid(pid, 0)


def _idmap(state_dir: Path) -> str:
    with _mapped_userns() as userns, _workplace(state_dir) as work:
        tree = libc.open_tree(libc.AT_FDCWD, work, libc.OPEN_TREE_CLONE | libc.OPEN_TREE_CLOEXEC)
        try:
            libc.mount_setattr(tree, "", libc.AT_EMPTY_PATH, attr_set=libc.MOUNT_ATTR_IDMAP, userns_fd=userns)
        except OSError as error:
            raise _Missing(
                f"files in {state_dir} cannot be given to mapped users: {error.strerror}",
                "put the state directory on ext4, xfs or btrfs",
            ) from error
        finally:
            os.close(tree)
    return "files of the state directory can be given to mapped users"


def _cgroups() -> CgroupMounts:
    mounts = find_mounts()
    if mounts.unified is None:
        raise _Missing(
            "no cgroup v2 tree is mounted",
            "mkdir -p /sys/fs/cgroup/unified && mount -t cgroup2 none /sys/fs/cgroup/unified",
        )
    return mounts


def _cgroup(state_dir: Path) -> str:
    unified = _cgroups().unified
    if unified is None:
        raise _Missing("no cgroup v2 tree is mounted")
    directory = Path(tempfile.mkdtemp(prefix="opendsec-probe-", dir=unified))
    try:
        if not (directory / "cgroup.kill").exists():
            raise _Missing("the cgroup v2 tree has no cgroup.kill (Linux 5.14)", "boot a newer kernel")
        (directory / "cgroup.kill").write_text("1")
    finally:
        directory.rmdir()
    return f"cgroup v2 with cgroup.kill at {unified}"


def _controller(name: str) -> Callable[[Path], str]:
    def ask(state_dir: Path) -> str:
        mounts = _cgroups()
        if name in mounts.unified_controllers:
            return f"the {name} controller is in the v2 tree"
        if name in mounts.legacy:
            return f"the {name} controller is a v1 hierarchy at {mounts.legacy[name]}"
        raise _Missing(
            f"no {name} controller is mounted, so sandboxes cannot be limited by it",
            "boot without cgroup_disable=, or mount the hierarchy",
        )

    return ask


def _fanotify(state_dir: Path) -> str:
    remedy = "boot Linux 6.14 or newer and put the state directory on ext4, xfs or btrfs; or load layers by FUSE"
    with _workplace(state_dir) as work:
        sparse = work / "sparse"
        sparse.write_bytes(bytes(4096))
        try:
            group = fanotify.open_group()
            try:
                fanotify.arm(group, sparse)
                _fill_when_asked(group, sparse)
            finally:
                os.close(group)
        except OSError as error:
            raise _Missing(f"reads of files in {state_dir} cannot be asked about: {error.strerror}", remedy) from error
    return "the kernel asks before it reads a marked file"


def _fill_when_asked(group: int, path: Path) -> None:
    """OSError unless a read waits for us and then sees what we wrote."""
    pid, pidfd = spawn(Path(_program("grep")), argv=("-q", "filled", str(path)))
    try:
        if not select.select([group], [], [], PROGRAM_TIMEOUT_S)[0]:
            raise OSError(errno.ENOTSUP, "it read without asking")
        for request in fanotify.parse(os.read(group, fanotify.READ_BYTES)):
            os.pwrite(request.fd, b"filled", request.offset)
            fanotify.answer(group, fanotify.allow(request.fd))
            os.close(request.fd)
        select.select([pidfd], [], [], PROGRAM_TIMEOUT_S)
    finally:
        send_signal(pidfd)
        os.close(pidfd)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if status != 0:
        raise OSError(errno.EIO, "it did not see what was filled in")


def _loop(state_dir: Path) -> str:
    with Path("/dev/loop-control").open("rb") as control:
        number = fcntl.ioctl(control.fileno(), _LOOP_CTL_GET_FREE)
    return f"loop devices work (/dev/loop{number} is free)"


def _nft(state_dir: Path) -> str:
    _program("nft")
    rules = (
        "table ip opendsec_probe {\n chain post {\n  type nat hook postrouting priority srcnat;\n"
        "  ip saddr 192.0.2.0/24 masquerade\n }\n}\n"
        "table inet opendsec_probe {\n chain forward {\n  type filter hook forward priority filter;\n"
        "  fib saddr . iif oif missing drop\n }\n}\n"
    )
    _try("unshare", "--net", _program("nft"), "-f", "-", stdin=rules.encode("ascii"))
    return "nftables can translate addresses, and knows false ones (fib)"


def _veth(state_dir: Path) -> str:
    _try("unshare", "--net", _program("ip"), "link", "add", "ods-probe", "type", "veth", "peer", "name", "ods-peer")
    return "virtual Ethernet pairs can be made"


def _forwarding(state_dir: Path) -> str:
    path = Path("/proc/sys/net/ipv4/ip_forward")
    if not os.access(path, os.W_OK):
        raise _Missing("net.ipv4.ip_forward cannot be set", "mount /proc/sys writable")
    on = path.read_text(encoding="ascii").strip() == "1"
    return (
        "IPv4 is forwarded" if on else "IPv4 forwarding is off; it is switched on while networked sandboxes are allowed"
    )


def _seccomp(state_dir: Path) -> str:
    actions = Path("/proc/sys/kernel/seccomp/actions_avail").read_text(encoding="ascii").split()
    if "errno" not in actions:
        raise _Missing("this kernel has no seccomp filters", "boot a kernel with CONFIG_SECCOMP_FILTER")
    return "seccomp filters work"


def _fuse(state_dir: Path) -> str:
    with Path("/dev/fuse").open("rb"):
        return "file systems can be served by processes (FUSE)"


def _tun(state_dir: Path) -> str:
    with Path("/dev/net/tun").open("rb"):
        return "tun and tap devices can be made"


def _pid_max(state_dir: Path) -> str:
    value = int(Path("/proc/sys/kernel/pid_max").read_text(encoding="ascii"))
    if value < GOOD_PID_MAX:
        raise _Missing(
            f"kernel.pid_max is {value}; every sandbox takes at least one pid", "sysctl kernel.pid_max=4194304"
        )
    return f"kernel.pid_max is {value}"


def _nofile(state_dir: Path) -> str:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard < GOOD_NOFILE:
        raise _Missing(
            f"at most {hard} open files; an edge needs about 3 for each sandbox",
            "raise LimitNOFILE= or `ulimit -Hn`",
        )
    return f"up to {hard} open files"


def _disk(state_dir: Path) -> str:
    place = state_dir
    while not place.exists():
        place = place.parent
    free_mb = shutil.disk_usage(place).free // (1024 * 1024)
    if free_mb < GOOD_DISK_MB:
        raise _Missing(f"{free_mb} MiB are free at {place}", f"make room: {GOOD_DISK_MB} MiB is a start")
    return f"{free_mb} MiB are free at {place}"


def _installed(name: str) -> Callable[[Path], str]:
    return lambda _: f"{name} is {_program(name)}"


_PROBES: dict[str, Callable[[Path], str]] = {
    "root": _root,
    "kernel": _kernel,
    "userns": _userns,
    "netns": _netns,
    "overlay": _overlay,
    "idmap": _idmap,
    "erofs": _erofs,
    "fanotify": _fanotify,
    "cgroup": _cgroup,
    "memcg": _controller("memory"),
    "pids": _controller("pids"),
    "cpu": _controller("cpu"),
    "seccomp": _seccomp,
    "loop": _loop,
    "veth": _veth,
    "nft": _nft,
    "forwarding": _forwarding,
    "tun": _tun,
    "fuse": _fuse,
    "pid_max": _pid_max,
    "nofile": _nofile,
    "disk": _disk,
    **{name: _installed(name) for name in ("mkfs.erofs", "mkfs.ext4", "mmdebstrap")},
}
CONTAINER_NEEDS = ("root", "kernel", "userns", "netns", "overlay", "idmap", "erofs", "cgroup", "seccomp")
"""Without any of these the container backend does not work at all; the others cost a feature or density."""


def names() -> tuple[str, ...]:
    """Every question there is."""
    return tuple(_PROBES)


def probe(name: str, *, state_dir: Path = Path("/var/lib/opendsec")) -> Answer:
    """Ask one question. Raises KeyError for a name that is none of `names()`."""
    question = _PROBES[name]
    try:
        return Answer(name=name, ok=True, sentence=question(state_dir))
    except _Missing as missing:
        return Answer(name=name, ok=False, sentence=missing.sentence, remedy=missing.remedy)
    except ProgramError as error:
        return Answer(name=name, ok=False, sentence=str(error), remedy=_remedy_of(error.stderr))
    except TimeoutError as error:
        return Answer(name=name, ok=False, sentence=str(error))
    except OSError as error:
        where = f" ({os.fspath(error.filename)})" if error.filename else ""
        return Answer(name=name, ok=False, sentence=f"{error.strerror}{where}", remedy=_remedy_of(b"", error.errno))


class Remembered:
    """Answers of `probe` that were yes, kept in a file of the run directory, so until the next boot.

    A service that is started again need not ask again: it is back sooner, and also when the disk is full meanwhile,
    on which most questions are tried.
    """

    def __init__(self, path: Path, *, state_dir: Path) -> None:
        self._path = path
        self._state_dir = state_dir
        self._known = set(path.read_text(encoding="ascii").split()) if path.exists() else set()

    def probe(self, name: str) -> Answer:
        """Ask, unless the answer is known. Blocking. Raises OSError when the answer cannot be kept."""
        if name in self._known:
            return Answer(name=name, ok=True, sentence="it worked before")
        answer = probe(name, state_dir=self._state_dir)
        if answer.ok:
            self._known.add(name)
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._path.write_text("\n".join(sorted(self._known)), encoding="ascii")
        return answer


def _remedy_of(stderr: bytes, number: int | None = None) -> str:
    denied = number in (1, 13) or b"not permitted" in stderr.lower() or b"denied" in stderr.lower()
    return "run as root on the host itself (not in a container without privileges)" if denied else ""


def probe_all(*, state_dir: Path = Path("/var/lib/opendsec")) -> list[Answer]:
    """Every question, in a fixed order."""
    return [probe(name, state_dir=state_dir) for name in _PROBES]
