"""Keys, limits and usage over the wire: a real store behind a real graph."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from websockets.asyncio.client import connect

from app.account_store import AccountStore, StoreUnavailable, open_store
from app.accounts import hash_key
from app.outcomes import RequestOutcomes
from app.rate_limits import Limits
from app.settings import parse_settings
from app.usage_ledger import Batch, Row, Used
from app.web import Web
from deployments.engine.scripted import Script
from tests.app.fake_model import FakeIngress, FakeModel, MemoryPeer, gateway_over
from tests.app.stack import (
    PATIENCE_S,
    Site,
    Stack,
    echo,
    eventually,
    running_stack,
    served,
    talks_on,
)
from tests.app.talker import Talker, talking

SOON_S = 0.01
FIGURES = ("prompt_tokens", "completion_tokens", "cached_tokens", "saved_tokens")


@dataclass
class House:
    """A server with a store, and another look at that store."""

    site: Site
    web: Web
    store: AccountStore
    stack: Stack
    ids: dict[str, str] = field(default_factory=dict)

    async def add(self, tenant: str, *, admin: bool = False, **limits: int) -> None:
        """A key `key-TENANT`, and limits where some are given; returns once the server knows."""
        digest = hash_key(f"key-{tenant}")
        made = await self.store.create_key(tenant, digest, "hint", is_admin=admin)
        self.ids[tenant] = made.id
        if limits:
            await self.store.set_limits(tenant, Limits(**limits))
        await self.web._accounts.refresh()

    async def until_revoked(self, tenant: str) -> None:
        async def is_refused() -> bool:
            return (await self.get("/v1/models", tenant)).status_code == 401

        await until(is_refused)

    async def until_used(self, tenant: str, num_requests: int) -> None:
        async def is_written() -> bool:
            return (await self.used(tenant)).requests == num_requests

        await until(is_written)

    async def get(self, path: str, asker: str | None = None, /, **params: Any) -> httpx.Response:
        return await self.site.http.get(path, headers=_headers(asker), params=params)

    async def ask(self, tenant: str | None, prompt: str = "hi", **fields: Any) -> httpx.Response:
        body = {"prompt": prompt, "temperature": 0, **fields}
        return await self.site.http.post("/v1/completions", json=body, headers=_headers(tenant))

    async def used(self, tenant: str) -> Used:
        """The tenant's total in the store, all written."""
        assert self.web._ledger is not None
        await self.web._ledger.flush()
        rows = await self.store.usage(
            tenant, first_day="0001-01-01", last_day="9999-12-31", limit=100
        )
        total = Used()
        for _, used in rows:
            total = total.plus(used)
        return total


