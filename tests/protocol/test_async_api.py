"""docs/asyncapi.yaml is valid AsyncAPI 3 and says what the code's types say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft7Validator, Draft202012Validator

from protocol.async_api import as_yaml, async_api
from protocol.codec import CLIENT_FRAMES, SERVER_FRAMES
from protocol.schemas import frame_schemas

DOCS = Path(__file__).parents[2] / "docs"
# The AsyncAPI Initiative's own schema (npm package @asyncapi/specs 6.11.1, Apache-2.0), without
# white space.
SPECIFICATION = json.loads((Path(__file__).parent / "data" / "asyncapi-3.0.0.json").read_text())


def resolve(document: dict[str, Any], reference: str) -> Any:
    found: Any = document
    for part in reference.removeprefix("#/").split("/"):
        found = found[part]
    return found


def references(value: Any) -> list[str]:
    if isinstance(value, dict):
        own = [value["$ref"]] if isinstance(value.get("$ref"), str) else []
        return own + [each for part in value.values() for each in references(part)]
    if isinstance(value, list):
        return [each for part in value for each in references(part)]
    return []


def test_the_published_document_is_made_from_the_code() -> None:
    assert (DOCS / "asyncapi.yaml").read_text("utf-8") == as_yaml()


def test_the_published_document_is_valid_async_api_3() -> None:
    document = yaml.safe_load((DOCS / "asyncapi.yaml").read_text("utf-8"))
    validator = Draft7Validator(SPECIFICATION)
    assert [error.message[:200] for error in validator.iter_errors(document)] == []


@pytest.mark.parametrize(
    "harm",
    [
        lambda document: document.pop("info"),
        lambda document: document.update(asyncapi="2.6.0"),
        lambda document: document["operations"]["receiveCancel"].update(action="publish"),
    ],
)
def test_the_validation_would_see_a_fault(harm: Any) -> None:
    document = json.loads(json.dumps(async_api()))
    harm(document)
    assert list(Draft7Validator(SPECIFICATION).iter_errors(document))


def test_every_reference_leads_somewhere() -> None:
    document = async_api()
    found = references(document)
    assert found
    for reference in found:
        resolve(document, reference)


def test_each_frame_has_a_message_and_an_operation_of_its_direction() -> None:
    document = async_api()
    assert {*document["channels"]["infer"]["messages"]} == {*CLIENT_FRAMES, *SERVER_FRAMES}
    for action, frames in (("receive", CLIENT_FRAMES), ("send", SERVER_FRAMES)):
        operations = [each for each in document["operations"].values() if each["action"] == action]
        named = {each["messages"][0]["$ref"].rsplit("/", 1)[1] for each in operations}
        assert named == {*frames}


def test_the_schemas_are_those_that_are_published_alone() -> None:
    schemas = async_api()["components"]["schemas"]
    for name, schema in frame_schemas()["$defs"].items():
        if name in ("ClientFrame", "ServerFrame"):
            continue
        text = json.dumps(schema).replace("#/$defs/", "#/components/schemas/")
        assert schemas[name] == json.loads(text)
        Draft202012Validator.check_schema(schema)
