"""What one sandbox costs: our launcher beside crun, runc, bwrap, podman and runsc, in one run on one machine.

    sudo .venv/bin/python benchmarks/launch.py [--rounds 5] [--starts 40] [--only opendsec,crun]
    sudo .venv/bin/python benchmarks/launch.py --idle 300        # memory of idle sandboxes
    sudo .venv/bin/python benchmarks/launch.py --profile         # where the launcher's time goes (perf)

CPU is the `usage_usec` of a cgroup in which the benchmark and everything it starts run, so no process escapes the sum:
ours (Python side, launcher, the sandbox's own process) and theirs (fork and execution of the runtime, its
helpers, its children). What the kernel does later in its own threads is in nobody's sum. One start of theirs is `run`
of /bin/true with its clean-up; ours is given up to "the agent runs" (`start`) and with its end and clean-up
(`start+end`). Rounds are interleaved, medians over rounds are printed; ratios are against `crun` in the same run.

A runtime that is not installed, or does not run here, is named with its reason.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from opendsec.linux import mount, process
from opendsec.linux.launch import GUEST_PATH, Bind, IdMap, Launched, Launcher, LaunchPlan, Tmpfs, install_guest
from opendsec.linux.spread import spread_subdirectories

OUTSIDE = 268435456
CAPS = 0xA80425FB
MASKS = ("/proc/acpi", "/proc/keys", "/proc/scsi", "/proc/timer_list")
CONTROLLERS = ("memory", "cpu", "pids")
TIMEOUT_S = 60


def cgroup2() -> Path:
    return Path(next(entry.target for entry in mount.mountinfo() if entry.fstype == "cgroup2"))


def cgroup1() -> list[Path]:
    """Mount points of the v1 hierarchies a sandbox of ours would enter here."""
    return [
        Path(entry.target)
        for entry in mount.mountinfo()
        if entry.fstype == "cgroup" and set(CONTROLLERS) & set(entry.super_options)
    ]


@dataclass(slots=True)
class Bench:
    """The benchmark's own cgroup and directories."""

    root: Path
    cgroup: Path
    rootfs: Path
    layer: int
    guest: int
    dev: int
    sys: int
    serial: int = 0
    v1: list[Path] = field(default_factory=list)

    def cpu_ms(self) -> float:
        words = (self.cgroup / "cpu.stat").read_text().split()
        return int(words[words.index("usage_usec") + 1]) / 1000


@contextmanager
def bench() -> Iterator[Bench]:
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="opendsec-bench-", dir="/var/lib")))
        home = process_cgroup()
        group = cgroup2() / f"opendsec-bench-{os.getpid()}"
        group.mkdir()
        stack.callback(remove_group, group)
        stack.callback(remove_podmans, podmans_groups())
        (group / "self").mkdir()
        (group / "self" / "cgroup.procs").write_text(str(os.getpid()))
        stack.callback((home / "cgroup.procs").write_text, str(os.getpid()))
        v1 = [directory / group.name for directory in cgroup1()]
        for directory in v1:
            directory.mkdir()
            stack.callback(remove_group, directory)
        stack.callback(kill_sandboxes, group)
        rootfs = make_rootfs(root)
        layer = mount_layer(root, rootfs, stack)
        dev, sysfs = make_dev(root, stack), make_sys(root, stack)
        guest = os.open(install_guest(root, binary=GUEST_PATH), os.O_PATH | os.O_CLOEXEC)
        for fd in (layer, guest, dev, sysfs):
            stack.callback(os.close, fd)
        spread_subdirectories(root)
        yield Bench(root, group, rootfs, layer, guest, dev, sysfs, v1=v1)