async def until(holds: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            if await holds():
                return
            await asyncio.sleep(SOON_S)


def _headers(tenant: str | None) -> dict[str, str]:
    return {} if tenant is None else {"authorization": f"Bearer key-{tenant}"}


@asynccontextmanager
async def house(home: Path, script: Script = echo, **options: Any) -> AsyncIterator[House]:
    args: dict[str, Any] = {"home": str(home), **options.pop("settings", {})}
    accounts = {"refresh_s": SOON_S, "flush_s": SOON_S, **args.pop("accounts", {})}
    parsed = parse_settings({**args, "accounts": accounts})
    async with running_stack(script, **options) as stack:
        web = Web(stack.graph, parsed, store=open_store(parsed.accounts, home))
        await web.start()
        other = open_store(parsed.accounts, home)
        try:
            async with (
                served(web.app) as address,
                httpx.AsyncClient(
                    base_url=f"http://{address[0]}:{address[1]}", timeout=PATIENCE_S
                ) as http,
            ):
                yield House(Site(address, http), web, other, stack)
        finally:
            await web.close()
            await other.close()


# ------------------------------------------------------------------ keys


async def test_a_made_key_opens_and_a_revoked_one_closes_while_the_server_runs(
    tmp_path: Path,
) -> None:
    async with house(tmp_path) as home:
        assert (await home.ask(None)).status_code == 200
        await home.add("red")
        assert (await home.ask(None)).status_code == 401
        assert (await home.ask("red")).status_code == 200
        await home.store.revoke_key(home.ids["red"])
        await home.until_revoked("red")
        assert (await home.ask(None)).status_code == 401


async def test_a_socket_whose_key_was_revoked_gets_nothing_more(tmp_path: Path) -> None:
    async with house(tmp_path) as home:
        await home.add("red")
        await home.add("blue")
        ticket = (await home.site.http.post("/v1/tickets", headers=_headers("red"))).json()[
            "ticket"
        ]
        offered: Any = ("seedance.v1.json", f"seedance.ticket.{ticket}")
        async with (
            talking(home.site.infer_url, key="key-red") as by_key,
            talking(home.site.infer_url, subprotocols=offered) as by_ticket,
            talking(home.site.infer_url, key="key-blue") as other,
        ):
            for talker in (by_key, by_ticket, other):
                await talker.ask("before")
                await talker.until("INFER_DONE", id="before")
            await home.store.revoke_key(home.ids["red"])
            await home.until_revoked("red")
            for talker in (by_key, by_ticket):
                await talker.ask("after")
                refused = await talker.until("ERROR", id="after")
                assert refused["code"] == "unauthorized"
            await other.ask("after")
            await other.until("INFER_DONE", id="after")


async def test_a_socket_of_openais_api_asks_anew_whether_its_key_is_good(tmp_path: Path) -> None:
    async with house(tmp_path) as home:
        await home.add("red")
        url = home.site.infer_url.replace("/v1/infer", "/v1/responses")
        async with connect(url, additional_headers=_headers("red")) as socket:

            async def types_of_one() -> list[str]:
                await socket.send(json.dumps({"type": "response.create", "input": "hi"}))
                types: list[str] = []
                while not types or types[-1] not in ("response.completed", "error"):
                    types.append(json.loads(await socket.recv())["type"])
                return types

            assert (await types_of_one())[-1] == "response.completed"
            await home.store.revoke_key(home.ids["red"])
            await home.until_revoked("red")
            assert await types_of_one() == ["error"]


async def test_a_store_that_goes_down_stops_no_stream_and_no_new_request(tmp_path: Path) -> None:
    async with house(tmp_path) as home:
        await home.add("red")
        before = await home.used("red")

        async def fail(*_: Any, **__: Any) -> Any:
            raise StoreUnavailable("down", retry_after_s=5)

        store, ledger = home.web._store, home.web._ledger
        assert store is not None
        assert ledger is not None
        add_usage = ledger._write
        store.snapshot = store.usage = fail  # type: ignore[method-assign]
        ledger._write = fail
        async with talking(home.site.infer_url, key="key-red") as talker:
            await talker.ask("r")
            await talker.until("INFER_DONE", id="r")
        assert (await home.ask("red", "over http")).status_code == 200
        refused = await home.get("/v1/usage", "red")
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) >= 1

        async def is_told() -> bool:
            samples = await home.site.metrics()
            return samples["account_store_up"] == 0 and samples["usage_writes_failed_total"] > 0

        await until(is_told)
        ledger._write = add_usage
        await home.until_used("red", before.requests + 2)


# ------------------------------------------------------------------ limits


async def test_a_tenant_over_its_limit_is_told_when_to_come_back(tmp_path: Path) -> None:
    async with house(tmp_path) as home:
        await home.add("red", requests_per_minute=2, tokens_per_minute=10_000)
        await home.add("blue")
        replies = [await home.ask("red", f"prompt {number}") for number in range(3)]
        assert [reply.status_code for reply in replies] == [200, 200, 429]
        left = [reply.headers["x-ratelimit-remaining-requests"] for reply in replies]
        assert left == ["1", "0", "0"]
        assert replies[2].json()["error"]["code"] == "rate_limited"
        assert replies[2].headers["x-ratelimit-limit-requests"] == "2"
        assert 1 <= int(replies[2].headers["retry-after"]) <= 30
        assert int(replies[2].headers["x-ratelimit-remaining-tokens"]) < 10_000
        async with talking(home.site.infer_url, key="key-red") as talker:
            await talker.ask("r")
            refused = await talker.until("ERROR", id="r")
        assert refused["code"] == "rate_limited"
        assert refused["retryable"]
        assert 0 < refused["retry_after_s"] <= 30
        other = await home.ask("blue")
        assert other.status_code == 200
        assert not [name for name in other.headers if name.startswith("x-ratelimit")]


async def test_a_stream_tells_its_limits_in_the_headers_too(tmp_path: Path) -> None:
    async with house(tmp_path, settings={"accounts": {"requests_per_minute": 5}}) as home:
        reply = await home.ask(None, stream=True)
        assert reply.headers["content-type"].startswith("text/event-stream")
        assert reply.headers["x-ratelimit-remaining-requests"] == "4"
        assert (await home.ask(None, max_tokens=-1)).status_code == 400


