"""The official Python client, synchronous and not, as all its parts here use it."""

from __future__ import annotations

import openai
from checks import KEY, PATIENCE_S, URL
from pydantic import BaseModel, Field

client = openai.OpenAI(base_url=URL, api_key=KEY, timeout=PATIENCE_S, max_retries=0)


def make_async() -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=URL, api_key=KEY, timeout=PATIENCE_S, max_retries=0)


class Person(BaseModel):
    name: str = Field(max_length=12)
    age: int = Field(ge=0, le=120)
