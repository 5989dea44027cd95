"""The served OpenAPI document: well-formed, and true of the bodies that are taken."""

from __future__ import annotations

from typing import Any

import httpx
import jsonschema
import pytest

from app.openai_document import EXAMPLES
from app.openai_fields import ROUTES
from app.openai_types import inline_schema
from protocol.errors import Overloaded
from tests.app.openai_fakes import EMBEDDER, MODEL, FakeGraph, app_over, chat_body, client_of
from tests.app.stack import on_air, running_stack

ASK = {"type": "function", "function": {"name": "ask", "parameters": {"type": "object"}}}
CALLS = (
    *EXAMPLES.items(),
    ("/v1/chat/completions", chat_body()),
    ("/v1/chat/completions", chat_body(logprobs=True, top_logprobs=1, n=2)),
    ("/v1/chat/completions", chat_body(tools=[ASK])),
    ("/v1/chat/completions", chat_body(stream=True)),
    ("/v1/completions", {"prompt": "a", "logprobs": 1}),
    ("/v1/responses", {"input": "a", "max_output_tokens": 5}),
    ("/v1/embeddings", {"input": ["a", "b"]}),
    ("/v1/embeddings", {"input": "a", "encoding_format": "base64"}),
    ("/tokenize", {"prompt": "a", "return_token_strs": True}),
    ("/tokenize", {"prompt": "a"}),
    ("/detokenize", {"tokens": [65]}),
    ("/v1/models", None),
    (f"/v1/models/{MODEL}", None),
    ("/version", None),
)


def body_schema(path: str) -> Any:
    operation = app_over(FakeGraph()).openapi()["paths"][path]["post"]
    return operation["requestBody"]["content"]["application/json"]["schema"]


async def test_the_document_is_served_and_every_schema_in_it_is_valid() -> None:
    async with client_of(FakeGraph()) as client:
        document = (await client.get("/openapi.json")).json()
    assert document["openapi"].startswith("3.1")
    bodies = [route.title.split()[1] for route in ROUTES if route.title.startswith("POST")]
    assert {"/v1/models", "/version", *bodies} <= set(document["paths"])
    for path in bodies:
        jsonschema.Draft202012Validator.check_schema(body_schema(path))
        assert "$ref" not in str(body_schema(path)), "nothing points out of the schema"


@pytest.mark.parametrize("body_type", [route.body for route in ROUTES])
def test_every_field_of_a_body_is_described(body_type: Any) -> None:
    assert set(inline_schema(body_type)["properties"]) == set(body_type.__struct_fields__)


def test_the_document_shows_defaults_and_ranges() -> None:
    properties = body_schema("/v1/chat/completions")["properties"]
    assert properties["temperature"]["default"] == 1.0
    assert properties["temperature"]["anyOf"][0]["maximum"] == 2.0
    assert properties["max_completion_tokens"]["anyOf"][0]["minimum"] == 1
    assert body_schema("/v1/responses")["properties"]["top_p"]["anyOf"][0]["maximum"] == 1.0
    assert body_schema("/v1/completions")["properties"]["max_tokens"]["default"] == 16


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 3},
        {"temperature": None},
        {"max_tokens": 0},
        {"max_completion_tokens": 5},
        {"n": 17},
        {"stop": "."},
        {"stop": 5},
        {"logit_bias": {"5": 1.5}},
        {"stream": True, "stream_options": {"include_usage": True}},
        {"cache": "sampled"},
        {"cache": "never"},
        {"timeout_s": 0},
        {"messages": []},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]},
        {"messages": [{"role": "king", "content": "hi"}]},
    ],
)
async def test_the_document_and_the_server_agree_on_a_body(fields: dict[str, Any]) -> None:
    body = chat_body(**fields)
    schema = body_schema("/v1/chat/completions")
    is_described = jsonschema.Draft202012Validator(schema).is_valid(body)
    async with client_of(FakeGraph()) as client:
        reply = await client.post("/v1/chat/completions", json=body)
    assert (reply.status_code == 200) == is_described


def check_against_document(document: Any, path: str, reply: httpx.Response) -> None:
    """Status, content type and body are among what the document tells of the operation."""
    templates = [path, "/v1/models/{model_id}"]
    (name, *_) = (template for template in templates if template in document["paths"])
    operation = document["paths"][name][reply.request.method.lower()]
    content = operation["responses"][str(reply.status_code)]["content"]
    schema = content[reply.headers["content-type"].partition(";")[0]]["schema"]
    body = reply.json() if "json" in reply.headers["content-type"] else reply.text
    whole = schema | {"components": document["components"]}
    jsonschema.Draft202012Validator(whole).validate(body)


@pytest.mark.parametrize(("path", "body"), CALLS)
async def test_a_reply_is_as_the_document_has_it(path: str, body: Any) -> None:
    async with client_of(FakeGraph(), embedder=EMBEDDER) as client:
        document = (await client.get("/openapi.json")).json()
        reply = await (client.get(path) if body is None else client.post(path, json=body))
    assert reply.status_code == 200, reply.text
    check_against_document(document, path, reply)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"prompt": "a", "model": "another"}, 404),
        ({"prompt": 5}, 400),
        ({"prompt": "a" * 2**11}, 413),
        ({"prompt": "a"}, 503),
    ],
)
async def test_a_refusal_is_as_the_document_has_it(body: Any, status: int) -> None:
    graph = FakeGraph(refusal=Overloaded("full"))
    async with client_of(graph, max_body_bytes=2**10) as client:
        document = (await client.get("/openapi.json")).json()
        reply = await client.post("/v1/completions", json=body)
    assert reply.status_code == status
    check_against_document(document, "/v1/completions", reply)


async def test_a_reply_that_lacks_a_field_is_not_as_the_document_has_it() -> None:
    document = app_over(FakeGraph()).openapi()
    responses = document["paths"]["/v1/completions"]["post"]["responses"]
    schema = responses["200"]["content"]["application/json"]["schema"]
    async with client_of(FakeGraph()) as client:
        whole = (await client.post("/v1/completions", json={"prompt": "a"})).json()
    is_valid = jsonschema.Draft202012Validator(schema).is_valid
    assert is_valid(whole)
    for field in ("id", "object", "created", "model", "choices"):
        assert not is_valid({name: value for name, value in whole.items() if name != field})


async def test_every_operation_tells_its_errors_as_ours_and_none_as_422() -> None:
    async with running_stack() as stack, on_air(stack.graph) as site:
        document = (await site.http.get("/openapi.json")).json()
        health = await site.http.get("/health")
        metrics = await site.http.get("/metrics")
    check_against_document(document, "/health", health)
    check_against_document(document, "/metrics", metrics)
    operations = [operation for path in document["paths"].values() for operation in path.values()]
    refusals = [
        (status, told)
        for operation in operations
        for status, told in operation["responses"].items()
        if int(status) >= 400 and operation["summary"] not in ("Readyz",)
    ]
    assert {"400", "401", "403", "404", "409", "413", "429", "500", "503", "504"} == {
        status for status, _ in refusals
    }
    for _, told in refusals:
        assert told["content"]["application/json"]["schema"]["$ref"].endswith("/Error")
        assert told["description"]
    assert "HTTPValidationError" not in document["components"]["schemas"]