async def test_requests_at_a_time_are_bounded_over_both_transports(tmp_path: Path) -> None:
    async with house(tmp_path, talks_on, token_interval_s=0.002) as home:
        await home.add("red", concurrent_requests=1)
        async with talking(home.site.infer_url, key="key-red") as talker:
            await talker.ask("long")
            await talker.until("INFER_ACK", id="long")
            assert (await home.ask("red")).status_code == 429
            await talker.ask("second")
            assert (await talker.until("ERROR", id="second"))["code"] == "rate_limited"
            await talker.send("CANCEL", id="long")
            await talker.until("INFER_DONE", id="long")
            await _until_free(talker)


async def _until_free(talker: Talker) -> None:
    await talker.ask("third", max_tokens=2)
    frame = await talker.until("INFER_DONE", id="third")
    assert frame["finish_reason"] == "length"


# ------------------------------------------------------------------ usage


def told_usage(replies: list[httpx.Response]) -> Used:
    """What the clients were told, added up."""
    total = Used()
    for reply in replies:
        usage = reply.json()["usage"]
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        prompt, completion = usage["prompt_tokens"], usage["completion_tokens"]
        is_saved = not reply.headers["x-seedance-cache"].startswith("miss")
        total = total.plus(
            Used(1, prompt, completion, cached, prompt + completion if is_saved else 0)
        )
    return total


PROMPTS = st.sampled_from(["one", "two words", "the same again and again"])
ASKS = st.lists(
    st.tuples(
        st.sampled_from(["red", "blue"]), PROMPTS, st.integers(1, 3), st.sampled_from([1, 2, 16])
    ),
    max_size=6,
)


@settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(asks=ASKS)
def test_the_ledger_is_what_was_served(
    tmp_path_factory: pytest.TempPathFactory, asks: list[tuple[str, str, int, int]]
) -> None:
    async def run() -> None:
        async with house(tmp_path_factory.mktemp("home")) as home:
            for tenant in ("red", "blue"):
                await home.add(tenant)
            replies: dict[str, list[httpx.Response]] = {"red": [], "blue": []}
            for tenant, prompt, n, max_tokens in asks:
                reply = await home.ask(tenant, prompt, n=n, max_tokens=max_tokens)
                assert reply.status_code == 200
                replies[tenant].append(reply)
            for tenant, told in replies.items():
                await home.until_used(tenant, len(told))
                assert await home.used(tenant) == told_usage(told)

    asyncio.run(run())


async def test_a_stream_that_was_lost_and_resumed_counts_once(tmp_path: Path) -> None:
    async with house(tmp_path, talks_on, token_interval_s=0.002) as home:
        await home.add("red")
        async with talking(home.site.infer_url, key="key-red") as talker:
            await talker.ask("r", max_tokens=40)
            token = (await talker.until("INFER_ACK", id="r"))["stream"]
            talker.reset()
        assert (await home.used("red")).requests == 0
        for _ in range(2):
            async with talking(home.site.infer_url, key="key-red") as talker:
                await talker.send("RESUME", id="again", stream=token, last_seq=-1)
                done = await talker.until("INFER_DONE", id="again")
                assert done["usage"]["completion_tokens"] == 40
        await home.until_used("red", 1)
        assert (await home.used("red"))[:3] == (1, done["usage"]["prompt_tokens"], 40)


@pytest.mark.parametrize("is_over", [False, True], ids=["while it ran", "after its end"])
async def test_a_stream_that_another_ingress_took_over_counts_once(is_over: bool) -> None:
    model, uses = FakeModel(is_paced=True), list[tuple[str, Used]]()

    def note(tenant: str, used: Used) -> None:
        uses.append((tenant, used))

    gateways = [
        gateway_over(FakeIngress(model), outcomes=RequestOutcomes(on_use=note)) for _ in range(2)
    ]
    first, second = MemoryPeer(gateways[0]), MemoryPeer(gateways[1])
    first.ask()
    token = str((await first.until("INFER_ACK"))["stream"])
    model.step()
    await first.until("INFER_CHUNK")
    model.step(100 if is_over else 1)
    first.lose()
    await first.gone()
    second.say("RESUME", id="r", stream=token, last_seq=-1)
    await second.until("INFER_ACK")
    model.step(100)
    await second.until("INFER_DONE")
    second.leave()
    await second.gone()
    for gateway in gateways:
        gateway.close()
    assert [(tenant, used.requests) for tenant, used in uses] == [("default", 1)]


