"""Routes that generate nothing: embeddings, tokens, and the version."""

from __future__ import annotations

import base64
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from fastapi import APIRouter
from msgspec import UNSET, Meta, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from app.openai_bodies import check_model, json_response, read_json
from app.openai_document import ASKING, EXAMPLES, describe, errors
from app.openai_types import IGNORED_EVERYWHERE
from app.outcomes import RequestOutcomes
from app.serving import ApiGraph
from app.usage_ledger import Used
from deployments.wire import TokenizeCall, TokenizeReply
from protocol.errors import InvalidRequest, ModelNotFound
from protocol.parse import MAX_TOKEN_ID, ChatMessage, decode_struct, inference_request

MAX_INPUTS = 2048
IGNORED_IN_EMBEDDINGS = {**IGNORED_EVERYWHERE}


class EmbeddingBody(msgspec.Struct, frozen=True, kw_only=True):
    """POST /v1/embeddings, answered by the embedder of the semantic cache."""

    model: str | None = None
    input: Annotated[
        str | list[str | int | list[int]],
        Meta(description=f"A text, or up to {MAX_INPUTS}; token ids are refused."),
    ]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[
        Annotated[int, Meta(ge=1)] | None, Meta(description="The embedder's own only.")
    ] = None


class EmbeddingUsage(msgspec.Struct, frozen=True, kw_only=True):
    prompt_tokens: int
    total_tokens: int


class Embedding(msgspec.Struct, frozen=True, kw_only=True):
    """`embedding` is a list of numbers, or little-endian float32 in base64."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingList(msgspec.Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


class TokenizeBody(msgspec.Struct, frozen=True, kw_only=True):
    """POST /tokenize: a `prompt`, or the `messages` of a chat as its template writes them."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Meta(min_length=1)] | None = None
    tools: list[dict[str, Any]] | None = None
    add_special_tokens: Annotated[bool | None, Meta(description="Of a prompt.")] = None
    add_generation_prompt: Annotated[bool | None, Meta(description="`true` only.")] = None
    return_token_strs: bool | None = None


class DetokenizeBody(msgspec.Struct, frozen=True, kw_only=True):
    """POST /detokenize. Special tokens have no text."""

    model: str | None = None
    tokens: list[Annotated[int, Meta(ge=0, le=MAX_TOKEN_ID)]]


