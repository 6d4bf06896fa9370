"""MooseFS for tests: a master and chunkservers, each a machine of its own as far as the network goes, and clients.

    switch (bridge in a namespace) ── master, c1, c2, c3 (servers), a, b (nodes), each in a network namespace

    with moosefs(folder) as cluster, cluster.mounted("a", folder / "a") as root:
        ...
        cluster.chunkservers[0].kill()

A node's mount is in the caller's mount namespace, so what runs here can read it; only its traffic is in the node's
network namespace and can be cut there. Two nodes are two clients that share nothing but the master.

Everything ends by process id and dies with the caller (PR_SET_PDEATHSIG). When the caller is killed, namespaces
`opendsec-mfs-*`, dead mounts and the folder stay. It needs root and Debian's moosefs-master, moosefs-chunkserver and
moosefs-client. Chunkservers keep their data in the folder, and
each takes the whole disk it is on for its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from opendsec.linux.libc import MNT_DETACH, umount2
from opendsec.linux.mount import mountinfo

PROGRAMS = {
    "mfsmaster": "moosefs-master",
    "mfschunkserver": "moosefs-chunkserver",
    "mfsmount": "moosefs-client",
    "mfssetgoal": "moosefs-client",
}
"""And the packages that hold them."""

CHUNKSERVERS = 3
COPIES = 2
"""Of every file: one chunkserver may be gone."""
NODES = ("a", "b")
HOSTS = ("master", *(f"c{number + 1}" for number in range(CHUNKSERVERS)), *NODES)
BOUNDED = ("mfsioretries=4", "mfstimeout=12")
"""A client that gives up: EIO when no copy answers for twelve seconds. One server that is cut off costs it about four.
Its default is to try 30 times, for minutes."""

_NETWORK = "198.18.77"
_STARTED_S = 60.0
_EMPTY_METADATA = b"MFSM NEW"
_MASTER = """
WORKING_USER = root
WORKING_GROUP = root
DATA_PATH = {folder}
EXPORTS_FILENAME = {folder}/exports
TOPOLOGY_FILENAME = {folder}/topology
NICE_LEVEL = 0
DISABLE_OOM_KILLER = 0
CHUNKS_LOOP_MIN_TIME = 60
SESSION_SUSTAIN_TIME = 60
OPERATIONS_DELAY_INIT = 1
OPERATIONS_DELAY_DISCONNECT = 1
"""
_CHUNKSERVER = """
WORKING_USER = root
WORKING_GROUP = root
DATA_PATH = {folder}/state
HDD_CONF_FILENAME = {folder}/disks
HDD_LEAVE_SPACE_DEFAULT = 16MiB
HDD_TEST_SPEED = 0
MASTER_HOST = {master}
MASTER_RECONNECTION_DELAY = 1
NICE_LEVEL = 0
DISABLE_OOM_KILLER = 0
"""


def missing() -> str | None:
    """Why it cannot run here."""
    absent = sorted({package for program, package in PROGRAMS.items() if shutil.which(program) is None})
    if absent:
        return f"apt-get install {' '.join(absent)}"
    return None if Path("/dev/fuse").exists() else "no /dev/fuse"


def run(*argv: str) -> str:
    """A short command; what it says."""
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, f"{' '.join(argv)}: {done.stdout}{done.stderr}"
    return done.stdout


_KEEPER = 'while read -r; do setpriv --pdeathsig KILL "$@" </dev/null >&2 & echo $!; done'
"""Starts the program each time it is told to and says its process id; dies with the caller, the program with it."""


@dataclass(slots=True)
class Program:
    """One program in one network namespace, that can be ended and started anew.

    Its process is a child of a small one of its own, so that whoever counts the caller's children sees no change.
    """

    namespace: str
    argv: Sequence[str]
    log: Path
    keeper: subprocess.Popen[bytes] | None = None
    pid: int = 0

    def start(self) -> None:
        """Begin; it may not be ready yet."""
        if self.keeper is None:
            within = ("nsenter", f"--net=/run/netns/{self.namespace}", "setpriv", "--pdeathsig", "KILL")
            keeper = (*within, "bash", "-c", _KEEPER, "keeper", *self.argv)
            with self.log.open("ab") as log:
                self.keeper = subprocess.Popen(
                    keeper, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, start_new_session=True
                )
        assert self.keeper.stdin is not None
        assert self.keeper.stdout is not None
        self.keeper.stdin.write(b"\n")
        self.keeper.stdin.flush()
        self.pid = int(self.keeper.stdout.readline())

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone. Idempotent."""
        pid, self.pid = self.pid, 0
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):
            if not pid or self.argv[0] not in Path(f"/proc/{pid}/cmdline").read_text():
                return
            pidfd = os.pidfd_open(pid)
            try:
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                assert select.select([pidfd], [], [], 20)[0], f"{self.argv[0]} does not end"
            finally:
                os.close(pidfd)

    def close(self) -> None:
        """For good."""
        self.kill()
        if self.keeper is not None:
            self.keeper.communicate(timeout=120)
            self.keeper = None


