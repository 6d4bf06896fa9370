"""What a launched sandbox is, seen from inside and outside, on the real kernel."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from tests.node.linux.launching import DOCKER_CAPS, OUTSIDE, Site, build_probe, cgroup1_root, remove_cgroup

from opendsec.linux import mount, process
from opendsec.linux.launch import Bind, Launcher, Tmpfs, install_guest

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.root,
    pytest.mark.userns,
    pytest.mark.netns,
    pytest.mark.cgroup,
    pytest.mark.overlay,
    pytest.mark.native,
]

NS_GET_OWNER_UID = 0xB704
"""linux/nsfs.h"""
EPERM, EACCES = f"errno {errno.EPERM}", f"errno {errno.EACCES}"


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def probe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_probe(tmp_path_factory.mktemp("probe"))


@pytest.fixture
def site(tmp_path: Path, probe: Path) -> Iterator[Site]:
    with Site(tmp_path, probe) as site:
        yield site


@pytest.fixture
async def launcher() -> AsyncIterator[Launcher]:
    async with Launcher() as launcher:
        yield launcher


async def test_identity_inside_and_outside(site: Site, launcher: Launcher) -> None:
    place = site.place()
    launched = await launcher.launch(place.plan)
    status = Path(f"/proc/{launched.pid}/status").read_text()
    assert f"Uid:\t{OUTSIDE}\t{OUTSIDE}\t{OUTSIDE}\t{OUTSIDE}\n" in status
    assert f"Gid:\t{OUTSIDE}\t{OUTSIDE}\t{OUTSIDE}\t{OUTSIDE}\n" in status
    assert "NSpid:\t" + f"{launched.pid}\t1\n" in status
    assert f"CapBnd:\t{place.plan.caps:016x}\n" in status
    assert "Groups:\t \n" in status
    inside = await place.said("read /proc/self/status")
    assert "Uid:\t0\t0\t0\t0\n" in inside
    assert "NoNewPrivs:\t0\n" in inside
    assert "Seccomp:\t2\n" in inside
    assert "SigBlk:\t0000000000000000\n" in inside
    assert place.pids() == [launched.pid]
    os.close(launched.pidfd)


async def test_setuid_programs_work_and_gain_only_inner_root(site: Site, launcher: Launcher) -> None:
    place = site.place()
    os.close((await launcher.launch(place.plan)).pidfd)
    assert (await place.said("setuid /probe")).startswith("0 1000 100600")
    found = (place.upper / "tmp" / "mark").stat()
    assert (found.st_uid, found.st_gid) == (0, 1000)


async def test_a_locked_root_cannot_be_written_and_raises_nobody(site: Site, launcher: Launcher) -> None:
    sysctls = {"kernel/shmmni": "0", "kernel/msgmni": "0"}
    place = site.place(
        root="ro,nosuid", sysctls=sysctls, tmpfs=(Tmpfs(target="/dev/shm"), Tmpfs(target="/box", options="mode=1777"))
    )
    os.close((await launcher.launch(place.plan)).pidfd)
    assert await place.ask("write /made") == f"errno {errno.EROFS}"
    assert await place.said("write /box/made") == ""
    for name, value in sysctls.items():
        assert await place.said(f"read /proc/sys/{name}") == f"{value}\n"
        assert Path(f"/proc/sys/{name}").read_text() != f"{value}\n"
    mounts = mount.parse_mountinfo((await place.said("read /proc/self/mountinfo")).encode().splitlines())
    assert {"ro", "nosuid", "nodev"} <= set(mounts[0].options)


async def test_files_are_zero_based_on_disk(site: Site, launcher: Launcher) -> None:
    place = site.place()
    os.close((await launcher.launch(place.plan)).pidfd)
    assert await place.said("write /made") == ""
    assert (await place.said("stat /made")).startswith("0 0 100640")
    found = (place.upper / "made").stat()
    assert (found.st_uid, found.st_gid) == (0, 0)
    assert (await place.said("stat /etc/passwd")).startswith("0 0 ")
    assert (await place.said("stat /dev/shm")).startswith("0 0 41777")
    mounts = mount.parse_mountinfo((await place.said("read /proc/self/mountinfo")).encode().splitlines())
    assert [entry.target for entry in mounts][:3] == ["/", "/dev", "/dev/shm"]
    assert "nosuid" not in mounts[0].options
    assert "nodev" in mounts[0].options


async def test_descriptors_of_the_agent(site: Site, launcher: Launcher) -> None:
    place = site.place()
    os.close((await launcher.launch(place.plan)).pidfd)
    pid = place.pids()[0]
    links = {entry.name: os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir()}
    assert sorted(links, key=int) == ["0", "1", "2", "3", "4"]
    assert {links["0"], links["1"], links["2"]} == {"/dev/null"}
    assert links["3"].startswith("socket:")


async def test_cgroup_descriptor_leads_nowhere_else(site: Site, launcher: Launcher) -> None:
    place = site.place()
    os.close((await launcher.launch(place.plan)).pidfd)
    assert await place.said("cgroup ..") == "same"
    assert await place.said("cgroup ../..") == "same"
    assert await place.said("mkcgroup cmd-1") == ""
    assert (place.cgroup / "cmd-1").stat().st_uid == OUTSIDE
    assert "0::/\n" in await place.said("read /proc/self/cgroup")


@pytest.mark.parametrize(
    "line",
    [
        "mount tmpfs",
        "mount proc",
        "umount /proc",
        "umount /dev/shm",
        "unshare 0x10000000",
        "unshare 0x00020000",
        "clone3 0x00020000",
        "clone3 0x40000000",
        "hostname mine",
        "mknod /tmp/device",
        "ptrace 1",
    ],
)
async def test_refused_inside(site: Site, launcher: Launcher, line: str) -> None:
    place = site.place()
    os.close((await launcher.launch(place.plan)).pidfd)
    assert await place.ask(line) == EPERM


async def test_no_user_namespace_where_no_filter_sees_it(site: Site, launcher: Launcher) -> None:
    place = site.place()
    os.close((await launcher.launch(place.plan)).pidfd)
    assert await place.ask("clone3 0x10000000") == f"errno {errno.ENOSPC}"
    assert await place.ask("write /proc/sys/user/max_user_namespaces") == EACCES


async def test_seccomp_refuses_by_number_and_argument(site: Site, launcher: Launcher) -> None:
    place = site.place()
    os.close((await launcher.launch(place.plan)).pidfd)
    vsock, algorithms, beyond, io_uring_setup, fsopen = 40, 38, 470, 425, 430
    assert await place.ask(f"socket {vsock}") == f"errno {errno.EAFNOSUPPORT}"
    assert await place.ask(f"socket {algorithms}") == f"errno {errno.EAFNOSUPPORT}"
    assert await place.ask(f"syscall {beyond}") == f"errno {errno.ENOSYS}"
    assert await place.ask(f"syscall {0x40000000}") == f"errno {errno.ENOSYS}"
    assert await place.ask(f"syscall {io_uring_setup}") == f"errno {errno.ENOSYS}"
    assert await place.ask(f"syscall {fsopen}") == EPERM
    assert await place.said("socket 1") == ""


async def test_pid_1_is_out_of_reach(site: Site, launcher: Launcher) -> None:
    place = site.place()
    launched = await launcher.launch(place.plan)
    for line in ("list /proc/1/fd", "read /proc/1/mem", "read /proc/1/environ", "read /proc/1/maps"):
        assert await place.ask(line) == EACCES, line
    for name in ("exe", "root", "cwd", "ns/mnt"):
        assert await place.ask(f"list /proc/1/{name}") == EACCES, name
    assert await place.ask("kill 1") == "ok "
    assert await place.ask("kill -1") == f"errno {errno.ESRCH}"
    assert not process.has_ended(launched.pidfd)
    assert await place.said("hostname") == "sandbox"
    os.close(launched.pidfd)


@pytest.mark.parametrize(
    "call",
    [
        "prlimit64 1 7",
        "sched_setaffinity 1 0",
        "sched_setattr 1 0",
        "sched_setparam 1 0",
        "sched_setscheduler 1 5",
        "setpriority 0 1",
        "setpriority 1 1",
        "setpriority 2 0",
        "ioprio_set 1 1",
        "ioprio_set 2 1",
        "ioprio_set 3 0",
    ],
)
async def test_pid_1_keeps_its_limits_and_its_turn(site: Site, launcher: Launcher, call: str) -> None:
    # Root inside is the same user as the agent, and nothing else is asked for by these calls.
    place = site.place()
    os.close((await launcher.launch(place.plan)).pidfd)
    assert await place.ask(f"call {call}") == EPERM


async def test_what_is_counted_per_user_is_not_counted_for_the_hosts_root(site: Site, launcher: Launcher) -> None:
    place = site.place()
    launched = await launcher.launch(place.plan)
    os.close(launched.pidfd)
    owner = bytearray(4)
    with Path(f"/proc/{launched.pid}/ns/user").open("rb") as namespace:
        fcntl.ioctl(namespace.fileno(), NS_GET_OWNER_UID, owner)
    assert int.from_bytes(owner, "little") == OUTSIDE

    def pending_of_root() -> int:
        status = Path("/proc/self/status").read_text()
        return int(status.partition("SigQ:")[2].split("/")[0])

    before = pending_of_root()
    assert await place.said("pend 1000") == ""
    assert pending_of_root() < before + 500


async def test_ones_own_limits_and_priority_may_be_changed(site: Site, launcher: Launcher) -> None:
    place = site.place()
    os.close((await launcher.launch(place.plan)).pidfd)
    assert await place.said("call prlimit64 0 7") == ""
    for line in ("call setpriority 0 0", "call setpriority 1 0", "call ioprio_set 1 0"):
        assert (
            await place.ask(line) != EPERM
        )  # the kernel decides: EACCES where the tests themselves run with less priority
    assert await place.ask("call sched_setscheduler 0 0") == f"errno {errno.EINVAL}"  # the kernel's own answer


async def test_masks_hide(site: Site, launcher: Launcher) -> None:
    place = site.place()
    os.close((await launcher.launch(place.plan)).pidfd)
    assert await place.ask("read /proc/uptime") == EACCES
    assert sorted((await place.said("list /proc/bus")).split()) == [".", ".."]
    assert await place.ask("write /proc/bus/x") == f"errno {errno.EROFS}"
    for line in ("write /proc/sysrq-trigger", "read /proc/kcore", "read /proc/kpagecgroup"):
        assert await place.ask(line) in (EACCES, f"errno {errno.ENOENT}"), line


async def test_network_is_loopback_with_low_ports(site: Site, launcher: Launcher) -> None:
    place = site.place()
    os.close((await launcher.launch(place.plan)).pidfd)
    assert await place.said("link lo") == "up"
    assert await place.said("bind 80") == ""
    devices = [line.split(":")[0].strip() for line in (await place.said("read /proc/net/dev")).splitlines()[2:]]
    assert devices == ["lo"]
    groups = (await place.said("read /proc/sys/net/ipv4/ping_group_range")).split()
    assert groups == ["0", "65535"]


async def test_hostname_limits_and_umask(site: Site, launcher: Launcher) -> None:
    limits = {resource.RLIMIT_NOFILE: (512, 10**9), resource.RLIMIT_CORE: (0, 0)}
    place = site.place(hostname="other-name", rlimits=limits)
    os.close((await launcher.launch(place.plan)).pidfd)
    assert await place.said("hostname") == "other-name"
    assert await place.said("nofile") == f"512 {min(10**9, resource.getrlimit(resource.RLIMIT_NOFILE)[1])}"
    assert "Umask:\t0022\n" in await place.said("read /proc/self/status")


async def test_binds_make_their_targets_and_drop_devices(site: Site, launcher: Launcher) -> None:
    file = site.root / "resolv"
    file.write_text("nameserver 127.0.0.1\n")
    binds = (
        Bind(fd=site.open(site.dev), target="/dev", devices=True),
        Bind(fd=site.open(file), target="/etc/resolv.conf"),
        Bind(fd=site.open(file), target="/new place/deep/file"),
        Bind(fd=site.open(site.dev), target="/other dev", read_only=False),
    )
    place = site.place(binds=binds)
    os.close((await launcher.launch(place.plan)).pidfd)
    assert await place.said("read /etc/resolv.conf") == "nameserver 127.0.0.1\n"
    assert await place.said("read /new place/deep/file") == "nameserver 127.0.0.1\n"
    assert await place.ask("write /etc/resolv.conf") == EACCES
    assert await place.said("read /dev/null") == ""
    assert await place.ask("read /other dev/null") == EACCES
    assert (place.upper / "new place").stat().st_uid == 0


async def test_devices_of_an_image_cannot_be_opened(site: Site, launcher: Launcher) -> None:
    os.mknod(site.lower / "kmsg", 0o20600, os.makedev(1, 11))
    place = site.place()
    os.close((await launcher.launch(place.plan)).pidfd)
    assert (await place.said("stat /kmsg")).endswith("20600 1:11")
    assert await place.ask("read /kmsg") == EACCES


async def test_many_layers_topmost_first(site: Site, launcher: Launcher) -> None:
    layers = [site.root / f"layer{number}" for number in range(40)]
    for number, layer in enumerate(layers):
        layer.mkdir()
        (layer / f"only{number}").write_text("")
        (layer / "all").write_text(str(number))
    place = site.place(lower=tuple(site.open(path, os.O_PATH) for path in (*layers, site.lower)))
    os.close((await launcher.launch(place.plan)).pidfd)
    assert await place.said("read /all") == "0"
    assert await place.said("read /only39") == ""
    assert await place.said("read /etc/passwd") != ""


async def test_v1_cgroups_are_entered(site: Site, launcher: Launcher) -> None:
    root = cgroup1_root("pids")
    if root is None:
        pytest.skip("this host has no v1 pids hierarchy")
    directory = root / f"opendsec-test-launch-{os.getpid()}"
    directory.mkdir()
    try:
        place = site.place(cgroup1=(site.open(directory / "cgroup.procs", os.O_WRONLY),))
        launched = await launcher.launch(place.plan)
        assert f"/{directory.name}\n" in Path(f"/proc/{launched.pid}/cgroup").read_text()
        inside = await place.said("read /proc/self/cgroup")
        assert directory.name not in inside
        process.send_signal(launched.pidfd)
        await process.wait_ended(launched.pidfd, timeout_s=10)
        os.close(launched.pidfd)
    finally:
        remove_cgroup(directory)


@pytest.mark.erofs
async def test_an_erofs_layer(site: Site, launcher: Launcher) -> None:
    image, target = site.root / "image.erofs", site.root / "mounted"
    subprocess.run(["mkfs.erofs", "--quiet", image, site.lower], check=True, timeout=120, capture_output=True)
    target.mkdir()
    tree = mount.erofs(image)
    mount.attach(tree, target)
    os.close(tree)
    try:
        fd = os.open(target, os.O_PATH | os.O_CLOEXEC)
        place = site.place(lower=(fd,))
        launched = await launcher.launch(place.plan)
        os.close(fd)
        assert await place.said("read /etc/passwd") == "root:x:0:0::/:/bin/sh\n"
        assert (await place.said("stat /probe")).startswith("0 0 104755")
        process.send_signal(launched.pidfd)
        await process.wait_ended(launched.pidfd, timeout_s=10)
        os.close(launched.pidfd)
    finally:
        assert mount.unmount(target, detach=True)


async def test_the_agents_program_is_installed_unreadable(tmp_path: Path, probe: Path) -> None:
    first = install_guest(tmp_path, binary=probe)
    assert first.stat().st_mode & 0o7777 == 0o711
    assert install_guest(tmp_path, binary=probe) == first
    assert [entry.name for entry in first.parent.iterdir()] == [first.name]


async def test_without_the_unreadable_program_pid_1_would_be_open(site: Site, launcher: Launcher, probe: Path) -> None:
    """Shows that mode 0711 is what protects: the same program, readable, is not protected."""
    readable = site.root / "readable"
    readable.write_bytes(probe.read_bytes())
    readable.chmod(0o755)
    place = site.place(guest=site.open(readable), caps=DOCKER_CAPS | 1 << 19)
    os.close((await launcher.launch(place.plan)).pidfd)
    assert (await place.ask("list /proc/1/fd")).startswith("ok ")
