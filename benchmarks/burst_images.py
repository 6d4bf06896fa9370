"""Makes what `benchmarks.burst` starts: five base images from Debian packages, a toolkit, and fifty workspaces.

    .venv/bin/python -m benchmarks.burst_images [--state DIR] [--workspaces 10]

Bases are python (numpy, pytest), node, java (JDK), go and gcc. Each workspace is a repository of its own: sources that
differ from all others, a task that really compiles or tests them and prints a number this file knows beforehand, third
party sources of which the task reads a tenth, and a history nobody reads (random bytes, as a pack of git is). All of it
follows from the workspace's name, so two runs make the same trees. What is there already is kept: a second run takes a
second. About 3.5 GB in the store, and 2 GB of tar.gz beside it, one for each layer, for the arms that unpack.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from opendsec.errors import ImageNotFoundError
from opendsec.model.image import Image, ImageConfig, Layer, LayerRole
from opendsec.store.debian import DebianRecipe, build_debian
from opendsec.store.images import ImageStore
from opendsec.store.layers import make_layer
from opendsec.store.loading.direct import DirectLoader
from opendsec.store.manifest import hex_of
from opendsec.store.mounts import LayerMounts

STATE = Path("/var/lib/opendsec-burst")
TOOLKIT = "burst-tools"
WORKDIR = "/workspace/project"
MODULUS = 1_000_003
MODULES = 12
STEPS = 2000
PACK_BYTES = 20_000_000
THIRD_PARTY = (10, 120, 6_000)
"""Directories, files in each, bytes of each."""
TOOLKIT_BYTES = 40_000_000

Pairs = list[tuple[int, int]]
"""Of each module: factor and summand of its sequence."""
Files = dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One base image, and what a repository of its language looks like."""

    name: str
    packages: tuple[str, ...]
    sources: Callable[[Pairs], Files]
    task: str
    """A shell command in the project's directory; it prints `total=<number>`."""


def total(pairs: Pairs) -> int:
    """What the task of these modules prints."""
    found = 0
    for start, (factor, summand) in enumerate(pairs):
        value = start
        for _ in range(STEPS):
            value = (value * factor + summand) % MODULUS
        found += value
    return found


def python_sources(pairs: Pairs) -> Files:
    """A package with a test for each module, and one that multiplies matrices."""
    files = {"project/__init__.py": ""}
    for number, (factor, summand) in enumerate(pairs):
        files[f"project/m{number}.py"] = (
            f"def value():\n    x = {number}\n    for _ in range({STEPS}):\n"
            f"        x = (x * {factor} + {summand}) % {MODULUS}\n    return x\n"
        )
        files[f"tests/test_m{number}.py"] = (
            f"import numpy\nimport pytest\nfrom project import m{number}\n\n"
            f"def test_value():\n    assert 0 <= m{number}.value() < {MODULUS}\n\n"
            "@pytest.mark.parametrize('size', [2, 3, 5, 8])\ndef test_matrix(size):\n"
            f"    one = numpy.full((size, size), m{number}.value() % 97)\n"
            "    assert (one @ one).shape == (size, size)\n"
        )
    names = [f"m{number}" for number in range(len(pairs))]
    files["project/__main__.py"] = (
        f"from project import {', '.join(names)}\nprint(f'total={{sum(m.value() for m in ({', '.join(names)},))}}')\n"
    )
    return files


def node_sources(pairs: Pairs) -> Files:
    """Modules, a test of each for node's own runner, TypeScript's compiler as a library that checks their syntax."""
    files: Files = {}
    for number, (factor, summand) in enumerate(pairs):
        files[f"src/m{number}.js"] = (
            f"exports.value = function () {{\n  let x = {number};\n"
            f"  for (let i = 0; i < {STEPS}; i++) x = (x * {factor} + {summand}) % {MODULUS};\n  return x;\n}};\n"
        )
    names = ", ".join(f"'./m{number}'" for number in range(len(pairs)))
    files["src/main.js"] = (
        f"const all = [{names}].map((name) => require(name));\n"
        "console.log(`total=${all.reduce((sum, one) => sum + one.value(), 0)}`);\n"
    )
    files["test/all.test.js"] = (
        "const test = require('node:test');\nconst assert = require('node:assert');\n"
        "const ts = require('/usr/share/nodejs/typescript');\nconst fs = require('node:fs');\n"
        "for (const name of fs.readdirSync('src')) test(name, () => {\n"
        "  const text = fs.readFileSync(`src/${name}`, 'utf8');\n"
        "  assert.strictEqual(ts.transpileModule(text, { reportDiagnostics: true }).diagnostics.length, 0);\n});\n"
    )
    return files