@dataclass(slots=True)
class Server(Program):
    """A server, and the cable between it and the switch."""

    switch: str = ""
    port: str = ""
    address: str = ""

    def cut(self) -> None:
        """Pull the cable: packets vanish, connections stay open."""
        run("ip", "-n", self.switch, "link", "set", "dev", self.port, "down")

    def mend(self) -> None:
        """Put it in again."""
        run("ip", "-n", self.switch, "link", "set", "dev", self.port, "up")


@dataclass(slots=True)
class Cluster:
    """Running servers; see `moosefs`."""

    folder: Path
    name: str
    master: Server
    chunkservers: list[Server]
    clients: dict[Path, Program] = field(default_factory=dict)

    @contextmanager
    def mounted(self, node: str, point: Path, *, options: Sequence[str] = BOUNDED) -> Iterator[Path]:
        """The file system as a node sees it, at `point`, which is made; gone afterwards, whoever uses it still."""
        point.mkdir(parents=True, exist_ok=True)
        words = ",".join((f"mfsmaster={_address('master')}", "allow_other", "mfsallowoomkiller", "mfsnice=0", *options))
        client = Program(
            f"{self.name}-{node}", ("mfsmount", "-f", str(point), "-o", words), self.folder / f"client-{node}.log"
        )
        try:
            client.start()
            wait_for(lambda: _is_mounted(point), client.log)
            self.clients[point] = client
            yield point
        finally:
            self.clients.pop(point, None)
            while _is_mounted(point):
                umount2(point, MNT_DETACH)
            client.close()
            point.rmdir()

    def lose(self, node: str, point: Path, *, cut: bool) -> None:
        """A node goes without a goodbye: its client is killed, or its cable pulled."""
        if cut:
            run("ip", "-n", f"{self.name}-switch", "link", "set", "dev", node, "down")
        else:
            self.clients[point].kill()

    def restore(self, node: str) -> None:
        """Put a node's cable in again."""
        run("ip", "-n", f"{self.name}-switch", "link", "set", "dev", node, "up")

    def asked(self, node: str, *argv: str) -> str:
        """What one of MooseFS' commands says; it asks the client of that node at the node's own loopback."""
        return run("nsenter", f"--net=/run/netns/{self.name}-{node}", *argv)

    def received_bytes(self, node: str) -> int:
        """What has come over a node's cable so far."""
        within = ("nsenter", f"--net=/run/netns/{self.name}-{node}", "ip", "-s", "-j", "link", "show", "dev", "eth0")
        count: int = json.loads(run(*within))[0]["stats64"]["rx"]["bytes"]
        return count

    def said(self, node: str) -> str:
        """The end of what that node's client has logged."""
        return (self.folder / f"client-{node}.log").read_text(errors="replace")[-3000:]

    def wait_for_chunkservers(self, root: Path, *, count: int = CHUNKSERVERS) -> None:
        """Until so many take part. `root`: a mount."""

        def enough() -> bool:
            return _free_bytes(root) >= (count - 0.5) * _free_bytes(self.folder)

        wait_for(enough, self.master.log)


def wait_for(ready: Callable[[], bool], log: Path, *, within_s: float = _STARTED_S) -> None:
    """Poll; the log's end in the error."""
    deadline = time.monotonic() + within_s
    while not ready():
        assert time.monotonic() < deadline, log.read_text(errors="replace")[-2000:] if log.exists() else "no log"
        time.sleep(0.02)


