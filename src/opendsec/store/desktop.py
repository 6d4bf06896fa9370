"""A Debian desktop as the image of a disk: X, openbox and a terminal, with our guest agent, for full VMs.

mmdebstrap makes the tree, `disk_writing` the disk. Programs are Debian's; the few files of ours start the agent, and
the desktop, which belongs to `user`, as services.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from opendsec.model.image import Devices, DiskFormat, Image, ImageConfig, Machine
from opendsec.store.debian import DebianRecipe, bootstrap, check_recipe
from opendsec.store.disk_writing import AGENT_PORT, ROOT_LABEL, SystemDisk, check_tools, publish_disk, run
from opendsec.store.disks import SECTOR
from opendsec.store.images import ImageStore
from opendsec.store.progress import OnProgress, Progress, quietly

SIZE_MIB = 4096
"""Of the whole disk; what is not used takes no room."""
PACKAGES = (
    "linux-image-amd64", "initramfs-tools", "systemd-sysv", "udev", "dbus", "kmod", "iproute2", "ca-certificates",
    "xserver-xorg-core", "xserver-xorg-input-libinput", "xinit", "xterm", "openbox", "x11-xserver-utils", "x11-utils",
    "xdotool", "xclip", "xfonts-base", "fonts-dejavu-core", "console-setup", "procps",
)  # fmt: skip
_KERNEL_OPTIONS = f"root=LABEL={ROOT_LABEL} rw quiet console=tty0 console=ttyS0 tsc=unstable"
_FILES: Mapping[str, str] = {
    "etc/hostname": "desktop\n",
    "etc/hosts": "127.0.0.1 localhost\n127.0.1.1 desktop\n",
    "etc/fstab": "LABEL=system / ext4 errors=remount-ro,noatime 0 1\n",
    "etc/resolv.conf": "nameserver 10.0.2.3\n",
    "etc/systemd/network/10-all.network": "[Match]\nType=ether\n[Network]\nDHCP=ipv4\n",
    "etc/systemd/system/opendsec-guest.service": f"""\
[Unit]
Description=OpenDSec guest agent
DefaultDependencies=no
After=local-fs.target systemd-udevd.service
StartLimitIntervalSec=0
[Service]
ExecStart=/usr/local/sbin/opendsec-guest --serial=/dev/virtio-ports/{AGENT_PORT}
Restart=always
RestartSec=500ms
KillMode=process
[Install]
WantedBy=multi-user.target
""",
    "etc/systemd/system/desktop.service": """\
[Unit]
Description=Desktop of user
After=systemd-udev-settle.service local-fs.target
Wants=systemd-udev-settle.service
StartLimitIntervalSec=0
[Service]
ExecStart=/usr/bin/xinit /usr/local/bin/desktop-session -- /usr/bin/Xorg :0 vt1 -nolisten tcp -ac -noreset -s 0 -dpms
Restart=always
RestartSec=1
[Install]
WantedBy=multi-user.target
""",
    "usr/local/bin/desktop-session": """\
#!/bin/sh
xset s off -dpms
xsetroot -solid '#2e5077' -cursor_name left_ptr
cd /home/user
export HOME=/home/user USER=user LOGNAME=user SHELL=/bin/bash
as_user() { exec setpriv --reuid=1000 --regid=1000 --init-groups "$@"; }
(as_user openbox) &
(as_user xterm -geometry 100x30+40+60 -fa 'DejaVu Sans Mono' -fs 11 -T Terminal) &
wait
""",
}
_UNITS = ("opendsec-guest.service", "desktop.service", "systemd-networkd.service")
_MODULES = "ahci\nsd_mod\nvirtio_pci\nvirtio_blk\nvirtio_scsi\next4\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class DesktopRecipe:
    """What is asked for."""

    suite: str = "bookworm"
    include: tuple[str, ...] = ()
    """Packages beyond those of the desktop."""
    mirror: str = ""
    memory_mb: int = 1024
    cpus: int = 2
    proxies: Mapping[str, str] = field(default_factory=dict)
    """Environment variables for the download only."""


def build_desktop(
    store: ImageStore,
    name: str,
    recipe: DesktopRecipe,
    *,
    agent: Path,
    replace: bool = False,
    on_progress: OnProgress = quietly,
) -> Image:
    """Build and publish. `agent` is the guest agent's program, static.

    Raises HostCapabilityError (a program is missing), InvalidSpecError, NodeError with a program's words,
    DiskFullError, ConflictError (the name is taken).
    """
    debian = check_recipe(DebianRecipe(suite=recipe.suite, include=(*PACKAGES, *recipe.include), mirror=recipe.mirror))
    check_tools(agent)
    with store.scratch() as scratch, store.staging() as work:
        tree = scratch / "tree"
        bootstrap(tree, debian, recipe.proxies, on_progress)
        on_progress(Progress(phase="setting up the system"))
        set_up(tree, agent)
        machine = Machine(
            format=DiskFormat.QCOW2,
            virtual_bytes=SECTOR,
            agent=True,
            devices=Devices.VIRTIO,
            memory_mb=recipe.memory_mb,
            cpus=recipe.cpus,
        )
        return publish_disk(
            store,
            name,
            system_of(tree),
            machine=machine,
            config=ImageConfig(env={"DISPLAY": ":0", "LANG": "C.UTF-8"}),
            work=work,
            source=f"desktop {recipe.suite}",
            replace=replace,
            on_progress=on_progress,
        )


def system_of(tree: Path) -> SystemDisk:
    """With the kernel that was installed in the tree."""
    (kernel,) = (tree / "boot").glob("vmlinuz-*")
    (initrd,) = (tree / "boot").glob("initrd.img-*")
    return SystemDisk(tree=tree, kernel=kernel, initrd=initrd, options=_KERNEL_OPTIONS, size_mib=SIZE_MIB)


def set_up(tree: Path, agent: Path) -> None:
    """Our files into the tree; what they start is switched on, and the initial RAM disk made anew for any disk."""
    for name, content in _FILES.items():
        path = tree / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        path.write_text(content, encoding="utf-8")
        path.chmod(0o755 if name.startswith("usr/local/bin/") else 0o644)
    target = tree / "usr/local/sbin/opendsec-guest"
    shutil.copyfile(agent, target)
    target.chmod(0o755)
    (tree / "etc/initramfs-tools/modules").write_text(_MODULES, encoding="ascii")
    (tree / "etc/initramfs-tools/conf.d/disk").write_text("MODULES=list\nCOMPRESS=zstd\n", encoding="ascii")
    _in_tree(tree, "useradd --create-home --shell /bin/bash --uid 1000 user")
    _in_tree(tree, f"systemctl enable {' '.join(_UNITS)}")
    _in_tree(tree, "systemctl disable getty@tty1.service; systemctl mask getty@tty1.service; true")
    _in_tree(tree, "update-initramfs -u -k all")
    (tree / "etc/machine-id").write_bytes(b"")


def _in_tree(tree: Path, script: str) -> None:
    """Run by the tree's own shell, in namespaces of its own: nothing it mounts is left."""
    inside = 'mount -t proc proc "$0/proc"; mount --bind /dev "$0/dev"; exec chroot "$0" /bin/sh -ec "$1"'
    isolated = ("unshare", "--mount", "--pid", "--fork", "--kill-child=KILL", "--")
    run(*isolated, "/bin/sh", "-ec", inside, str(tree), script, place=tree)