def java_sources(pairs: Pairs) -> Files:
    """A class for each module and one that adds."""
    files = {}
    for number, (factor, summand) in enumerate(pairs):
        files[f"src/p/M{number}.java"] = (
            f"package p;\n\nimport java.util.function.LongSupplier;\n\n"
            f"public final class M{number} implements LongSupplier {{\n  @Override public long getAsLong() {{\n"
            f"    long x = {number};\n"
            f"    for (int i = 0; i < {STEPS}; i++) x = (x * {factor}L + {summand}L) % {MODULUS}L;\n"
            "    return x;\n  }\n}\n"
        )
    files["src/p/Main.java"] = (
        "package p;\n\nimport java.util.List;\nimport java.util.function.LongSupplier;\n\npublic final class Main {\n"
        "  public static void main(String[] arguments) {\n"
        f"    List<LongSupplier> all = List.of({_listed(len(pairs))});\n"
        '    System.out.println("total=" + all.stream().mapToLong(LongSupplier::getAsLong).sum());\n  }\n}\n'
    )
    return files


def _listed(count: int) -> str:
    """`List.of` takes ten or an array."""
    return "new LongSupplier[] {" + ", ".join(f"new M{number}()" for number in range(count)) + "}"


def go_sources(pairs: Pairs) -> Files:
    """A module with a package for each sequence."""
    files = {"go.mod": "module example.org/project\n\ngo 1.19\n"}
    for number, (factor, summand) in enumerate(pairs):
        files[f"m{number}/m.go"] = (
            f"package m{number}\n\nfunc Value() int64 {{\n\tx := int64({number})\n"
            f"\tfor i := 0; i < {STEPS}; i++ {{\n\t\tx = (x*{factor} + {summand}) % {MODULUS}\n\t}}\n\treturn x\n}}\n"
        )
    names = range(len(pairs))
    imports = "".join(f'\t"example.org/project/m{number}"\n' for number in names)
    terms = " + ".join(f"m{number}.Value()" for number in names)
    files["main.go"] = (
        f'package main\n\nimport (\n\t"fmt"\n{imports})\n\nfunc main() {{\n\tfmt.Printf("total=%d\\n", {terms})\n}}\n'
    )
    return files


def gcc_sources(pairs: Pairs) -> Files:
    """C modules, a C++ main, a Makefile."""
    objects = " ".join(f"$(OUT)/m{number}.o" for number in range(len(pairs)))
    files = {
        "Makefile": (
            f"CFLAGS = -O2 -Wall\n$(OUT)/app: $(OUT)/main.o {objects}\n\tg++ -o $@ $^\n"
            "$(OUT)/%.o: %.c\n\tgcc $(CFLAGS) -c -o $@ $<\n$(OUT)/%.o: %.cpp\n\tg++ $(CFLAGS) -c -o $@ $<\n"
        )
    }
    for number, (factor, summand) in enumerate(pairs):
        files[f"m{number}.c"] = (
            f"long m{number}(void)\n{{\n\tlong x = {number};\n"
            f"\tfor (int i = 0; i < {STEPS}; i++)\n"
            f"\t\tx = (x * {factor}L + {summand}L) % {MODULUS}L;\n\treturn x;\n}}\n"
        )
    declared = "".join(f'extern "C" long m{number}();\n' for number in range(len(pairs)))
    terms = " + ".join(f"m{number}()" for number in range(len(pairs)))
    files["main.cpp"] = (
        f'#include <cstdio>\n#include <vector>\n{declared}int main() {{ std::printf("total=%ld\\n", {terms}); }}\n'
    )
    return files


