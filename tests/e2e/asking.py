"""Ways to ask the real server: over each transport, with the answer and how the cache marked it."""

from __future__ import annotations

import hashlib
import itertools
import json
import time
from dataclasses import dataclass
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from app.client import SeedanceClient
from tests.e2e.cluster import KEY_A, Server

GREEDY: dict[str, Any] = {"temperature": 0}


@dataclass(frozen=True)
class Answer:
    text: str
    mark: str
    finish_reason: str
    completion_tokens: int
    prompt_tokens: int


class Asker:
    """Asks one server, as one tenant."""

    def __init__(self, server: Server, key: str | None = KEY_A) -> None:
        self.server = server
        self.key = key
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        self.http = httpx.Client(base_url=server.url, headers=headers, timeout=120)

    def close(self) -> None:
        self.http.close()

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.http.post(path, json=body)

    def plain(self, question: str | list[dict[str, Any]], **fields: Any) -> Answer:
        """A chat answered whole, greedy unless told otherwise."""
        body = {**GREEDY, "messages": as_messages(question), **fields}
        return read_whole(self.post("/v1/chat/completions", **body))

    def completion(self, prompt: str, **fields: Any) -> Answer:
        """A prompt continued, answered whole."""
        return read_whole(self.post("/v1/completions", **{**GREEDY, "prompt": prompt, **fields}))

    def sse(self, question: str | list[dict[str, Any]], **fields: Any) -> Answer:
        body = {**GREEDY, "messages": as_messages(question), **fields}
        return self._events("/v1/chat/completions", body)

    def sse_completion(self, prompt: str, **fields: Any) -> Answer:
        return self._events("/v1/completions", {**GREEDY, "prompt": prompt, **fields})

    async def ws(self, question: str | list[dict[str, Any]] | None = None, **fields: Any) -> Answer:
        async with SeedanceClient(self.server.url, self.key) as client:
            messages = None if question is None else as_messages(question)
            done = await client.complete(messages, **{**GREEDY, **fields})
            return Answer(
                done.text,
                done.cache.outcome,
                done.finish_reason,
                done.usage.completion_tokens,
                done.usage.prompt_tokens,
            )

    def truth(self, question: str | list[dict[str, Any]], **fields: Any) -> str:
        """What the model itself says."""
        return self.plain(question, cache="bypass", **fields).text

    def metrics(self) -> dict[str, float]:
        """Every sample of /metrics by its name, with its first label's value after a colon."""
        samples: dict[str, float] = {}
        for family in text_string_to_metric_families(self.http.get("/metrics").text):
            for sample in family.samples:
                label = next(iter(sample.labels.values()), "")
                samples[f"{sample.name}:{label}" if label else sample.name] = sample.value
        return samples

    def wait_until_idle(self, timeout_s: float = 30) -> None:
        """Waits until no request runs or waits.

        Raises:
            AssertionError: one still does.
        """
        deadline_s = time.monotonic() + timeout_s
        while True:
            metrics = self.metrics()
            busy = metrics["seedance_requests_running"] + metrics["seedance_requests_waiting"]
            if busy == 0:
                return
            assert time.monotonic() < deadline_s, f"{busy} requests still run"
            time.sleep(0.1)

    def _events(self, path: str, body: dict[str, Any]) -> Answer:
        pieces: list[str] = []
        finish_reasons: list[str] = []
        usage: dict[str, Any] = {}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        with self.http.stream("POST", path, json=body) as reply:
            assert reply.status_code == 200, reply.read()
            assert reply.headers["content-type"].startswith("text/event-stream")
            lines = [line for line in reply.iter_lines() if line and not line.startswith(":")]
        assert lines[-1] == "data: [DONE]"
        for line in lines[:-1]:
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event, event
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                delta = choice["delta"].get("content") if "delta" in choice else choice["text"]
                pieces.append(delta or "")
                if choice["finish_reason"] is not None:
                    finish_reasons.append(choice["finish_reason"])
        assert len(finish_reasons) == 1
        return Answer(
            "".join(pieces),
            mark_of(reply),
            finish_reasons[0],
            usage["completion_tokens"],
            usage["prompt_tokens"],
        )


def read_whole(reply: httpx.Response) -> Answer:
    assert reply.status_code == 200, reply.text
    body = reply.json()
    choice = body["choices"][0]
    text = choice["message"]["content"] if "message" in choice else choice["text"]
    return Answer(
        text,
        mark_of(reply),
        choice["finish_reason"],
        body["usage"]["completion_tokens"],
        body["usage"]["prompt_tokens"],
    )


def as_messages(question: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": question}] if isinstance(question, str) else question


def mark_of(reply: httpx.Response) -> str:
    """What the cache decided: miss, exact, semantic or coalesced."""
    return reply.headers["x-seedance-cache"].partition(";")[0]


_nonces = itertools.count()


def nonce() -> str:
    """A word that no other test of this run uses, so that no earlier answer can be hit.

    Every run gets the same words, so that the model's answers do not depend on chance.
    """
    return hashlib.sha256(b"%d" % next(_nonces)).hexdigest()[:8]