class Tokens(msgspec.Struct, frozen=True, kw_only=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | UnsetType | None = UNSET


class Detokenized(msgspec.Struct, frozen=True, kw_only=True):
    prompt: str


class Version(msgspec.Struct, frozen=True, kw_only=True):
    version: str


class TextApi:
    """The endpoints; one instance an ingress replica.

    Args:
        embedder: id of the embedding model; None without one.
        outcomes: holds tenants to their limits, and tells what they used.
    """

    def __init__(
        self,
        graph: Callable[[], ApiGraph],
        tenant_of: Callable[[Request], str],
        *,
        max_body_bytes: int,
        embedder: str | None,
        outcomes: RequestOutcomes,
    ) -> None:
        self._graph = graph
        self._tenant_of = tenant_of
        self._max_body_bytes = max_body_bytes
        self._embedder = embedder
        self._outcomes = outcomes

    def add_to(self, router: APIRouter) -> None:
        """Adds the routes."""
        for path, endpoint, body, reply in (
            ("/v1/embeddings", self.embed, EmbeddingBody, EmbeddingList),
            ("/tokenize", self.tokenize, TokenizeBody, Tokens),
            ("/detokenize", self.detokenize, DetokenizeBody, Detokenized),
        ):
            router.add_api_route(
                path,
                endpoint,
                methods=["POST"],
                response_model=None,
                responses=errors(*ASKING),
                openapi_extra=describe(reply, body=body, example=EXAMPLES[path]),
            )
        router.add_api_route(
            "/version",
            self.version,
            methods=["GET"],
            response_model=None,
            openapi_extra=describe(Version),
        )

    async def embed(self, request: Request) -> Response:
        """Embeds texts."""
        tenant = self._tenant_of(request)
        body = decode_struct(await read_json(request, self._max_body_bytes), EmbeddingBody)
        if self._embedder is None or body.model not in (None, self._embedder):
            asked = "no embedder" if body.model is None else f"embedder {body.model[:200]!a}"
            here = f", {self._embedder!a} is" if self._embedder else ""
            raise ModelNotFound(f"{asked} is not served here{here}", param="model")
        texts = _texts(body.input)
        with self._outcomes.place(tenant):
            reply = await self._graph().embed(texts)
            self._outcomes.note_use(tenant, Used(requests=1, prompt_tokens=reply.num_tokens))
        vectors = [np.frombuffer(raw, dtype="<f4") for raw in reply.vectors]
        size = len(vectors[0])
        if body.dimensions not in (None, size):
            raise InvalidRequest(
                f"dimensions is {body.dimensions}, this embedder has {size}",
                param="dimensions",
                limit=size,
            )
        is_packed = body.encoding_format == "base64"
        return json_response(
            request,
            EmbeddingList(
                data=[
                    Embedding(
                        index=index,
                        embedding=base64.b64encode(vector.tobytes()).decode()
                        if is_packed
                        else vector.tolist(),
                    )
                    for index, vector in enumerate(vectors)
                ],
                model=self._embedder,
                usage=EmbeddingUsage(prompt_tokens=reply.num_tokens, total_tokens=reply.num_tokens),
            ),
        )

    async def tokenize(self, request: Request) -> Response:
        """The tokens of a prompt."""
        tenant = self._tenant_of(request)
        body = decode_struct(await read_json(request, self._max_body_bytes), TokenizeBody)
        info = check_model(body.model, await self._graph().model_info())
        if body.add_generation_prompt is False:
            raise InvalidRequest(
                "add_generation_prompt must be true", param="add_generation_prompt"
            )
        if body.prompt == "":
            reply = TokenizeReply()
        else:
            fields = {"prompt": body.prompt, "messages": body.messages, "tools": body.tools}
            asked = inference_request(fields, request_id="tokenize", tenant=tenant, model=info.id)
            reply = await self._graph().tokenize(
                TokenizeCall(
                    request=asked,
                    has_special_tokens=body.add_special_tokens is not False or body.prompt is None,
                )
            )
        return json_response(
            request,
            Tokens(
                count=len(reply.token_ids),
                max_model_len=info.context_length,
                tokens=list(reply.token_ids),
                token_strs=list(reply.token_texts) if body.return_token_strs else None,
            ),
        )

    async def detokenize(self, request: Request) -> Response:
        """The text of tokens."""
        self._tenant_of(request)
        body = decode_struct(await read_json(request, self._max_body_bytes), DetokenizeBody)
        check_model(body.model, await self._graph().model_info())
        reply = await self._graph().tokenize(TokenizeCall(token_ids=tuple(body.tokens)))
        return json_response(request, Detokenized(prompt=reply.text))

    async def version(self, request: Request) -> Response:
        """The version of the server."""
        return json_response(request, Version(version=own_version()))


def own_version() -> str:
    """That of the installed package; `unknown` where the code runs from a checkout."""
    try:
        return version("seedance")
    except PackageNotFoundError:
        return "unknown"


def _texts(given: str | list[str | int | list[int]]) -> tuple[str, ...]:
    texts = [given] if isinstance(given, str) else given
    if not texts:
        raise InvalidRequest("input must not be empty", param="input", limit=1)
    if len(texts) > MAX_INPUTS:
        raise InvalidRequest(
            f"input has {len(texts)} texts, the limit is {MAX_INPUTS}",
            param="input",
            limit=MAX_INPUTS,
        )
    for place, text in enumerate(texts):
        at = "input" if isinstance(given, str) else f"input[{place}]"
        if not isinstance(text, str):
            raise InvalidRequest(
                f"{at} must be a text: token ids are another tokenizer's", param=at
            )
        if not text:
            raise InvalidRequest(f"{at} must not be empty", param=at, limit=1)
    return tuple(text for text in texts if isinstance(text, str))
