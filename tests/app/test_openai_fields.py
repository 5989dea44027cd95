"""The tables of docs/openai.md: equal to the code, complete, and true of what the server does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from openai.types import completion_create_params, embedding_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params

from app.openai_fields import ROUTES, field_tables, fields_of
from tests.app.openai_fakes import EMBEDDER, FakeGraph, chat_body, client_of

DOCS = Path(__file__).parents[2] / "docs" / "openai.md"
CHAT, TEXT, RESPONSES, _, EMBEDDINGS, *_ = ROUTES
OFFICIAL: list[tuple[Any, Any]] = [
    (CHAT, chat_create_params.CompletionCreateParamsBase),
    (TEXT, completion_create_params.CompletionCreateParamsBase),
    (RESPONSES, response_create_params.ResponseCreateParamsBase),
    (EMBEDDINGS, embedding_create_params.EmbeddingCreateParams),
]
BODIES: dict[str, dict[str, Any]] = {
    CHAT.title: chat_body(),
    TEXT.title: {"prompt": "a"},
    RESPONSES.title: {"input": "a"},
    EMBEDDINGS.title: {"input": "a"},
}


def test_the_page_holds_the_tables_of_the_code() -> None:
    _, _, rest = DOCS.read_text(encoding="utf-8").partition("<!-- fields -->\n")
    assert rest.partition("<!-- /fields -->")[0] == field_tables(), "run app.openai_fields"


@pytest.mark.parametrize(("route", "official"), OFFICIAL)
def test_every_field_of_the_official_client_is_treated(route: Any, official: Any) -> None:
    assert set(official.__annotations__) <= set(fields_of(route))


def cases() -> list[tuple[str, str, str]]:
    return [
        (route.title, name, treated)
        for route in ROUTES
        if route.title in BODIES
        for name, treated in fields_of(route).items()
        if treated != "supported"
    ]


@pytest.mark.parametrize(("title", "field", "treated"), cases())
async def test_ignored_is_taken_and_refused_is_a_400(title: str, field: str, treated: str) -> None:
    async with client_of(FakeGraph(), embedder=EMBEDDER) as client:
        reply = await client.post(title.split()[1], json=BODIES[title] | {field: {"any": 1}})
    if treated == "ignored":
        assert reply.status_code == 200, reply.text
    else:
        assert reply.status_code == 400
        assert reply.json()["error"]["param"] == field