def process_cgroup() -> Path:
    line = next(line for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::"))
    return cgroup2() / line[3:].lstrip("/")


def make_rootfs(root: Path) -> Path:
    """A root file system with a static /bin/true, for everybody."""
    busybox = shutil.which("busybox")
    if busybox is None:
        sys.exit("benchmarks/launch.py needs busybox: apt-get install busybox-static")
    rootfs = root / "rootfs"
    for name in ("bin", "proc", "sys", "dev", "etc", "tmp"):
        (rootfs / name).mkdir(parents=True)
    shutil.copy(busybox, rootfs / "bin" / "busybox")
    for name in ("sh", "true", "sleep"):
        (rootfs / "bin" / name).symlink_to("busybox")
    return rootfs


def mount_layer(root: Path, rootfs: Path, stack: ExitStack) -> int:
    image, target = root / "layer.erofs", root / "layer"
    target.mkdir()
    subprocess.run(["mkfs.erofs", "--quiet", image, rootfs], check=True, timeout=TIMEOUT_S, capture_output=True)
    tree = mount.erofs(image)
    mount.attach(tree, target)
    os.close(tree)
    stack.callback(mount.unmount, target, detach=True)
    return os.open(target, os.O_PATH | os.O_CLOEXEC)


def make_dev(root: Path, stack: ExitStack) -> int:
    target = root / "dev"
    target.mkdir()
    tree = mount.tmpfs(size_bytes=65536)
    mount.attach(tree, target)
    os.close(tree)
    stack.callback(mount.unmount, target, detach=True)
    for name, minor in (("null", 3), ("zero", 5), ("random", 8), ("urandom", 9)):
        os.mknod(target / name, 0o20666, os.makedev(1, minor))
        (target / name).chmod(0o666)
    for name in ("pts", "shm"):
        (target / name).mkdir()
    return os.open(target, os.O_PATH | os.O_CLOEXEC)


def make_sys(root: Path, stack: ExitStack) -> int:
    """The host's sysfs without what is mounted in it."""
    target = root / "sys"
    target.mkdir()
    tree = mount.clone("/sys")
    mount.attach(tree, target)
    os.close(tree)
    stack.callback(mount.unmount, target, detach=True)
    return os.open(target, os.O_PATH | os.O_CLOEXEC)


# ── ours ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(slots=True)
class Sandbox:
    state: Path
    groups: list[Path]
    plan: LaunchPlan
    fds: list[int]
    listener: socket.socket

    def close_descriptors(self) -> None:
        for fd in self.fds:
            os.close(fd)
        self.listener.close()

    def remove(self) -> None:
        """After its end."""
        for group in self.groups:
            remove_group(group)
        shutil.rmtree(self.state)


def kill_sandboxes(group: Path) -> None:
    """What an interrupted run has left."""
    for sandbox in group.glob("s[0-9]*"):
        (sandbox / "cgroup.kill").write_text("1")


def podmans_groups() -> set[Path]:
    """Podman leaves an empty parent group in every hierarchy."""
    return set(Path("/sys/fs/cgroup").glob("*/libpod_parent"))


def remove_podmans(before: set[Path]) -> None:
    for group in podmans_groups() - before:
        remove_group(group)


def remove_group(group: Path) -> None:
    deadline = time.monotonic() + 10
    while True:
        try:
            for child in group.iterdir():
                if child.is_dir():
                    child.rmdir()
            group.rmdir()
        except OSError:
            if time.monotonic() > deadline:
                raise
        else:
            return


def prepare(bench: Bench, slot: int) -> Sandbox:
    """Everything a backend would prepare: directories, cgroups, the listening socket; ids by slot, as an edge does."""
    bench.serial += 1
    name = f"s{bench.serial}"
    state = bench.root / name
    for directory in (state, state / "upper", state / "work"):
        directory.mkdir()
    groups = [parent / name for parent in (bench.cgroup, *bench.v1)]
    for group in groups:
        group.mkdir()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(state / "agent.sock"))
    listener.listen(1)
    fds = [os.open(groups[0], os.O_RDONLY | os.O_CLOEXEC)]
    fds += [os.open(group / "cgroup.procs", os.O_WRONLY | os.O_CLOEXEC) for group in groups[1:]]
    plan = LaunchPlan(
        lower=(bench.layer,),
        upper=state / "upper",
        work=state / "work",
        idmap=IdMap(0, OUTSIDE + 65536 * slot, 65536),
        cgroup2=fds[0],
        cgroup1=tuple(fds[1:]),
        listen=listener.fileno(),
        guest=bench.guest,
        binds=(
            Bind(fd=bench.dev, target="/dev", devices=True),
            Bind(fd=bench.sys, target="/sys"),
        ),
        tmpfs=(Tmpfs(target="/dev/shm", options="size=64m,mode=1777"),),
        masks=MASKS,
        caps=CAPS,
        overlay=("volatile",),
        rlimits={7: (1024, 65536)},
    )
    return Sandbox(state, groups, plan, fds, listener)


async def end(launched: list[Launched]) -> None:
    for each in launched:
        process.send_signal(each.pidfd)
    for each in launched:
        await process.wait_ended(each.pidfd, timeout_s=TIMEOUT_S)
        os.close(each.pidfd)


@dataclass(slots=True)
class Round:
    """One variant in one round."""

    cpu_ms: float
    wall_ms: float
    rate: float | None = None


