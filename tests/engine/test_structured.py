from __future__ import annotations

import json
import random
import re
from typing import Any

import jsonschema
import pytest
import torch

from deployments.engine.structured import MAX_SCHEMA_BYTES, Grammar, grammar_for
from deployments.engine.tokenizer import ChatTokenizer
from protocol.errors import InternalError, InvalidRequest
from tests.engine import tokenizers_zoo as zoo

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "é"]}, "maxItems": 3},
        "pet": {"oneOf": [{"const": "cat"}, {"const": "dog"}]},
    },
    "required": ["name", "age", "tags", "pet"],
    "additionalProperties": False,
}


def json_schema(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


def answer(grammar: Grammar, tokenizer: ChatTokenizer, *, seed: int, max_tokens: int) -> str:
    """Samples from random logits until the grammar is satisfied."""
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = []
    while not grammar.is_finished and len(ids) < max_tokens:
        logits = torch.randn(tokenizer.vocab_size, generator=generator)
        grammar.mask(logits)
        ids.append(int(logits.argmax()))
        grammar.accept(ids[-1])
        if ids[-1] in tokenizer.eos_token_ids:
            break
    return tokenizer.decode(ids)


@pytest.mark.parametrize("make", [zoo.bytes_only, zoo.byte_level], ids=lambda make: make.__name__)
@pytest.mark.parametrize("seed", range(5))
def test_random_answers_obey_the_schema(make, seed):
    tokenizer = make()
    grammar = grammar_for(json_schema(PERSON), tokenizer)
    assert grammar is not None
    text = answer(grammar, tokenizer, seed=seed, max_tokens=2_000)
    jsonschema.validate(json.loads(text), PERSON)
    assert grammar.is_finished


def random_schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """Any schema of the usual keywords, closed and bounded, so that random letters can end it."""
    simple = [
        lambda: {"type": "string", "maxLength": rng.randint(0, 8)},
        lambda: {"type": "string", "pattern": "^[a-c]{1,3}$"},
        lambda: {"type": "integer", "minimum": -5, "maximum": rng.randint(-5, 300)},
        lambda: {"type": "boolean"},
        lambda: {"type": "null"},
        lambda: {"enum": rng.sample(["a", "é", 1, None, True, "x y"], rng.randint(1, 4))},
        lambda: {"const": rng.choice(["z", 7, [1, 2]])},
    ]
    if depth == 3 or (depth and rng.random() < 0.5):
        return rng.choice(simple)()
    if rng.random() < 0.3:
        least = rng.randint(0, 2)
        items = random_schema(rng, depth + 1)
        return {"type": "array", "items": items, "minItems": least, "maxItems": least + 2}
    if rng.random() < 0.2:
        return {"anyOf": [random_schema(rng, depth + 1) for _ in range(rng.randint(1, 3))]}
    names = rng.sample(["name", "age", "ß", "a b", "deep"], rng.randint(0, 4))
    return {
        "type": "object",
        "properties": {name: random_schema(rng, depth + 1) for name in names},
        "required": rng.sample(names, rng.randint(0, len(names))),
        "additionalProperties": False,
    }


@pytest.mark.parametrize("seed", range(50))
def test_answers_obey_random_schemas(seed):
    schema = random_schema(random.Random(seed))
    tokenizer = zoo.byte_level()
    grammar = grammar_for(json_schema(schema), tokenizer)
    assert grammar is not None
    text = answer(grammar, tokenizer, seed=seed, max_tokens=4_000)
    jsonschema.validate(json.loads(text), schema)


@pytest.mark.parametrize(
    "pattern", ["[a-c]{2,5}", "(yes|no), [0-9]{3}", "\\d{4}-\\d{2}", "ä+\\.", "a|bc|def"]
)
def test_answers_match_a_regular_expression_as_a_whole(pattern):
    tokenizer = zoo.byte_level()
    for seed in range(4):
        grammar = grammar_for({"type": "regex", "regex": pattern}, tokenizer)
        assert grammar is not None
        text = answer(grammar, tokenizer, seed=seed, max_tokens=500)
        assert re.fullmatch(pattern, text), text


def test_answers_are_one_of_a_choice():
    tokenizer = zoo.byte_level()
    choice = ["yes", "no", "no way", 'a "quoted"\nline', "é 🙂 \\d+", "x|y"]
    found = set()
    for seed in range(60):
        grammar = grammar_for({"type": "choice", "choice": choice}, tokenizer)
        assert grammar is not None
        found.add(answer(grammar, tokenizer, seed=seed, max_tokens=100))
    assert found <= set(choice)
    assert len(found) > 3


@pytest.mark.model
@pytest.mark.parametrize("seed", range(5))
def test_random_answers_of_the_default_vocabulary_obey_the_schema(chat_tokenizer, seed):
    grammar = grammar_for(json_schema(PERSON), chat_tokenizer)
    assert grammar is not None
    text = answer(grammar, chat_tokenizer, seed=seed, max_tokens=2_000)
    jsonschema.validate(json.loads(text), PERSON)


def test_a_json_object_begins_with_a_brace_and_may_end():
    tokenizer = zoo.bytes_only()
    grammar = grammar_for({"type": "json_object"}, tokenizer)
    assert grammar is not None
    logits = torch.zeros(tokenizer.vocab_size)
    grammar.mask(logits)
    assert torch.isfinite(logits).nonzero().flatten().tolist() == [ord("{")]
    for byte in b'{"a": [1, null]}':
        assert not grammar.is_finished
        grammar.accept(byte)
    assert grammar.is_finished


def test_allowed_logits_keep_their_values():
    tokenizer = zoo.bytes_only()
    grammar = grammar_for(json_schema({"enum": [1, 2]}), tokenizer)
    assert grammar is not None
    logits = torch.arange(tokenizer.vocab_size, dtype=torch.float32)
    grammar.mask(logits)
    assert {i: logits[i].item() for i in torch.isfinite(logits).nonzero().flatten().tolist()} == {
        ord("1"): 49.0,
        ord("2"): 50.0,
    }


def test_logits_wider_than_the_vocabulary_are_masked_to_the_end():
    grammar = grammar_for({"type": "json_object"}, zoo.bytes_only())
    assert grammar is not None
    logits = torch.zeros(400)
    grammar.mask(logits)
    assert torch.isfinite(logits).sum() == 1


def test_two_answers_do_not_share_their_state():
    tokenizer = zoo.bytes_only()
    first, second = (grammar_for({"type": "json_object"}, tokenizer) for _ in range(2))
    assert first is not None
    assert second is not None
    first.accept(ord("{"))
    second.accept(ord("{"))
    first.accept(ord("}"))
    assert (first.is_finished, second.is_finished) == (True, False)


def test_a_token_that_was_not_allowed_fails_the_answer_only():
    tokenizer = zoo.bytes_only()
    grammar = grammar_for({"type": "json_object"}, tokenizer)
    assert grammar is not None
    with pytest.raises(InternalError):
        grammar.accept(ord("x"))
    with pytest.raises(InternalError):
        grammar.mask(torch.zeros(tokenizer.vocab_size))


@pytest.mark.parametrize("response_format", [None, {"type": "text"}])
def test_free_text_needs_no_grammar(response_format):
    assert grammar_for(response_format, zoo.bytes_only()) is None


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


@pytest.mark.parametrize(
    "response_format",
    [
        {},
        {"type": None},
        {"type": "xml"},
        {"type": "regex"},
        {"type": "regex", "regex": ""},
        {"type": "regex", "regex": "("},
        {"type": "regex", "regex": "a" * (MAX_SCHEMA_BYTES + 1)},
        {"type": "regex", "regex": "\ud800"},
        {"type": "choice"},
        {"type": "choice", "choice": []},
        {"type": "choice", "choice": ["a", ""]},
        {"type": "choice", "choice": ["a", 1]},
        {"type": "choice", "choice": "ab"},
        {"type": "choice", "choice": ["\udc00"]},
        {"type": ["json_object"]},
        {"type": "json_schema"},
        {"type": "json_schema", "json_schema": []},
        {"type": "json_schema", "json_schema": {"name": "x"}},
        json_schema(True),
        json_schema({"type": "foo"}),
        json_schema({"type": "object", "properties": 5}),
        json_schema({"type": "string", "pattern": "("}),
        json_schema({"enum": []}),
        json_schema({"not": {"type": "string"}}),
        json_schema({"allOf": [{"type": "string"}, {"type": "integer"}]}),
        json_schema({"$ref": "#"}),
        json_schema({"$ref": "#/$defs/none"}),
        json_schema({"$ref": "https://example.org/schema.json"}),
        json_schema({"const": "\ud800"}),
        json_schema({"const": float("nan")}),
        json_schema({"enum": ["x" * MAX_SCHEMA_BYTES]}),
        json_schema(nested(300)),
    ],
    ids=lambda value: str(value)[:50],
)
def test_an_unusable_response_format_is_refused(response_format):
    with pytest.raises(InvalidRequest) as refusal:
        grammar_for(response_format, zoo.bytes_only())
    assert refusal.value.param == "response_format"


def test_a_schema_nested_beyond_the_stack_is_refused():
    with pytest.raises(InvalidRequest, match="response_format cannot be used"):
        grammar_for(json_schema(nested(5_000)), zoo.bytes_only())


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "pattern": "(a|b){1000000}"},
        {"type": "string", "pattern": "(a*)*(b*)*((x{1,1000}){1,1000}){1,1000}"},
        {"type": "array", "minItems": 10**9},
        {"type": "string", "minLength": 10**7},
        {
            "type": "object",
            "properties": {
                f"p{i}": {"type": "string", "pattern": f"[a-z]{{{i}}}"} for i in range(900)
            },
        },
    ],
    ids=lambda value: str(value)[:50],
)
def test_an_expensive_schema_is_refused_or_served_but_never_hangs(schema):
    tokenizer = zoo.bytes_only()
    try:
        grammar = grammar_for(json_schema(schema), tokenizer)
        assert grammar is not None
        answer(grammar, tokenizer, seed=0, max_tokens=20)
    except (InvalidRequest, InternalError):
        pass
