"""The plan of a Debian build: recipes, sources, arguments, and the date of a package index. No mmdebstrap needed."""

from __future__ import annotations

from pathlib import Path

import pytest

from opendsec.errors import ImageInvalidError, InvalidSpecError
from opendsec.model.image import ImageConfig
from opendsec.store.debian import (
    RECIPE_LABEL,
    DebianRecipe,
    already_built,
    build_arguments,
    build_debian,
    check_recipe,
    image_config,
    index_date,
    recipe_digest,
)
from opendsec.store.images import ImageStore


def test_equal_requests_have_equal_recipes() -> None:
    one = DebianRecipe(include=("git", "gcc"))
    assert recipe_digest(one) == recipe_digest(DebianRecipe(include=("gcc", "git", "git")))
    others = [DebianRecipe(include=("git",)), DebianRecipe(include=("git", "gcc"), suite="trixie")]
    others.append(DebianRecipe(include=("git", "gcc"), mirror="http://m/"))
    assert len({recipe_digest(recipe) for recipe in (one, *others)}) == 4


def test_arguments(tmp_path: Path) -> None:
    arguments = build_arguments(
        DebianRecipe(include=("git", "gcc", "git")), ["deb http://m/ bookworm main"], Path("/k"), tmp_path
    )
    assert {"--include=gcc,git", "--keyring=/k", '--setup-hook=mkdir -p "$1/usr/share/man/man1"'} < set(arguments)
    assert arguments[-3:] == ["bookworm", str(tmp_path), "deb http://m/ bookworm main"]
    bare = build_arguments(DebianRecipe(include=()), [], Path("/k"), tmp_path)
    assert not [argument for argument in bare if argument.startswith("--include")]


@pytest.mark.parametrize(
    ("recipe", "field"),
    [
        (DebianRecipe(suite="../x"), "suite"),
        (DebianRecipe(suite="--simulate"), "suite"),
        (DebianRecipe(include=("git,gcc",)), "include"),
        (DebianRecipe(include=("$(reboot)",)), "include"),
        (DebianRecipe(include=("--help",)), "include"),
        (DebianRecipe(mirror="not an address"), "mirror"),
        (DebianRecipe(mirror="http://x y"), "mirror"),
    ],
)
def test_bad_requests_name_the_field(recipe: DebianRecipe, field: str) -> None:
    with pytest.raises(InvalidSpecError) as caught:
        check_recipe(recipe)
    assert caught.value.detail == {"field": field}


def test_good_package_names() -> None:
    check_recipe(
        DebianRecipe(include=("g++", "libstdc++-12-dev", "python3.11", "libc6:i386", "git=1:2.39.5-0+deb12u2"))
    )


def test_the_same_request_is_answered_from_the_store(tmp_path: Path) -> None:
    store = ImageStore(tmp_path)
    recipe = DebianRecipe(include=("git",))
    with store.staging() as work:
        (work / "layer").write_bytes(b"x")
        built = store.publish("d", layers=[store.stage_layer(work / "layer")], config=image_config(recipe))
    assert build_debian(store, "d", recipe) == built
    assert already_built(store, "d", DebianRecipe(include=("gcc",))) is None
    assert already_built(store, "other", recipe) is None
    assert built.config.labels[RECIPE_LABEL] == recipe_digest(recipe)
    assert isinstance(built.config, ImageConfig)


def test_the_newest_index_dates_the_image(tmp_path: Path) -> None:
    (tmp_path / "a_InRelease").write_text(
        "Origin: Debian\nDate: Sat, 09 Aug 2025 09:25:43 UTC\nDate: Thu, 01 Jan 1970\n"
    )
    (tmp_path / "b_Release").write_text("Date: Sun, 10 Aug 2025 00:00:00 UTC\n")
    (tmp_path / "c_Packages").write_text("Date: Fri, 01 Jan 2100 00:00:00 UTC\n")
    assert index_date(tmp_path) == 1_754_784_000
    with pytest.raises(ImageInvalidError, match="no package index"):
        index_date(tmp_path / "none")