async def test_what_was_computed_for_who_left_counts(tmp_path: Path) -> None:
    options: dict[str, Any] = {"token_interval_s": 0.002, "settings": {}}
    options["settings"]["limits"] = {"resume_window_s": 0}
    async with house(tmp_path, talks_on, **options) as home:
        await home.add("red")
        async with talking(home.site.infer_url, key="key-red") as talker:
            await talker.ask("r")
            await talker.until("INFER_CHUNK", id="r")
            talker.reset()
        await home.stack.until_idle()
        await home.until_used("red", 1)
        assert (await home.used("red")).completion_tokens >= 1


async def test_a_refused_request_is_no_use(tmp_path: Path) -> None:
    async with house(tmp_path) as home:
        await home.add("red")
        assert (await home.ask("red", max_tokens=-1)).status_code == 400
        assert await home.used("red") == Used()


async def test_a_tenant_sees_its_own_usage_and_an_admin_all(tmp_path: Path) -> None:
    async with house(tmp_path) as home:
        for tenant in ("red", "blue"):
            await home.add(tenant)
            await home.ask(tenant, f"prompt of {tenant}")
            await home.until_used(tenant, 1)
        await home.add("root", admin=True)
        for tenant in ("red", "blue"):
            reply = (await home.get("/v1/usage", tenant)).json()
            (row,) = reply["data"]
            assert row["tenant"] == tenant
            assert row["date"] == reply["end"]
            assert row["requests"] == 1
            assert all(name in row for name in FIGURES)
            assert (await home.get("/v1/usage", tenant, tenant=tenant)).json() == reply
        for other in ("blue", "root", "nobody"):
            refused = await home.get("/v1/usage", "red", tenant=other)
            assert refused.status_code == 403
            assert refused.json()["error"]["param"] == "tenant"
        everyone = (await home.get("/v1/usage", "root")).json()["data"]
        assert [row["tenant"] for row in everyone] == ["blue", "red"]
        only = (await home.get("/v1/usage", "root", tenant="red")).json()["data"]
        assert [row["tenant"] for row in only] == ["red"]
        for key in (None, "nobody"):
            assert (await home.get("/v1/usage", key)).status_code == 401


async def test_days_are_chosen_and_long_lists_are_cut(tmp_path: Path) -> None:
    async with house(tmp_path) as home:
        await home.add("red")
        days = [f"2026-03-{day:02}" for day in range(1, 6)]
        await home.store.add_usage(Batch("w", 1, {Row("red", day): Used(1) for day in days}))

        async def ask(**params: Any) -> tuple[list[str], bool]:
            reply = (await home.get("/v1/usage", "red", **params)).json()
            return [row["date"] for row in reply["data"]], reply["has_more"]

        assert await ask(start="2026-03-02", end="2026-03-04") == (days[3:0:-1], False)
        assert await ask(end="2026-03-31") == (days[:0:-1] + days[:0], False)
        assert await ask(end="2026-03-30") == (days[::-1], False)
        assert await ask(end="2026-03-30", limit=2) == (days[:2:-1], True)
        assert await ask(end="0001-01-02") == ([], False)


@pytest.mark.parametrize(
    ("params", "param"),
    [
        ({"start": "2026-03-04", "end": "2026-03-03"}, "start"),
        ({"start": "yesterday"}, "start"),
        ({"end": "2026-02-30"}, "end"),
        ({"limit": 0}, "limit"),
        ({"limit": 10_001}, "limit"),
    ],
)
async def test_a_question_that_is_none_is_refused_by_its_parameter(
    tmp_path: Path, params: dict[str, Any], param: str
) -> None:
    async with house(tmp_path) as home:
        refused = await home.get("/v1/usage", **params)
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == param


async def test_the_rest_is_written_when_the_server_ends(tmp_path: Path) -> None:
    async with house(tmp_path, settings={"accounts": {"flush_s": 600.0}}) as home:
        assert (await home.ask(None)).status_code == 200
        ledger = home.web._ledger
        assert ledger is not None
        await eventually(lambda: ledger.stats()["pending_rows"] == 1, "nothing is counted")
        await home.web.close()
        rows = await home.store.usage(
            "default", first_day="0001-01-01", last_day="9999-12-31", limit=9
        )
        assert [used.requests for _, used in rows] == [1]
