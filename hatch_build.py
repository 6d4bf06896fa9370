"""Build hook: compiles native/ so that wheels and editable installs carry the two programs."""

from __future__ import annotations

import subprocess  # noqa: TID251 - the build knows nothing of the package
import sysconfig
from pathlib import Path

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class NativeBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """Runs `make -C native install`; fails loudly when there is no C compiler."""

    def initialize(self, version: str, build_data: dict[str, object]) -> None:
        root = Path(self.root)
        subprocess.run(["make", "-s", "-C", str(root / "native"), "install"], check=True)
        build_data["pure_python"] = False
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"py3-none-{platform}"
