"""The routes around the APIs: probes, the page, the metrics."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from tests.app.stack import MODEL, PATIENCE_S, echo, on_air, running_stack, talks_on, until_metrics
from tests.app.talker import talking


async def test_alive_and_ready_are_two_questions() -> None:
    async with running_stack(accept_timeout_s=0.05) as stack, on_air(stack.graph) as site:
        assert (await site.http.get("/healthz")).status_code == 200
        assert (await site.http.get("/readyz")).json() == {"status": "ready"}

        async def hang() -> bytes:
            await asyncio.Event().wait()
            raise AssertionError

        async def fail() -> bytes:
            raise ConnectionError("a secret address")

        for broken in (hang, fail):
            stack.model.info = broken  # type: ignore[method-assign]
            response = await site.http.get("/readyz")
            assert response.status_code == 503
            assert int(response.headers["retry-after"]) >= 1
            assert "secret" not in response.text
            assert (await site.http.get("/healthz")).status_code == 200


async def test_a_house_without_a_model_tells_so_sooner_than_it_gives_a_request_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("app.model_desk.INFO_TIMEOUT_S", 0.05)
    async with running_stack() as stack, on_air(stack.graph) as site:

        async def hang() -> bytes:
            await asyncio.Event().wait()
            raise AssertionError

        stack.model.info = hang  # type: ignore[method-assign]
        for path in ("/readyz", "/v1/models"):
            response = await site.http.get(path, timeout=PATIENCE_S / 2)
            assert response.status_code == 503
            assert int(response.headers["retry-after"]) >= 1


async def test_the_page_is_served_fresh() -> None:
    async with running_stack() as stack, on_air(stack.graph) as site:
        response = await site.http.get("/")
        assert response.headers["content-type"].startswith("text/html")
        assert response.headers["cache-control"] == "no-cache"
        assert "<html" in response.text


async def test_an_unknown_route_is_an_error_object() -> None:
    async with running_stack() as stack, on_air(stack.graph) as site:
        response = await site.http.get("/v2/anything")
        assert response.status_code == 404
        assert response.json()["error"]["code"] == "not_found"


async def test_keys_and_tenants_hold_over_http() -> None:
    from app.accounts import hash_key

    keys = [{"tenant": name, "sha256": hash_key(f"key-{name}")} for name in ("a", "b")]
    async with running_stack() as stack, on_air(stack.graph, auth={"keys": keys}) as site:

        async def ask(key: str | None) -> httpx.Response:
            headers = {} if key is None else {"authorization": f"Bearer {key}"}
            body = {"messages": [{"role": "user", "content": "My code is 7."}], "temperature": 0}
            return await site.http.post("/v1/chat/completions", json=body, headers=headers)

        assert (await ask(None)).status_code == 401
        assert (await ask("key-c")).status_code == 401
        marks = [(await ask(f"key-{name}")).headers["x-seedance-cache"] for name in "abab"]
        assert [mark.partition(";")[0] for mark in marks] == ["miss", "miss", "exact", "exact"]


async def test_the_metrics_agree_with_what_was_run() -> None:
    async with running_stack(echo) as stack, on_air(stack.graph) as site:

        async def complete(prompt: str, **fields: Any) -> httpx.Response:
            body = {"model": MODEL, "prompt": prompt, "temperature": 0, **fields}
            return await site.http.post("/v1/completions", json=body)

        replies = [
            await complete("to the end"),
            await complete("to the end"),
            await complete("cut", max_tokens=2),
            await complete("cut", max_tokens=2, cache="bypass"),
        ]
        assert (await complete("no", stop_token_ids=[10**6])).status_code == 400
        samples = await until_metrics(site, cache_stores_total=2)
        usages = [reply.json()["usage"] for reply in (replies[0], *replies[2:])]
        outcomes = {
            "stop][miss": 1,
            "stop][exact": 1,
            "length][miss": 2,
            "refused][miss": 1,
        }
        for labels, count in outcomes.items():
            assert samples[f"requests_total[{labels}]"] == count
        assert (
            sum(value for name, value in samples.items() if name.startswith("requests_total[")) == 5
        )
        assert samples["generated_tokens_total"] == sum(u["completion_tokens"] for u in usages)
        assert samples["prompt_tokens_total"] == sum(u["prompt_tokens"] for u in usages)
        assert samples["cache_lookups_total[exact]"] == 1
        assert samples["cache_lookups_total[miss]"] == 3
        assert samples["cache_entries"] == 2
        assert samples["cache_errors_total"] == 0
        assert samples["model_replicas"] == 1


async def test_gauges_fall_to_zero_when_every_stream_was_dropped() -> None:
    num_streams = 6
    options: dict[str, Any] = {"max_num_seqs": 4, "max_waiting": 2, "token_interval_s": 0.002}
    async with (
        running_stack(talks_on, **options) as stack,
        on_air(stack.graph, limits={"resume_window_s": 0}) as site,
    ):
        async with talking(site.infer_url) as talker:
            for i in range(num_streams):
                await talker.ask(f"r{i}")
                await talker.until("INFER_ACK", id=f"r{i}")
            await talker.ask("one too many")
            await talker.until("ERROR")
            await until_metrics(site, requests_running=4, requests_waiting=2, open_connections=1)
            talker.reset()
            samples = await until_metrics(
                site, requests_running=0, requests_waiting=0, open_connections=0
            )
        assert samples["requests_total[disconnected][miss]"] == num_streams
        assert samples["requests_total[refused][miss]"] == 1
        assert "requests_total[stop][miss]" not in samples
