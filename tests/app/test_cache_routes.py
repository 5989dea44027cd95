"""Looking after the cache over HTTP, and from the command line, on a whole stack."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from rich.console import Console

from app.accounts import Accounts, hash_key
from app.cache_files import Server, export_entries, import_entries, warm_cache
from app.cache_routes import MAX_LINE_BYTES, is_loopback
from app.settings import AuthSettings, KeySettings
from protocol.errors import Forbidden, InvalidRequest, Unauthorized
from tests.app.stack import (
    MODEL,
    QUESTION,
    Site,
    Stack,
    eventually,
    on_air,
    running_stack,
    whole_cache,
)

REWORDED = "tell me the capital of france"
KEYS = {
    "keys": [
        {"tenant": "red", "sha256": hash_key("k-red")},
        {"tenant": "blue", "sha256": hash_key("k-blue")},
        {"tenant": "house", "sha256": hash_key("k-admin"), "admin": True},
    ]
}


@asynccontextmanager
async def a_site(**auth: Any) -> AsyncIterator[tuple[Site, Stack]]:
    async with running_stack() as stack, on_air(stack.graph, auth=auth) as site:
        yield site, stack


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def chat(site: Site, text: str = QUESTION, key: str = "any", **fields: Any) -> httpx.Response:
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": text}],
        "temperature": 0,
        **fields,
    }
    reply = await site.http.post("/v1/chat/completions", json=body, headers=bearer(key))
    assert reply.status_code == 200, reply.text
    return reply


async def stored(site: Site, stack: Stack, text: str = QUESTION, **fields: Any) -> str:
    """The id of an answer that is in the cache now."""
    reply = await chat(site, text, **fields)
    await eventually(lambda: not stack.graph.is_storing)
    return reply.headers["x-seedance-cache-id"]


# ------------------------------------------------------------------ who may


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/cache/stats"),
        ("GET", "/v1/cache/entries"),
        ("DELETE", "/v1/cache/entries?all=true"),
        ("POST", "/v1/cache/explain"),
        ("GET", "/v1/cache/export"),
        ("POST", "/v1/cache/import"),
    ],
)
async def test_only_an_admin_looks_after_the_cache(method: str, path: str) -> None:
    async with a_site(**KEYS) as (site, _):
        for headers, status in (({}, 401), (bearer("k-none"), 401), (bearer("k-red"), 403)):
            reply = await site.http.request(method, path, headers=headers)
            assert reply.status_code == status
            assert reply.json()["error"]["param"] == "Authorization"
        reply = await site.http.request(method, path, headers=bearer("k-admin"))
        assert reply.status_code in (200, 400)


async def test_without_keys_the_cache_is_managed_from_this_machine_only() -> None:
    async with a_site() as (site, _):
        assert (await site.http.get("/v1/cache/stats")).status_code == 200
        for headers in (
            {"x-forwarded-for": "203.0.113.7"},
            {"host": "rebound.example.org"},
            {"origin": "https://elsewhere.example.org"},
        ):
            reply = await site.http.get("/v1/cache/stats", headers=headers)
            assert (reply.status_code, reply.json()["error"]["code"]) == (403, "forbidden")


def test_an_admin_is_told_from_others_by_its_key_only() -> None:
    keys = tuple(KeySettings(tenant="t", sha256=hash_key(k), admin=k == "a") for k in "ab")
    book = Accounts(AuthSettings(keys=keys, allow_anonymous=True))
    book.check_admin("Bearer a", is_local=False)
    with pytest.raises(Forbidden):
        book.check_admin("Bearer b", is_local=True)
    with pytest.raises(Forbidden):
        book.check_admin(None, is_local=True)
    with pytest.raises(Unauthorized):
        book.check_admin("Bearer c", is_local=True)


@pytest.mark.parametrize(
    ("host", "is_it"),
    [
        ("127.0.0.1", True),
        ("::1", True),
        ("[::1]", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("10.0.0.1", False),
        ("", False),
        ("localhost.example.org", False),
    ],
)
def test_a_loopback_host_is_this_machine(host: str, is_it: bool) -> None:
    assert is_loopback(host) == is_it


# ------------------------------------------------------------------ find, delete, count


async def test_entries_are_found_and_deleted_by_what_they_are() -> None:
    async with a_site(**KEYS) as (site, stack):
        admin = bearer("k-admin")
        red = await stored(site, stack, key="k-red")
        await stored(site, stack, key="k-blue")
        await stored(site, stack, "Who wrote Faust?", key="k-blue")

        async def found(**which: Any) -> list[tuple[str, str]]:
            reply = await site.http.get("/v1/cache/entries", params=which, headers=admin)
            assert reply.status_code == 200, reply.text
            return sorted((entry["tenant"], entry["text"]) for entry in reply.json()["entries"])

        assert await found(id=red) == [("red", QUESTION)]
        assert await found(prompt=f" {QUESTION} ") == [("blue", QUESTION), ("red", QUESTION)]
        assert await found(tenant="blue", model=MODEL) == [
            ("blue", QUESTION),
            ("blue", "Who wrote Faust?"),
        ]
        assert await found(tag="none") == []
        assert await found(older_than_s=60) == []
        assert len(await found(younger_than_s=60)) == 3

        gone = await site.http.delete("/v1/cache/entries", params={"id": red}, headers=admin)
        assert gone.json() == {"deleted": 1}
        assert (await chat(site, key="k-red")).headers["x-seedance-cache"].startswith("miss")
        again = await chat(site, key="k-blue")
        assert again.headers["x-seedance-cache"].startswith("exact")
        every = await site.http.delete("/v1/cache/entries", params={"all": True}, headers=admin)
        assert every.json()["deleted"] >= 2


@pytest.mark.parametrize(
    ("params", "param"),
    [
        ({"id": "xyz"}, "id"),
        ({"older_than_s": -1}, "older_than_s"),
        ({"younger_than_s": "soon"}, "younger_than_s"),
        ({"limit": 0}, "limit"),
        ({"tennant": "red"}, "tennant"),
    ],
)
async def test_a_condition_that_means_nothing_is_named(params: dict[str, Any], param: str) -> None:
    async with a_site() as (site, _):
        reply = await site.http.get("/v1/cache/entries", params=params)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)


async def test_nothing_is_deleted_without_a_condition() -> None:
    async with a_site() as (site, stack):
        await stored(site, stack)
        reply = await site.http.delete("/v1/cache/entries")
        assert reply.status_code == 400
        assert "all=true" in reply.json()["error"]["message"]
        assert (await chat(site)).headers["x-seedance-cache"].startswith("exact")


async def test_stats_tell_of_each_tenant_and_tier() -> None:
    async with a_site(**KEYS) as (site, stack):
        await stored(site, stack, key="k-red")
        reply = await site.http.get("/v1/cache/stats", headers=bearer("k-admin"))
        (replica,) = reply.json()["replicas"]
        assert [(use["tenant"], use["tier"]) for use in replica["tenants"]] == [("red", "L2")]
        assert replica["tenants"][0]["bytes"] == replica["cache"]["bytes"] > 0


# ------------------------------------------------------------------ explain, judge


async def test_a_decision_is_explained_with_every_candidate() -> None:
    async with a_site(**KEYS) as (site, stack):
        await stored(site, stack, key="k-red")
        await stored(site, stack, "What is the capital of Spain?", key="k-red")

        async def explained(**body: Any) -> dict[str, Any]:
            reply = await site.http.post(
                "/v1/cache/explain", json={"tenant": "red", **body}, headers=bearer("k-admin")
            )
            assert reply.status_code == 200, reply.text
            return reply.json()

        told = await explained(prompt=REWORDED)
        by_text = {each["text"]: each for each in told["candidates"]}
        assert by_text[QUESTION]["refusal"] is None
        assert "differ" in by_text["What is the capital of Spain?"]["refusal"]
        assert by_text["What is the capital of Spain?"]["veto"] is not None
        assert by_text[QUESTION]["action"] == told["decision"]["action"] == "serve"
        assert by_text["What is the capital of Spain?"]["action"] == "refuse"
        assert told["decision"]["id"] == by_text[QUESTION]["id"]
        assert told["credit"] is None
        assert told["other_partitions"] == []
        chat_body = {
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": QUESTION},
            ],
            "temperature": 0,
        }
        elsewhere = await explained(chat=chat_body)
        assert elsewhere["candidates"] == []
        assert [entry["text"] for entry in elsewhere["other_partitions"]] == [QUESTION]
        assert (await explained(prompt=REWORDED, tenant="blue"))["candidates"] == []


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, None),
        ({"prompt": "a", "chat": {}}, None),
        ({"prompt": 5}, "prompt"),
        ({"promt": "a"}, "promt"),
        ({"prompt": "a", "tenant": ""}, "tenant"),
        ({"chat": {"messages": [{"role": "king", "content": "a"}]}}, "messages[0].role"),
    ],
)
async def test_a_question_that_is_none_is_refused_by_its_field(
    body: Any, param: str | None
) -> None:
    async with a_site() as (site, _):
        reply = await site.http.post("/v1/cache/explain", json=body)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, param), reply.text


async def test_a_method_that_is_not_allowed_is_told_all_that_are() -> None:
    async with a_site() as (site, _):
        reply = await site.http.put("/v1/cache/entries")
        assert reply.status_code == 405
        assert reply.headers["allow"] == "DELETE, GET"


async def test_a_tenant_judges_its_own_answers_and_no_others() -> None:
    async with a_site(**KEYS) as (site, stack):
        entry = await stored(site, stack, key="k-red")
        hit = await chat(site, REWORDED, key="k-red")
        assert hit.headers["x-seedance-cache"].startswith("semantic")
        assert hit.headers["x-seedance-cache-id"] == entry

        async def judge(key: str, **body: Any) -> httpx.Response:
            return await site.http.post("/v1/cache/feedback", json=body, headers=bearer(key))

        stranger = await judge("k-blue", id=entry, was_right=False)
        assert (stranger.status_code, stranger.json()["error"]["param"]) == (404, "id")
        assert (await judge("k-red", id=entry, was_right=True)).json() == {"noted": True}
        assert (await judge("k-red", id=entry, was_right=False)).json() == {"noted": True}
        for text in (QUESTION, REWORDED):
            reply = await chat(site, text, key="k-red", max_tokens=99)
            assert reply.headers["x-seedance-cache"].startswith("miss"), "it was judged wrong"
        assert (await judge("k-red", id="zz", was_right=True)).json()["error"]["param"] == "id"
        assert (await judge("k-red", id=entry)).json()["error"]["param"] == "was_right"
        assert (await judge("k-none", id=entry, was_right=True)).status_code == 401


# ------------------------------------------------------------------ out and in


async def exported(site: Site, **which: Any) -> list[dict[str, Any]]:
    reply = await site.http.get("/v1/cache/export", params=which)
    assert reply.headers["content-type"].startswith("application/x-ndjson")
    return [json.loads(line) for line in reply.text.splitlines()]


async def test_what_is_exported_from_one_server_hits_on_another() -> None:
    async with a_site() as (site, stack):
        await stored(site, stack)
        await stored(site, stack, "Who wrote Faust?")
        lines = await exported(site)
        assert {line["text"] for line in lines} == {QUESTION, "Who wrote Faust?"}
        text = "\n".join(json.dumps(line | {"tags": ["moved"]}) for line in lines)
    async with a_site() as (site, stack):
        reply = await site.http.post("/v1/cache/import", content=text)
        assert reply.json() == {"read": 2, "kept": 2}
        assert (await chat(site)).headers["x-seedance-cache"].startswith("exact")
        assert (await chat(site, REWORDED)).headers["x-seedance-cache"].startswith("semantic")
        assert len(await exported(site, tag="moved")) == 2


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ("{", "line 2"),
        ("[]", "line 2"),
        ({"age_s": None}, "age_s"),
        ({"allow_semantic": 1}, "allow_semantic"),
        ({"payload": "%%%"}, "payload"),
        ({"payload": "AAAA"}, "payload"),
        ({"vector": "AAA="}, "vector"),
        ({"tags": [1]}, "tags"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"completion_tokens": -1}, None),
    ],
)
async def test_a_bad_line_is_named_and_not_taken_in(change: Any, param: str | None) -> None:
    async with a_site() as (site, stack):
        await stored(site, stack)
        (line,) = await exported(site)
        bad = change if isinstance(change, str) else json.dumps(line | change)
        reply = await site.http.post("/v1/cache/import", content=f"{json.dumps(line)}\n{bad}\n")
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, param), reply.text


async def test_an_endless_line_is_refused() -> None:
    async with a_site() as (site, _):
        reply = await site.http.post("/v1/cache/import", content=b"x" * (MAX_LINE_BYTES + 2**17))
        assert reply.status_code == 413


def quiet() -> Console:
    return Console(file=io.StringIO())


def server_of(site: Site, key: str | None = None) -> Server:
    return Server(f"http://{site.address[0]}:{site.address[1]}", key)


async def test_the_command_line_exports_imports_and_warms_up(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts"
    body = {"messages": [{"role": "user", "content": "Who wrote Faust?"}]}
    prompts.write_text(f"{QUESTION}\n\n{json.dumps(body)}\n{QUESTION}\n")
    file = tmp_path / "cache.jsonl"
    async with a_site() as (site, stack):
        told = await asyncio.to_thread(
            warm_cache, server_of(site), prompts, num_parallel=1, console=quiet()
        )
        assert told == {"miss": 2, "exact": 1}
        await eventually(lambda: not stack.graph.is_storing)
        number = await asyncio.to_thread(
            export_entries, server_of(site), file, {"tenant": "default"}, quiet()
        )
        assert number == 2 == len(file.read_text().splitlines())
    async with a_site() as (site, _):
        assert await asyncio.to_thread(import_entries, server_of(site), file, quiet()) == (2, 2)
        assert (await chat(site)).headers["x-seedance-cache"].startswith("exact")


async def test_the_command_line_tells_what_the_server_refuses(tmp_path: Path) -> None:
    file = tmp_path / "cache.jsonl"
    async with a_site(**KEYS) as (site, _):
        with pytest.raises(Forbidden, match="admin"):
            await asyncio.to_thread(export_entries, server_of(site, "k-red"), file, {}, quiet())
        assert not file.exists()
        with pytest.raises(InvalidRequest, match="line 1"):
            await asyncio.to_thread(
                warm_cache, server_of(site), _written(tmp_path, "{}"), console=quiet()
            )
    with pytest.raises(InvalidRequest, match="http"):
        Server("ftp://example.org", None)


def _written(folder: Path, text: str) -> Path:
    file = folder / "written"
    file.write_text(text)
    return file


async def test_a_cache_that_is_off_or_away_is_told() -> None:
    async with running_stack(with_cache=False) as stack, on_air(stack.graph) as site:
        reply = await site.http.get("/v1/cache/stats")
        assert (reply.status_code, "off" in reply.json()["error"]["message"]) == (400, True)

    class Away(type(whole_cache())):  # type: ignore[misc]
        async def manage(self, payload: bytes) -> list[bytes]:
            raise ConnectionError("gone")

    async with (
        running_stack(cache=Away(None)) as stack,
        on_air(stack.graph) as site,
    ):
        reply = await site.http.get("/v1/cache/stats")
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "overloaded")


async def test_the_document_describes_every_route() -> None:
    async with a_site() as (site, _):
        document = (await site.http.get("/openapi.json")).json()
    paths = document["paths"]
    for path, method in (
        ("stats", "get"),
        ("entries", "get"),
        ("entries", "delete"),
        ("explain", "post"),
        ("feedback", "post"),
        ("export", "get"),
        ("import", "post"),
    ):
        assert paths[f"/v1/cache/{path}"][method]["description"]
    assert {"StatsReply", "EntryList", "ExplainReply"} <= set(document["components"]["schemas"])
