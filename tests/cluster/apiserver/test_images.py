"""Images through an apiserver in front of several edges: found where they are, changed everywhere, never half told."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest
from tests.cluster.apiserver.conftest import Platform, Start

from opendsec.apiserver.iam import insert_key
from opendsec.apiserver.images import merged
from opendsec.model.access import Role
from opendsec.model.image_view import ImageSummary
from opendsec.wire.contracts import ImagePage

pytestmark = pytest.mark.anyio


def error_of(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


async def names(platform: Platform, **query: object) -> list[str]:
    """By as many pages as it takes."""
    found: list[str] = []
    cursor = ""
    while True:
        page = (await platform.client.get("/v1/images", params={**query, "cursor": cursor})).json()  # type: ignore[dict-item]
        found += [item["name"] for item in page["items"]]
        cursor = page["cursor"]
        if not cursor:
            return found


async def test_pages_over_all_edges_miss_nothing_and_tell_nothing_twice(start: Start) -> None:
    async with start("a", "b", "c") as platform:
        every = [f"image-{number:03}" for number in range(100)]
        for position, name in enumerate("abc"):
            platform.edges[name].images = (*every[position::3], "shared", f"only-{name}")
        everything = sorted([*every, "shared", "only-a", "only-b", "only-c"])
        for limit in (1, 7, 1000):
            assert await names(platform, limit=limit) == everything
        assert await names(platform, prefix="only-") == ["only-a", "only-b", "only-c"]
        assert error_of(await platform.client.get("/v1/images", params={"limit": 0})) == (422, "invalid_spec")


def test_nothing_is_told_behind_what_one_edge_has_told_so_far() -> None:
    def page(*given: str, cursor: str = "") -> ImagePage:
        return ImagePage(
            items=tuple(
                ImageSummary(
                    name=name,
                    digest=name,
                    created_at=0,
                    source="",
                    roles=(),
                    layer_count=0,
                    size_bytes=0,
                    shared_bytes=0,
                )
                for name in given
            ),
            cursor=cursor,
        )

    found = merged([page("a", "b", cursor="b"), page("c", "d")], 2)
    assert ([item.name for item in found.items], found.cursor) == (["a", "b"], "b")
    found = merged([page("a", "x"), page("b", "c", cursor="c")], 2)
    assert ([item.name for item in found.items], found.cursor) == (["a", "b"], "b")
    found = merged([page(cursor="b"), page("a", "c")], 1)  # all on that page was removed just now
    assert ([item.name for item in found.items], found.cursor) == (["a"], "b")
    assert merged([page("a"), page("a")], 2) == page("a")
    assert merged([page(), page()], 2) == page()


async def test_names_of_every_form_are_found(start: Start) -> None:
    async with start("a") as platform:
        for name in ("library/python:3.12", "x@sha256:" + "0" * 64, "a/tree", "with.dots-and_more"):
            platform.edges["a"].images = (name,)
            answer = await platform.client.get("/v1/images/inspect", params={"image": name})
            assert answer.json()["name"] == name


async def test_an_image_is_told_by_the_edge_that_has_it(start: Start) -> None:
    async with start("a", "b") as platform:
        platform.edges["b"].images = ("mine",)
        answer = await platform.client.get("/v1/images/inspect", params={"image": "mine"})
        assert answer.json()["source"] == "edge b"
        lines = (await platform.client.get("/v1/images/tree", params={"image": "mine"})).text.splitlines()
        assert (len(lines), json.loads(lines[-1])) == (20_000, {"number": 19_999})
        for path in ("inspect", "tree"):
            answer = await platform.client.get(f"/v1/images/{path}", params={"image": "nope"})
            assert error_of(answer) == (404, "image_not_found")


async def test_paths_that_are_no_text_reach_the_edge_as_they_came(start: Start) -> None:
    async with start("a") as platform:
        answer = await platform.client.get("/v1/images/tree?image=debian&path=%2F%FF%0A")
        assert answer.status_code == 200
        assert platform.edges["a"].requests[-1][1] == "/v1/images/tree?image=debian&path=%2F%FF%0A"


async def test_what_an_edge_that_is_away_may_have_is_not_told_as_missing(start: Start) -> None:
    async with start("a", "b", patience_s=0.2, away=frozenset({"b"})) as platform:
        assert (await platform.client.get("/v1/images/inspect", params={"image": "debian"})).status_code == 200
        for path in ("inspect", "tree"):
            answer = await platform.client.get(f"/v1/images/{path}", params={"image": "mine"})
            assert error_of(answer)[1] == "connect"
        assert error_of(await platform.client.get("/v1/images"))[1] == "connect"
        assert error_of(await platform.client.delete("/v1/images", params={"image": "debian"}))[1] == "connect"


async def test_changes_reach_every_edge_that_has_the_image(start: Start) -> None:
    async with start("a", "b", "c") as platform:
        platform.edges["b"].images = ("other",)
        tagged = await platform.client.post("/v1/images/tag", json={"name": "new", "image": "debian"})
        assert tagged.json()["name"] == "new"
        assert [platform.edges[name].images for name in "abc"] == [("debian", "new"), ("other",), ("debian", "new")]
        removed = await platform.client.delete("/v1/images", params={"image": "debian"})
        assert removed.json()["digest"] == "sha256:debian"
        assert [platform.edges[name].images for name in "abc"] == [("new",), ("other",), ("new",)]
        again = await platform.client.delete("/v1/images", params={"image": "debian"})
        assert error_of(again) == (404, "image_not_found")


async def test_a_refusal_of_one_edge_is_told_with_its_name(start: Start) -> None:
    async with start("a", "b") as platform:
        platform.edges["b"].keeps_images = True
        refused = await platform.client.delete("/v1/images", params={"image": "debian"})
        assert (refused.status_code, refused.json()["error"]["detail"]["edge"]) == (409, "b")
        forced = await platform.client.delete("/v1/images", params={"image": "debian", "force": "true"})
        assert forced.status_code == 200


async def test_who_may_only_run_may_look_and_change_nothing(start: Start) -> None:
    async with start("a") as platform:
        storage = platform.folder / "iam.sqlite3"
        headers = {"Authorization": f"Bearer {_key(str(storage), Role.RUNNER)}"}
        assert (await platform.client.get("/v1/images", headers=headers)).status_code == 200
        looked = await platform.client.get("/v1/images/inspect", params={"image": "debian"}, headers=headers)
        assert looked.status_code == 200
        answers = [
            await platform.client.delete("/v1/images", params={"image": "debian"}, headers=headers),
            await platform.client.post("/v1/images/tag", json={"name": "n", "image": "debian"}, headers=headers),
            await platform.client.post("/v1/images/compose", json={"name": "n", "base": "debian"}, headers=headers),
        ]
        assert [error_of(answer) for answer in answers] == [(403, "forbidden")] * 3
        assert platform.edges["a"].images == ("debian",)
        headers = {"Authorization": f"Bearer {_key(str(storage), Role.BUILDER)}"}
        made = await platform.client.post("/v1/images/tag", json={"name": "n", "image": "debian"}, headers=headers)
        assert made.status_code == 200


def _key(database: str, role: Role) -> str:
    from opendsec.apiserver.database import open_database

    engine = open_database(f"sqlite:///{database}")
    with engine.begin() as connection:
        made = insert_key(connection, project="default", role=role, title="test")
    engine.dispose()
    return made.key


async def test_a_stream_that_is_cut_is_not_taken_for_whole(start: Start) -> None:
    async with start("a") as platform:
        platform.edges["a"].cut_after = 100_000
        with pytest.raises(httpx.RemoteProtocolError):
            await platform.client.get("/v1/images/tree", params={"image": "debian"})


async def test_who_leaves_a_stream_ends_it_at_the_edge(start: Start) -> None:
    async with start("a") as platform:
        double = platform.edges["a"]
        async with platform.client.stream("GET", "/v1/images/tree", params={"image": "debian"}) as answer:
            await anext(answer.aiter_bytes())
            assert double.streaming == 1
        async with asyncio.timeout(30):
            while double.streaming:
                await asyncio.sleep(0.01)
        assert double.gone == 1


@pytest.mark.parametrize("bad", ["/v1/images/inspect", "/v1/images/tree", "/v1/images/diff?before=a"])
async def test_a_missing_name_is_named(start: Start, bad: str) -> None:
    async with start("a") as platform:
        answer = await platform.client.get(bad)
        assert error_of(answer) == (422, "invalid_spec")
        assert answer.json()["error"]["detail"]["field"] in ("image", "after")
