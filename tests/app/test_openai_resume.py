"""Event streams that outlive their connection: `Last-Event-ID` on the same log."""

from __future__ import annotations

import re
from typing import Any

import httpx
import pytest

from tests.app.openai_fakes import chat_body, events_of
from tests.app.stack import Site, Stack, eventually, on_air, running_stack, talks_on

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
RESUMABLE = {"x-seedance-resumable": "true"}
ASKED = chat_body(stream=True, stream_options={"include_usage": True}, temperature=0.7)


def ids_of(body: str) -> list[str]:
    return re.findall(r"^id: (\S+)$", body, re.MULTILINE)


async def post(
    site: Site, headers: dict[str, str], path: str = CHAT, **fields: Any
) -> httpx.Response:
    body = {"prompt": "Once", "stream": True} if path == TEXT else ASKED
    return await site.http.post(path, json=body | fields, headers=headers)


async def until_parked(stack: Stack) -> None:
    await eventually(lambda: stack.num_live == 0, "the lost stream still has its place")


async def test_ids_come_only_to_who_asked_for_them() -> None:
    async with running_stack() as stack, on_air(stack.graph) as site:
        assert not ids_of((await post(site, {})).text)
        assert not ids_of((await post(site, {"x-seedance-resumable": "no"})).text)
        assert not ids_of((await post(site, RESUMABLE, n=2)).text), "one stream has one place"
        assert ids_of((await post(site, RESUMABLE)).text)


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_a_finished_stream_goes_on_behind_each_of_its_events(path: str) -> None:
    async with running_stack() as stack, on_air(stack.graph) as site:
        whole = (await post(site, RESUMABLE, path)).text
        ids = ids_of(whole)
        for place in {0, 1, 3, len(ids) - 2, len(ids) - 1}:
            rest = await post(site, {"last-event-id": ids[place]}, path)
            _, _, missed = whole.partition(f"id: {ids[place]}\n")
            assert rest.status_code == 200
            assert rest.text == missed.partition("\n\n")[2], "nothing twice, nothing missed"


async def test_a_stream_that_lost_its_client_waits_and_goes_on() -> None:
    async with (
        running_stack(talks_on, token_interval_s=0.002) as stack,
        on_air(stack.graph) as site,
    ):
        body = ASKED | {"max_tokens": 900}
        seen = ""
        async with site.http.stream("POST", CHAT, json=body, headers=RESUMABLE) as reply:
            async for part in reply.aiter_text():
                seen += part
                if seen.count("\n\n") > 20:
                    break
        await until_parked(stack)
        events = seen.split("\n\n")[:-1]
        last = ids_of(events[-1])[0]
        rest = await site.http.post(CHAT, json=body, headers={"last-event-id": last})
        chunks = events_of(_bare("\n\n".join(events) + "\n\n" + rest.text))
        assert chunks.pop() == "[DONE]"
        assert chunks[-1]["usage"]["completion_tokens"] == 900
        assert len({(chunk["id"], chunk["created"]) for chunk in chunks}) == 1
        assert [c["choices"][0]["finish_reason"] for c in chunks[:-1]][-1] == "length"
        texts = [c["choices"][0]["delta"].get("content", "") for c in chunks[:-1]]
        assert len("".join(texts)) == 900


async def test_without_the_header_a_lost_client_ends_its_generation() -> None:
    async with (
        running_stack(talks_on, token_interval_s=0.002) as stack,
        on_air(stack.graph) as site,
    ):
        async with site.http.stream("POST", CHAT, json=ASKED) as reply:
            async for _ in reply.aiter_text():
                break
        await stack.until_idle()


async def test_a_second_reader_takes_the_stream_over() -> None:
    async with (
        running_stack(talks_on, token_interval_s=0.01) as stack,
        on_air(stack.graph) as site,
    ):
        body = ASKED | {"max_tokens": 300}
        async with site.http.stream("POST", CHAT, json=body, headers=RESUMABLE) as reply:
            first = ""
            parts = reply.aiter_text()
            while not ids_of(first):
                first += await anext(parts)
            rest = await site.http.post(
                CHAT, json=body, headers={"last-event-id": ids_of(first)[0]}
            )
            assert rest.text.endswith("data: [DONE]\n\n")
            async for part in parts:
                first += part
        assert events_of(_bare(first))[-1]["error"]["code"] == "replaced"


async def test_what_cannot_be_resumed_is_refused() -> None:
    async with running_stack() as stack, on_air(stack.graph) as site:
        ids = ids_of((await post(site, RESUMABLE)).text)
        stem = ids[0].rpartition(":")[0]
        replies = {
            name: await post(site, {"last-event-id": value}, path, **fields)
            for name, value, path, fields in [
                ("no id of ours", "17", CHAT, {}),
                ("too far", f"{stem}:99999", CHAT, {}),
                ("another route", ids[0], TEXT, {}),
                ("unknown", f"{'A' * 40}.1:3", CHAT, {}),
                ("several", ids[0], CHAT, {"n": 2}),
                ("not streamed", ids[0], CHAT, {"stream": False, "stream_options": None}),
            ]
        }
        found = {name: reply.json()["error"]["code"] for name, reply in replies.items()}
        assert found == {
            "no id of ours": "invalid_request",
            "too far": "invalid_request",
            "another route": "resume_expired",
            "unknown": "resume_expired",
            "several": "invalid_request",
            "not streamed": "invalid_request",
        }
        again = await post(site, {"last-event-id": ids[-1]})
        assert again.text == "data: [DONE]\n\n", "a refusal loses nothing"


def _bare(body: str) -> str:
    """The events without their ids."""
    return re.sub(r"^id: \S+\n", "", body, flags=re.MULTILINE)
