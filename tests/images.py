"""Small images for tests, made in about 50 ms: one with busybox and /bin/sh but no bash, one without any shell.

Needs the package busybox-static (`apt-get install busybox-static`), mkfs.erofs and root.
"""

from __future__ import annotations

import os
import stat
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from opendsec.model.image import Image, ImageConfig, LayerRole
from opendsec.store.images import ImageStore
from opendsec.store.layers import make_layer

BUSYBOX = Path("/bin/busybox")
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
SCRATCH_PROGRAMS = ("cat", "echo", "env", "false", "id", "ls", "pwd", "sleep", "true")
"""What a scratch image has, in /app."""

_PASSWD = (
    "root:x:0:0:root:/root:/bin/sh\n"
    "nobody:x:65534:65534:nobody:/:/bin/false\n"
    "agent:x:1000:1000:Agent:/home/agent:/bin/sh\n"
)
_GROUP = "root:x:0:\nnogroup:x:65534:\nagent:x:1000:\nvideo:x:44:agent\n"
_DIRECTORIES = ("bin", "dev", "etc", "proc", "root", "run", "sys", "tmp", "usr", "var/tmp", "home/agent", "app")


def make_busybox_image(
    store: ImageStore,
    name: str = "busybox",
    *,
    env: Mapping[str, str] | None = None,
    user: str = "",
    workdir: str = "/",
    cmd: Sequence[str] = ("sh",),
    files: Mapping[str, bytes] | None = None,
) -> Image:
    """All of busybox below /bin, /bin/sh but no bash; accounts root, nobody (65534) and agent (1000, home /home/agent).

    `env` is added to PATH; `files` are further files (absolute path → content, mode 0755, owner root).
    """
    config = ImageConfig(env={"PATH": PATH, **(env or {})}, user=user, workdir=workdir, cmd=tuple(cmd))
    return _publish(store, name, config, applets=None, files=files or {})


def make_scratch_image(
    store: ImageStore,
    name: str = "scratch",
    *,
    env: Mapping[str, str] | None = None,
    user: str = "",
    workdir: str = "/",
    files: Mapping[str, bytes] | None = None,
) -> Image:
    """No shell anywhere; /app holds `SCRATCH_PROGRAMS` as static programs. PATH is /app unless `env` says otherwise."""
    config = ImageConfig(env={"PATH": "/app", **(env or {})}, user=user, workdir=workdir, cmd=("/app/true",))
    return _publish(store, name, config, applets=SCRATCH_PROGRAMS, files=files or {})


def make_part(
    store: ImageStore,
    name: str,
    files: Mapping[str, str],
    *,
    role: LayerRole,
    removed: Sequence[str] = (),
    opaque: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
) -> Image:
    """A toolkit or workspace of one layer: `files` (path → content), whiteouts at `removed`, and directories that hide
    what is below them. The name means it from now on, whatever it meant."""
    with store.staging() as work:
        tree = work / "tree"
        tree.mkdir()
        for directory in opaque:
            (tree / directory.lstrip("/")).mkdir(parents=True)
            os.setxattr(tree / directory.lstrip("/"), "trusted.overlay.opaque", b"y")
        for path, content in files.items():
            target = tree / path.lstrip("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(content)
            target.chmod(0o755)
        for path in removed:
            target = tree / path.lstrip("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            os.mknod(target, stat.S_IFCHR)
        layer = make_layer(store, work, tree, role=role)
        return store.publish(name, layers=[layer], config=ImageConfig(env=env or {}), source="test", replace=True)


def make_many_layers(store: ImageStore, name: str, count: int) -> Image:
    """An image of that many layers: busybox, and `/layers/N` from each further one. The last but one removes what the
    first of these has at /gone, and hides what it has in /opaque.
    """
    layers = list(make_busybox_image(store).layers)
    for number in range(1, count):
        files = {f"/layers/{number}": f"{number}\n"}
        if number == 1:
            files |= {"/gone": "", "/opaque/old": ""}
        if number == count - 2:
            hidden = make_part(
                store,
                f"{name}-{number}",
                {**files, "/opaque/new": ""},
                role=LayerRole.BASE,
                removed=["/gone"],
                opaque=["/opaque"],
            )
            layers += hidden.layers
        else:
            layers += make_part(store, f"{name}-{number}", files, role=LayerRole.BASE).layers
    return store.publish(name, layers=layers, config=ImageConfig(), source="test")


def _publish(
    store: ImageStore, name: str, config: ImageConfig, *, applets: Sequence[str] | None, files: Mapping[str, bytes]
) -> Image:
    with store.staging() as work:
        tree = work / "tree"
        _make_tree(tree, Path("app" if applets else "bin"), applets or _all_applets())
        for path, content in files.items():
            target = tree / path.lstrip("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
            target.chmod(0o755)
        layer = make_layer(store, work, tree)
        return store.publish(name, layers=[layer], config=config, source="test", replace=True)


def _all_applets() -> list[str]:
    listing = subprocess.run([BUSYBOX, "--list"], check=True, capture_output=True, text=True, timeout=120)
    return [name for name in listing.stdout.split() if name not in {"bash", "busybox"}]


def _make_tree(tree: Path, programs: Path, applets: Sequence[str]) -> None:
    if not BUSYBOX.exists():
        raise RuntimeError("tests need /bin/busybox: apt-get install busybox-static")
    for directory in _DIRECTORIES:
        (tree / directory).mkdir(parents=True)
    first = tree / programs / applets[0]
    first.write_bytes(BUSYBOX.read_bytes())
    first.chmod(0o755)
    for name in applets[1:]:
        os.link(first, tree / programs / name)
    for file, text in (("passwd", _PASSWD), ("group", _GROUP), ("hostname", ""), ("hosts", ""), ("resolv.conf", "")):
        (tree / "etc" / file).write_text(text)
    for directory in ("tmp", "var/tmp"):
        (tree / directory).chmod(0o1777)
    (tree / "root").chmod(0o700)
    os.chown(tree / "home/agent", 1000, 1000)
    for directory, subdirectories, names in os.walk(tree, topdown=False):
        for name in (*names, *subdirectories):
            os.utime(os.path.join(directory, name), (1_700_000_000, 1_700_000_000))
    os.utime(tree, (1_700_000_000, 1_700_000_000))
