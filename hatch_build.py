"""Build hook: compiles native/ into src/opendsec/_native/ so that wheels and editable installs carry the two programs."""

from __future__ import annotations

import subprocess
from pathlib import Path

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class NativeBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """Runs `make -C native install`; fails loudly when there is no C compiler."""

    def initialize(self, version: str, build_data: dict[str, object]) -> None:  # noqa: ARG002
        root = Path(self.root)
        subprocess.run(["make", "-s", "-C", str(root / "native"), "install"], check=True)
        build_data["pure_python"] = False
        build_data["infer_tag"] = False
