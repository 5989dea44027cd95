"""Embeddings, tokens, version and health."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import openai
import pytest

from app.outcomes import RequestOutcomes
from app.usage_ledger import Used
from tests.app.openai_fakes import EMBEDDER, MODEL, FakeGraph, client_of, strict_json
from tests.app.stack import MODEL as STACK_MODEL
from tests.app.stack import on_air, running_stack, whole_cache

STACK_EMBEDDER = "sentence-transformers/all-MiniLM-L6-v2"


async def post(path: str, embedder: str | None = EMBEDDER, **body: Any) -> Any:
    async with client_of(FakeGraph(), embedder=embedder) as client:
        return await client.post(path, json=body)


async def test_texts_become_vectors_in_their_order() -> None:
    reply = await post("/v1/embeddings", input=["abc", "a"], model=EMBEDDER)
    assert strict_json(reply.text) == {
        "object": "list",
        "data": [
            {"object": "embedding", "index": 0, "embedding": [3.0, 1.0]},
            {"object": "embedding", "index": 1, "embedding": [1.0, 1.0]},
        ],
        "model": EMBEDDER,
        "usage": {"prompt_tokens": 4, "total_tokens": 4},
    }


async def test_an_embedding_is_use_of_its_tenant() -> None:
    uses: list[tuple[str, Used]] = []
    outcomes = RequestOutcomes(on_use=lambda tenant, used: uses.append((tenant, used)))
    async with client_of(FakeGraph(), embedder=EMBEDDER, outcomes=outcomes) as client:
        reply = await client.post("/v1/embeddings", json={"input": ["abc", "a"]})
    assert reply.status_code == 200
    assert uses == [("tenant-a", Used(requests=1, prompt_tokens=4))]


async def test_base64_holds_the_same_numbers() -> None:
    reply = await post("/v1/embeddings", input="abc", encoding_format="base64", dimensions=2)
    packed = base64.b64decode(reply.json()["data"][0]["embedding"])
    assert np.frombuffer(packed, dtype="<f4").tolist() == [3.0, 1.0]


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"input": []}, 400, "input"),
        ({"input": ""}, 400, "input"),
        ({"input": ["a", ""]}, 400, "input[1]"),
        ({"input": [1, 2]}, 400, "input[0]"),
        ({"input": [[1, 2]]}, 400, "input[0]"),
        ({"input": ["a"] * 2049}, 400, "input"),
        ({}, 400, "input"),
        ({"input": "a", "encoding_format": "hex"}, 400, "encoding_format"),
        ({"input": "a", "dimensions": 3}, 400, "dimensions"),
        ({"input": "a", "model": MODEL}, 404, "model"),
    ],
)
async def test_what_cannot_be_embedded_is_refused_by_name(
    body: dict[str, Any], status: int, param: str
) -> None:
    reply = await post("/v1/embeddings", **body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (status, param)


async def test_without_an_embedder_there_is_no_model_for_it() -> None:
    reply = await post("/v1/embeddings", embedder=None, input="a")
    assert reply.json()["error"]["code"] == "model_not_found"


async def test_the_embedder_is_found_by_its_id() -> None:
    async with client_of(FakeGraph(), embedder=EMBEDDER) as client:
        assert (await client.get(f"/v1/models/{EMBEDDER}")).json()["id"] == EMBEDDER


async def test_the_official_client_embeds_through_the_caches_embedder() -> None:
    async with running_stack() as stack, on_air(stack.graph) as site:
        url = f"{site.http.base_url}/v1"
        async with openai.AsyncOpenAI(api_key="none", base_url=url, max_retries=0) as client:
            reply = await client.embeddings.create(model=STACK_EMBEDDER, input=["a b", "c"])
    assert [item.embedding for item in reply.data] == [[1.0, 0.0, 0.0, 0.0]] * 2
    assert reply.usage.total_tokens == 3


async def too_long(text: str) -> None:
    return None


async def fails(text: str) -> None:
    raise RuntimeError("secret")


@pytest.mark.parametrize(
    ("embed", "code"),
    [(too_long, "context_length_exceeded"), (fails, "internal"), (None, "model_not_found")],
)
async def test_an_embedder_that_cannot_is_an_error_of_its_own(embed: Any, code: str) -> None:
    async with running_stack(cache=whole_cache(embed)) as stack, on_air(stack.graph) as site:
        reply = await site.http.post("/v1/embeddings", json={"input": "a"})
        assert reply.json()["error"]["code"] == code
        assert "secret" not in reply.text
        answer = await site.http.post("/v1/completions", json={"prompt": "still answers"})
        assert answer.status_code == 200


async def test_a_prompt_and_its_tokens_are_the_same_both_ways() -> None:
    async with running_stack() as stack, on_air(stack.graph) as site:
        text = "Once upon <|im_end|> é🙂"
        tokens = (await site.http.post("/tokenize", json={"prompt": text})).json()
        assert tokens["count"] == len(tokens["tokens"]) == len(text.encode())
        assert tokens["max_model_len"] == 4096
        back = await site.http.post("/detokenize", json={"tokens": tokens["tokens"]})
        assert back.json() == {"prompt": text}


async def test_a_chat_has_as_many_tokens_as_its_usage_says() -> None:
    messages = [{"role": "user", "content": "Say hi."}]
    async with running_stack() as stack, on_air(stack.graph) as site:
        body = {"messages": messages, "model": STACK_MODEL, "return_token_strs": True}
        tokens = (await site.http.post("/tokenize", json=body)).json()
        chat = {"messages": messages, "max_tokens": 1}
        usage = (await site.http.post("/v1/chat/completions", json=chat)).json()["usage"]
    assert tokens["count"] == usage["prompt_tokens"]
    assert "".join(tokens["token_strs"]).count("Say hi.") == 1


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "messages"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, "prompt"),
        ("/tokenize", {"prompt": "x" * 5000}, "prompt"),
        ("/tokenize", {"prompt": "a", "add_generation_prompt": False}, "add_generation_prompt"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {"tokens": [10**6]}, "tokens"),
        ("/detokenize", {}, "tokens"),
    ],
)
async def test_what_cannot_be_tokenised_is_refused_by_name(
    path: str, body: dict[str, Any], param: str
) -> None:
    async with running_stack() as stack, on_air(stack.graph) as site:
        reply = await site.http.post(path, json=body)
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == param


async def test_nothing_has_no_tokens() -> None:
    assert (await post("/tokenize", prompt="")).json()["tokens"] == []


async def test_version_and_health_are_told_without_a_key() -> None:
    async with running_stack() as stack, on_air(stack.graph) as site:
        assert set((await site.http.get("/version")).json()) == {"version"}
        assert (await site.http.get("/health")).status_code == 200
        stack.replicas[0].kill()
        assert (await site.http.get("/health")).status_code == 503