async def ours(bench: Bench, launcher: Launcher, starts: int, *, at_once: int = 1) -> dict[str, Round]:
    """`start`: the Python side, the launcher and the sandbox's process; not the preparation."""
    sandboxes = [prepare(bench, slot) for slot in range(starts)]
    launched: list[Launched] = []
    cpu, wall = bench.cpu_ms(), time.perf_counter()
    for first in range(0, starts, at_once):
        batch = sandboxes[first : first + at_once]
        launched += await asyncio.gather(*(launcher.launch(sandbox.plan) for sandbox in batch))
    started_cpu, started_wall = bench.cpu_ms(), time.perf_counter()
    await end(launched)
    for sandbox in sandboxes:
        sandbox.close_descriptors()
        sandbox.remove()
    ended_cpu, ended_wall = bench.cpu_ms(), time.perf_counter()
    start_s = started_wall - wall
    return {
        "start": Round((started_cpu - cpu) / starts, start_s * 1000 / starts, starts / start_s),
        "start+end": Round((ended_cpu - cpu) / starts, (ended_wall - wall) * 1000 / starts),
    }


# ── theirs ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def oci_bundle(bench: Bench) -> Path:
    """A bundle with the specification `runc spec` (or `crun spec`) writes, running /bin/true without a terminal."""
    bundle = bench.root / "bundle"
    bundle.mkdir(exist_ok=True)
    if not (bundle / "config.json").exists():
        tool = "crun" if shutil.which("crun") else "runc"
        subprocess.run([tool, "spec"], cwd=bundle, check=True, timeout=TIMEOUT_S)
        spec = json.loads((bundle / "config.json").read_text())
        spec["process"]["terminal"] = False
        spec["process"]["args"] = ["/bin/true"]
        spec["root"]["path"] = str(bench.rootfs)
        (bundle / "config.json").write_text(json.dumps(spec))
    return bundle


def commands(bench: Bench) -> dict[str, Callable[[str], list[str]]]:
    """Variant → command for one run under a unique name."""
    bundle = str(oci_bundle(bench))
    rootfs = str(bench.rootfs)
    state = str(bench.root / "oci")
    # crun refuses hybrid cgroups with a controller in the v2 tree; without that mount it sees a plain v1 host.
    slim = ["unshare", "-m", "--propagation", "private", "sh", "-c", 'umount "$0"; exec "$@"', str(cgroup2())]
    run = ["--bundle", bundle]
    nofile = ["--ulimit", "nofile=1024:1024", "--ulimit", "nproc=1024:1024"]
    bwrap = ["bwrap", "--unshare-all", "--ro-bind", rootfs, "/", "--proc", "/proc", "--dev", "/dev", "/bin/true"]
    crun = ["crun", "--root", state]
    podman = ["podman", "--runtime=crun", "--cgroup-manager=cgroupfs", "run", "--rm", "--network=none"]
    runsc = ["runsc", "--root", state, "--platform=ptrace", "--network=none", "--ignore-cgroups"]
    return {
        "true (fork and exec only)": lambda _: ["/bin/true"],
        "bwrap --unshare-all": lambda _: bwrap,
        "crun run, cgroups disabled": lambda name: [*crun, "--cgroup-manager=disabled", "run", *run, name],
        "crun run, cgroupfs": lambda name: [*slim, *crun, "--cgroup-manager=cgroupfs", "run", *run, name],
        "runc run": lambda name: ["runc", "--root", state, "run", *run, name],
        "podman run": lambda _: [*slim, *podman, *nofile, "--rootfs", rootfs, "/bin/true"],
        "runsc run, ptrace": lambda name: [*runsc, "run", *run, name],
    }


def run_command(argv: list[str]) -> str:
    """Empty, or why it failed."""
    if shutil.which(argv[0]) is None:
        return "not installed"
    try:
        done = subprocess.run(argv, timeout=TIMEOUT_S, capture_output=True, stdin=subprocess.DEVNULL, check=False)
    except subprocess.TimeoutExpired:
        return f"did not end within {TIMEOUT_S} s"
    return "" if done.returncode == 0 else (done.stderr.decode().strip().splitlines() or ["failed silently"])[-1]


def theirs(bench: Bench, command: Callable[[str], list[str]], starts: int) -> Round | str:
    cpu, wall = bench.cpu_ms(), time.perf_counter()
    for _ in range(starts):
        bench.serial += 1
        if reason := run_command(command(f"opendsec-bench-{bench.serial}")):
            return reason
    return Round((bench.cpu_ms() - cpu) / starts, (time.perf_counter() - wall) * 1000 / starts)


# ── reports ────────────────────────────────────────────────────────────────────────────────────────────────────────


def version(program: str) -> str:
    if shutil.which(program) is None:
        return "not installed"
    done = subprocess.run([program, "--version"], capture_output=True, timeout=TIMEOUT_S, check=False)
    return (done.stdout or done.stderr).decode().splitlines()[0]


