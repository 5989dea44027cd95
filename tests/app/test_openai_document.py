"""The served OpenAPI document: well-formed, and true of the bodies that are taken."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest

from app.openai_fields import ROUTES
from app.openai_types import inline_schema
from tests.app.openai_fakes import FakeGraph, app_over, chat_body, client_of


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