@contextmanager
def moosefs(folder: Path, *, copies: int = COPIES) -> Iterator[Cluster]:
    """A file system that is ready to be mounted; nothing of it is left afterwards but `folder` itself, empty."""
    name = f"opendsec-mfs-{os.getpid()}-{secrets.token_hex(2)}"
    with ExitStack() as stack:
        stack.enter_context(_network(name, HOSTS))
        stack.enter_context(_emptied(folder))
        servers = [_make_server(name, host, folder / host) for host in HOSTS if host not in NODES]
        for server in servers:
            stack.callback(server.close)
        cluster = Cluster(folder, name, servers[0], servers[1:])
        servers[0].start()
        wait_for(lambda: _listens(name), servers[0].log)
        for server in servers[1:]:
            server.start()
        with cluster.mounted(NODES[0], folder / "first") as root:
            cluster.wait_for_chunkservers(root)
            cluster.asked(NODES[0], "mfssetgoal", str(copies), str(root))
            cluster.asked(NODES[0], "mfssettrashtime", "0", str(root))
        yield cluster


def _address(host: str) -> str:
    return f"{_NETWORK}.{HOSTS.index(host) + 2}"


def _make_server(name: str, host: str, folder: Path) -> Server:
    folder.mkdir(parents=True)
    config = folder / "config"
    program = "mfsmaster" if host == "master" else "mfschunkserver"
    if host == "master":
        config.write_text(_MASTER.format(folder=folder))
        (folder / "exports").write_text("* / rw,alldirs,admin,maproot=0:0\n")
        (folder / "topology").touch()
        (folder / "metadata.mfs").write_bytes(_EMPTY_METADATA)
    else:
        config.write_text(_CHUNKSERVER.format(folder=folder, master=_address("master")))
        for below in ("state", "disk"):
            (folder / below).mkdir()
        (folder / "disks").write_text(f"~{folder / 'disk'}\n")
    argv = (program, "-f", *(("-a",) if host == "master" else ()), "-c", str(config), "start")
    return Server(
        f"{name}-{host}",
        argv,
        folder.with_suffix(".log"),
        switch=f"{name}-switch",
        port=host,
        address=_address(host),
    )


def _free_bytes(path: Path) -> int:
    space = os.statvfs(path)
    return space.f_bavail * space.f_frsize


def _is_mounted(point: Path) -> bool:
    return any(entry.target == str(point) for entry in mountinfo())


def _listens(name: str) -> bool:
    probe = ("nsenter", f"--net=/run/netns/{name}-a", "bash", "-c", f"exec 3<>/dev/tcp/{_address('master')}/9421")
    return subprocess.run(probe, stderr=subprocess.DEVNULL, timeout=120, check=False).returncode == 0


@contextmanager
def _emptied(folder: Path) -> Iterator[None]:
    try:
        yield
    finally:
        for path in folder.iterdir():
            with contextlib.suppress(NotADirectoryError):
                shutil.rmtree(path)
                continue
            path.unlink()


@contextmanager
def _network(name: str, hosts: Sequence[str]) -> Iterator[None]:
    """A namespace for each host, joined by a bridge in one more; the last goes with all cables."""
    switch = f"{name}-switch"
    with ExitStack() as stack:
        for namespace in (switch, *(f"{name}-{host}" for host in hosts)):
            run("ip", "netns", "add", namespace)
            stack.callback(run, "ip", "netns", "delete", namespace)
        _batch(switch, ["link add br0 type bridge", "link set br0 up"])
        for host in hosts:
            namespace = f"{name}-{host}"
            _batch(switch, [f"link add name {host} type veth peer name eth0 netns {namespace}"])
            _batch(switch, [f"link set dev {host} master br0", f"link set dev {host} up"])
            address = f"address add {_address(host)}/24 dev eth0"
            _batch(namespace, ["link set lo up", address, "link set eth0 up"])
        yield


def _batch(namespace: str, lines: Sequence[str]) -> None:
    done = subprocess.run(
        ["ip", "-n", namespace, "-batch", "-"],
        input="\n".join(lines),
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 0, f"{namespace}: {lines}: {done.stderr}"