def print_machine() -> None:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line for line in lines if "model name" in line), "unknown")
    cpus = f"{os.cpu_count()} CPUs,{model.partition(':')[2]}"
    print(f"kernel {platform.release()}, {cpus}, Python {platform.python_version()}")
    for program in ("crun", "runc", "bwrap", "podman", "runsc"):
        print(f"  {program}: {version(program)}")


async def compare(bench: Bench, rounds: int, starts: int, only: set[str]) -> None:
    found: dict[str, list[Round]] = {}
    absent: dict[str, str] = {}
    async with Launcher() as launcher:
        await ours(bench, launcher, starts)
        for _ in range(rounds):
            for name, result in (await ours(bench, launcher, starts)).items():
                found.setdefault(f"opendsec {name}", []).append(result)
            many = await ours(bench, launcher, starts * 4, at_once=16)
            found.setdefault("opendsec start, 16 at once", []).append(many["start"])
            for name, command in commands(bench).items():
                if name in absent or (only and name.split()[0] not in only):
                    continue
                slow = name.startswith(("runsc", "podman"))
                outcome = theirs(bench, command, max(2, starts // 10) if slow else starts)
                if isinstance(outcome, str):
                    absent[name] = outcome
                else:
                    found.setdefault(name, []).append(outcome)
    print_table(found, absent)


def print_table(found: dict[str, list[Round]], absent: dict[str, str]) -> None:
    medians = {name: statistics.median(each.cpu_ms for each in results) for name, results in found.items()}
    crun = medians.get("crun run, cgroupfs", medians.get("crun run, cgroups disabled"))
    print(f"{'':34} {'CPU-ms':>8} {'wall ms':>8} {'per s':>7} {'of crun':>8}")
    for name, results in found.items():
        wall = statistics.median(each.wall_ms for each in results)
        rates = [each.rate for each in results if each.rate is not None]
        rate = f"{statistics.median(rates):7.0f}" if rates else " " * 7
        ratio = f"{medians[name] / crun:8.2f}" if crun else " " * 8
        print(f"{name:34} {medians[name]:8.2f} {wall:8.2f} {rate} {ratio}")
    for name, reason in absent.items():
        print(f"{name:34} {reason}")


def free_kib() -> dict[str, int]:
    """MemAvailable, and MemFree with what the kernel keeps per CPU, which can be hundreds of MB."""
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    meminfo = {line[0].rstrip(":"): int(line[1]) for line in lines}
    zones = Path("/proc/zoneinfo").read_text().split()
    per_cpu_pages = sum(int(zones[at + 1]) for at, word in enumerate(zones) if word == "count:")
    return {"MemAvailable": meminfo["MemAvailable"], "MemFree + per CPU": meminfo["MemFree"] + per_cpu_pages * 4}


async def idle(bench: Bench, count: int) -> None:
    async with Launcher() as launcher:
        warm = [prepare(bench, count + slot) for slot in range(20)]
        await end([await launcher.launch(sandbox.plan) for sandbox in warm])
        sandboxes = [prepare(bench, slot) for slot in range(count)]
        before = free_kib()
        launched = []
        for first in range(0, count, 16):
            batch = sandboxes[first : first + 16]
            launched += await asyncio.gather(*(launcher.launch(sandbox.plan) for sandbox in batch))
        await asyncio.sleep(2)
        after = free_kib()
        fell = ", ".join(f"{(before[name] - after[name]) / count:.0f} KiB by {name}" for name in before)
        print(f"{count} idle sandboxes, each: {fell}")
        await end(launched)
        for sandbox in (*warm, *sandboxes):
            sandbox.close_descriptors()
            sandbox.remove()


async def profile(bench: Bench, starts: int) -> None:
    async with Launcher() as launcher:
        await ours(bench, launcher, starts)
        output = bench.root / "perf.data"
        with subprocess.Popen(["perf", "record", "-q", "-a", "-g", "-F", "4999", "-o", str(output)]) as recorder:
            await ours(bench, launcher, starts * 10)
            recorder.terminate()
    report = ["perf", "report", "-i", str(output), "--children", "--comm", "opendsec-launch", "--stdio", "-g", "none"]
    subprocess.run([*report, "--percent-limit", "0.5"], timeout=TIMEOUT_S, check=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--starts", type=int, default=40)
    parser.add_argument("--only", default="")
    parser.add_argument("--idle", type=int, default=0)
    parser.add_argument("--profile", action="store_true")
    arguments = parser.parse_args()
    print_machine()
    with bench() as place:
        if arguments.profile:
            asyncio.run(profile(place, arguments.starts))
        elif arguments.idle:
            asyncio.run(idle(place, arguments.idle))
        else:
            asyncio.run(
                compare(place, arguments.rounds, arguments.starts, set(filter(None, arguments.only.split(","))))
            )


if __name__ == "__main__":
    main()
