"""From a log to a `response` object and the events that build it up.

An item of the output is open from its `added` to its `done`; one is open at a time: the
message while text comes, then each function call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from app.openai_chat_writer import call_id
from app.openai_errors import error_reply
from app.openai_logprobs import bytes_of, logprob_entries
from app.openai_replies import Event, Heading, bare_id, encode, finish_reason, total_usage
from app.openai_response_requests import ResponsePlan
from app.openai_tools import CallPart, Parts
from app.openai_types import Usage
from app.serving import Stream
from protocol.errors import RateLimited, ServingError
from protocol.token_log import TokenDelta, TokenLog

Json = dict[str, Any]


class ResponseWriter:
    """Writes the replies of /v1/responses.

    Args:
        lane: the `stream_id` that every event on a WebSocket repeats.
    """

    last_line = b""

    def __init__(self, heading: Heading, plan: ResponsePlan, *, lane: str | None = None) -> None:
        self._heading = heading
        self._shown = plan.shown
        self._reader = plan.plan.tools.reader()
        self._lane = {} if lane is None else {"stream_id": lane}
        self._number = 0
        self._open: Json | None = None
        self.output: list[Json] = []
        """The items so far, as the client has them."""

    def begin(self, streams: Sequence[Stream]) -> None:
        pass

    def rename(self, reply_id: str) -> None:
        raise AssertionError("a response is not resumed")

    def whole(self, logs: Sequence[TokenLog], usage: Usage) -> bytes:
        (log,) = logs
        for delta in log.deltas:
            self.piece(0, delta)
        self._end_items(log)
        return encode(self._final(log))

    def opening(self, index: int) -> list[Event]:
        response = self._response("in_progress")
        return [
            self._event("response.created", response=response),
            self._event("response.in_progress", response=response),
        ]

    def piece(self, index: int, delta: TokenDelta) -> list[Event]:
        return self._add(self._reader.feed(delta.text), _logprobs(delta))

    def closing(self, index: int, log: TokenLog) -> list[Event]:
        events = self._end_items(log)
        final = self._final(log)
        return [*events, self._event(f"response.{final['status']}", response=final)]

    def usage(self, usage: Usage) -> list[Event]:
        return []

    def failure(self, error: ServingError) -> list[Event]:
        told = error_reply(error).error
        code = "rate_limit_exceeded" if isinstance(error, RateLimited) else "server_error"
        failed = self._response("failed") | {"error": {"code": code, "message": told.message}}
        return [
            self._event("response.failed", response=failed),
            self._event(
                "error",
                error={
                    "message": told.message,
                    "type": told.type,
                    "param": told.param,
                    "code": told.code,
                },
                code=told.code,
                message=told.message,
                param=told.param,
            ),
        ]

    def prepared(self) -> list[Event]:
        """All events of a response that was not to be generated."""
        done = self._response("completed")
        return [*self.opening(0), self._event("response.completed", response=done)]

    def _add(self, parts: Parts, logprobs: list[Json]) -> list[Event]:
        events: list[Event] = []
        if parts.text or (logprobs and not parts.calls):
            events += self._add_text(parts.text, logprobs)
        for part in parts.calls:
            events += self._add_call(part)
        return events

    def _add_text(self, text: str, logprobs: list[Json]) -> list[Event]:
        events: list[Event] = []
        if self._open is None or self._open["type"] != "message":
            events = [*self._close(), *self._open_message()]
        assert self._open is not None
        part = self._open["content"][0]
        part["text"] += text
        part["logprobs"] += logprobs
        delta = self._event(
            "response.output_text.delta",
            **self._place(),
            content_index=0,
            delta=text,
            logprobs=logprobs,
        )
        return [*events, delta]

    def _add_call(self, part: CallPart) -> list[Event]:
        events: list[Event] = []
        if part.name is not None:
            events = [*self._close(), *self._open_call(part)]
        assert self._open is not None
        if part.arguments:
            self._open["arguments"] += part.arguments
            events.append(
                self._event(
                    "response.function_call_arguments.delta",
                    **self._place(),
                    delta=part.arguments,
                )
            )
        return events

    def _open_message(self) -> list[Event]:
        self._open = {
            "id": self._item_id("msg"),
            "type": "message",
            "role": "assistant",
            "status": "in_progress",
            "content": [],
        }
        added = self._event("response.output_item.added", **self._index(), item=self._open)
        part: Json = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        self._open["content"] = [part]
        begun = self._event(
            "response.content_part.added", **self._place(), content_index=0, part=part
        )
        return [added, begun]

    def _open_call(self, part: CallPart) -> list[Event]:
        self._open = {
            "id": self._item_id("fc"),
            "type": "function_call",
            "status": "in_progress",
            "call_id": call_id(self._heading.id, 0, part.index),
            "name": part.name,
            "arguments": "",
        }
        return [self._event("response.output_item.added", **self._index(), item=self._open)]

    def _close(self, status: str = "completed") -> list[Event]:
        """Ends the open item, if there is one."""
        item = self._open
        if item is None:
            return []
        item["status"] = status
        events: list[Event] = []
        if item["type"] == "message":
            part = item["content"][0]
            place = {**self._place(), "content_index": 0}
            events = [
                self._event(
                    "response.output_text.done",
                    **place,
                    text=part["text"],
                    logprobs=part["logprobs"],
                ),
                self._event("response.content_part.done", **place, part=part),
            ]
        else:
            events = [
                self._event(
                    "response.function_call_arguments.done",
                    **self._place(),
                    name=item["name"],
                    arguments=item["arguments"],
                )
            ]
        events.append(self._event("response.output_item.done", **self._index(), item=item))
        self.output.append(item)
        self._open = None
        return events

    def _end_items(self, log: TokenLog) -> list[Event]:
        events = self._add(self._reader.end(), [])
        if self._open is None and not self.output:
            events += self._open_message()
        is_cut = finish_reason(log) == "length"
        return [*events, *self._close("incomplete" if is_cut else "completed")]

    def _final(self, log: TokenLog) -> Json:
        is_cut = finish_reason(log) == "length"
        response = self._response("incomplete" if is_cut else "completed")
        if is_cut:
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        response["usage"] = _usage(total_usage([log], n=1))
        return response

    def _response(self, status: str) -> Json:
        heading = self._heading
        return {
            "id": heading.id,
            "object": "response",
            "created_at": heading.created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "model": heading.model,
            "output": self.output,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "truncation": "disabled",
            "usage": None,
            "user": None,
            **self._shown,
        }

    def _item_id(self, kind: str) -> str:
        return f"{kind}_{bare_id(self._heading.id)}_{len(self.output)}"

    def _index(self) -> Json:
        return {"output_index": len(self.output)}

    def _place(self) -> Json:
        assert self._open is not None
        return {"item_id": self._open["id"], **self._index()}

    def _event(self, kind: str, /, **fields: Any) -> Event:
        """The next event. Encoded at once: what it shows may still grow."""
        data = {"type": kind, "sequence_number": self._number, **fields, **self._lane}
        self._number += 1
        return Event(encode(data), kind)


def _usage(usage: Usage) -> Json:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": usage.prompt_tokens_details.cached_tokens,
            "cache_write_tokens": 0,
        },
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.total_tokens,
    }


def _logprobs(delta: TokenDelta) -> list[Json]:
    return [
        {
            "token": entry.token,
            "logprob": entry.logprob,
            "bytes": bytes_of(entry.token) or [],
            "top_logprobs": [
                {"token": token, "logprob": logprob, "bytes": bytes_of(token) or []}
                for _, token, logprob in entry.top
            ],
        }
        for entry in logprob_entries([delta]) or ()
    ]