FAMILIES = (
    Family(
        name="python",
        packages=("python3", "python3-numpy", "python3-pytest"),
        sources=python_sources,
        task="python3 -m pytest -q -p no:cacheprovider >/tmp/tests && python3 -m project",
    ),
    Family(
        name="node",
        packages=("nodejs", "node-typescript"),
        sources=node_sources,
        task="node --test test >/tmp/tests && node src/main.js",
    ),
    Family(
        name="java",
        packages=("default-jdk-headless",),
        sources=java_sources,
        task="javac -d /tmp/out src/p/*.java && java -XX:TieredStopAtLevel=1 -cp /tmp/out p.Main",
    ),
    Family(
        name="go",
        packages=("golang-go",),
        sources=go_sources,
        task="GOCACHE=/tmp/go GOFLAGS=-p=1 go build -o /tmp/app . && /tmp/app",
    ),
    Family(
        name="gcc",
        packages=("g++", "make"),
        sources=gcc_sources,
        task="mkdir -p /tmp/out && make -s OUT=/tmp/out && /tmp/out/app",
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workspace:
    """One image of the burst."""

    name: str
    """Of the image; it lies on `base`."""
    base: str
    task: str
    expected: str
    """The last line the task prints."""


def plan(workspaces: int) -> list[Workspace]:
    """All of them, families in turn."""
    return [
        Workspace(
            name=f"burst-{family.name}-{number}",
            base=f"burst-{family.name}",
            task=task_of(family),
            expected=f"total={total(pairs_of(f'burst-{family.name}-{number}'))}",
        )
        for number in range(workspaces)
        for family in FAMILIES
    ]


def task_of(family: Family) -> str:
    """Look at some third party sources, then compile and test."""
    return f"cd {WORKDIR} && grep -rl needle ../third_party/d3 | wc -l >/tmp/found && {family.task}"


def pairs_of(name: str) -> Pairs:
    """Follows from the name."""
    source = random.Random(name)
    return [(source.randrange(2, 9999), source.randrange(1, 9999)) for _ in range(MODULES)]


def write_workspace(tree: Path, name: str, family: Family) -> None:
    """The tree of one workspace."""
    source = random.Random(f"{name} content")
    for path, text in family.sources(pairs_of(name)).items():
        _write(tree / WORKDIR.lstrip("/") / path, text.encode())
    directories, files, size = THIRD_PARTY
    words = [source.randbytes(6).hex() for _ in range(2000)] + ["needle"]
    for directory in range(directories):
        for number in range(files):
            text = " ".join(source.choices(words, k=size // 13))
            _write(tree / f"workspace/third_party/d{directory}/f{number}.txt", text.encode())
    _write(tree / "workspace/project/.git/objects/pack/pack-0.pack", source.randbytes(PACK_BYTES))
    _same_times(tree)


def write_toolkit(tree: Path) -> None:
    """A scaffold's programs: one that is used, libraries that are not."""
    _write(tree / "opt/agent/bin/busybox", Path("/bin/busybox").read_bytes())
    (tree / "opt/agent/bin/busybox").chmod(0o755)
    source = random.Random("toolkit")
    for number in range(40):
        _write(tree / f"opt/agent/lib/l{number}.so", source.randbytes(TOOLKIT_BYTES // 40))
    _same_times(tree)


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def _same_times(tree: Path) -> None:
    for directory, _, names in os.walk(tree, topdown=False):
        for name in names:
            os.utime(Path(directory, name), (1_700_000_000, 1_700_000_000))
        os.utime(directory, (1_700_000_000, 1_700_000_000))


def build_all(state: Path, workspaces: int) -> list[Workspace]:
    """Whatever is missing, in `<state>/store` and `<state>/tars`; the plan."""
    store = ImageStore(state / "store")
    for family in FAMILIES:
        name = f"burst-{family.name}"
        print(f"{name}: {', '.join(family.packages)}", flush=True)
        packages = (*family.packages, "ca-certificates")
        build_debian(store, name, DebianRecipe(include=packages), proxies=_proxies(os.environ))
        for number in range(workspaces):
            own = f"{name}-{number}"
            write = partial(write_workspace, name=own, family=family)
            _publish(store, own, LayerRole.WORKSPACE, write, base=name)
    _publish(store, TOOLKIT, LayerRole.TOOLKIT, write_toolkit)
    pack_tars(store, state / "tars")
    return plan(workspaces)


def _proxies(environment: Mapping[str, str]) -> dict[str, str]:
    return {
        key: value for key, value in environment.items() if key.lower() in {"http_proxy", "https_proxy", "no_proxy"}
    }


def _publish(store: ImageStore, name: str, role: LayerRole, write: Callable[[Path], None], *, base: str = "") -> None:
    try:
        store.get(name)
        return
    except ImageNotFoundError:
        pass
    with store.staging() as work:
        tree = work / "tree"
        tree.mkdir()
        write(tree)
        layer = make_layer(store, work, tree, role=role)
        config = ImageConfig(env=dict(store.get(base).config.env), workdir=WORKDIR) if base else ImageConfig()
        store.publish(name, layers=[layer], config=config, base=base, source="benchmarks.burst_images")


def pack_tars(store: ImageStore, tars: Path) -> None:
    """A tar.gz of each layer, named by the layer's digest, as a registry would have it."""
    tars.mkdir(exist_ok=True)
    mounts = store.root.parent / "mounts"
    layers: dict[str, Layer] = {
        layer.digest: layer
        for image in _burst_images(store)
        for layer in image.layers
        if not tar_of(tars, layer).exists()
    }
    with LayerMounts(DirectLoader(store, store.root.parent / "copies"), mounts) as mounted:
        try:
            for layer in layers.values():
                target = tar_of(tars, layer)
                [fd] = mounted.acquire(Image(name="x", digest="", layers=(layer,), config=ImageConfig(), created_at=0))
                command = (
                    "tar",
                    "-C",
                    f"/proc/{os.getpid()}/fd/{fd}",
                    "--numeric-owner",
                    "-czf",
                    f"{target}.part",
                    ".",
                )
                subprocess.run(command, check=True, timeout=600)
                Path(f"{target}.part").rename(target)
        finally:
            mounted.unmount_all()
    mounts.joinpath(".lock").unlink(missing_ok=True)
    if mounts.is_dir():
        mounts.rmdir()


def tar_of(tars: Path, layer: Layer) -> Path:
    """Where the tar.gz of a layer is."""
    return tars / f"{hex_of(layer.digest)}.tar.gz"


def _burst_images(store: ImageStore) -> list[Image]:
    return [image for image in store.list() if image.name.startswith("burst-")]


def main() -> None:
    """Parse and build."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--state", type=Path, default=STATE)
    parser.add_argument("--workspaces", type=int, default=10, help="of each family")
    options = parser.parse_args()
    options.state.mkdir(parents=True, exist_ok=True)
    made = build_all(options.state, options.workspaces)
    print(f"{len(made)} workspaces on {len(FAMILIES)} bases in {options.state}")


if __name__ == "__main__":
    main()
