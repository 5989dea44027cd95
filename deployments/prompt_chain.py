"""Names for the prefixes of a prompt, so that a router can tell which replica has met them.

Works on the request's text, not on tokens: the ingress has no tokenizer, and a router needs
to be right most of the time only; the engine compares tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b

import msgspec

from protocol.request import InferenceRequest

BLOCK_CHARS = 128
MAX_LINKS = 64
EVEN_LINKS = 16
GROWTH = 1.15
"""The first blocks are of equal length, each later prefix is longer than the last by this
factor: 64 links reach a megabyte, and what a match may miss stays a small part of the prompt."""
BYTES_PER_TOKEN = 4
MAX_ANSWER_TOKENS = 512
"""Counted of an answer at most: most end long before a high `max_tokens`."""

_encode = msgspec.json.Encoder().encode


def prompt_chain(request: InferenceRequest, block_chars: int = BLOCK_CHARS) -> tuple[int, ...]:
    """Hashes of growing prefixes of the prompt, the shortest first, at most `MAX_LINKS`.

    Two prompts have as many links in common as their common beginning fills blocks, so that a
    chat's later turn begins with the chain of the earlier one. Other tenants and models
    have nothing in common. A prompt shorter than `block_chars` has no links.
    """
    prompt = _as_bytes(request)
    running = blake2b(digest_size=8, person=b"chain")
    running.update(_encode((request.tenant, request.model)))
    links = []
    begin = 0
    for end in _ends(block_chars):
        if end > len(prompt):
            break
        running.update(prompt[begin:end])
        links.append(int.from_bytes(running.digest()))
        begin = end
    return tuple(links)


def prompt_cost(request: InferenceRequest) -> int:
    """Tokens that the request will take to compute, roughly: prompt and answer."""
    if isinstance(request.prompt, tuple):
        num_prompt_tokens = len(request.prompt)
    else:
        num_prompt_tokens = _size_bytes(request) // BYTES_PER_TOKEN
    max_tokens = request.sampling.max_tokens or MAX_ANSWER_TOKENS
    return num_prompt_tokens + min(max_tokens, MAX_ANSWER_TOKENS)


def _size_bytes(request: InferenceRequest) -> int:
    texts = [request.prompt] if isinstance(request.prompt, str) else []
    extras = [request.tools] if request.tools else []
    for message in request.messages or ():
        texts.append(message.content or "")
        if message.tool_calls:
            extras.append(message.tool_calls)
    return sum(len(text.encode()) for text in texts) + sum(len(_encode(each)) for each in extras)


def _ends(block_chars: int) -> Iterator[int]:
    end = 0
    for index in range(MAX_LINKS):
        end = end + block_chars if index < EVEN_LINKS else int(end * GROWTH)
        yield end


def _as_bytes(request: InferenceRequest) -> memoryview:
    """The prompt in the order in which templates print it: what is appended changes no byte before.

    Each part is one line of JSON, so that no text can pass for another's boundary. Dicts keep
    the client's order, in which templates print them.
    """
    if request.prompt is not None:
        if isinstance(request.prompt, str):
            return memoryview(b"text\n" + request.prompt.encode())
        # A comma in place of the closing bracket: more ids may follow, half an id may not.
        return memoryview(b"ids\n" + _encode(request.prompt)[:-1] + b",")
    parts = [b"chat", _encode(request.tools), *map(_encode, request.messages or ())]
    return memoryview(b"\n".join(parts) + b"\n")
