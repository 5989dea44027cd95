"""What crosses between deployments comes out as it went in, from newer replicas too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from deployments import wire
from protocol.errors import Overloaded
from protocol.request import InferenceRequest, Message, SamplingParams
from protocol.token_log import CacheOutcome, Terminal, Timing, TokenDelta, TokenLogprob, Usage

REQUEST = InferenceRequest(
    request_id="r",
    tenant="team:eu/1",
    model="m",
    messages=(
        Message(role="user", content="héllo 🙂 \0"),
        Message(role="assistant", tool_calls=[{"id": "c", "function": {"name": "f"}}]),
    ),
    sampling=SamplingParams(
        seed=-(2**63), logit_bias={5: -1.5}, stop=("a", "b"), stop_token_ids=(1, 2), logprobs=3
    ),
    tools=[{"a": [1, 2.5, None, True, {"b": "c"}]}],
    response_format={"type": "json_object"},
    timeout_s=2.5,
)
DELTA = TokenDelta(
    3, "🙂", (1, 2), (TokenLogprob(1, "🙂", -0.5, ((1, "🙂", -0.5), (2, "x", -1.5))),)
)
TERMINAL = Terminal(
    finish_reason="error",
    usage=Usage(prompt_tokens=1, completion_tokens=2, cached_tokens=1),
    timing=Timing(queue_ms=1.5, ttft_ms=2.5, total_ms=3.5),
    error=Overloaded("full", limit=4, retry_after_s=1.0).info,
)
ACCEPTED = wire.Accepted(revision="rev", prompt_tokens=5, queue_position=0)
MESSAGE = wire.BusMessage(
    (wire.Part("s", (DELTA,)), wire.Part("t", (), TERMINAL)), wire.Load(2, 1, 500, 0.5)
)
CASES: list[tuple[msgspec.Struct, Callable[[bytes], Any]]] = [
    (
        wire.Submit(request=REQUEST, ingress="i", answered=(DELTA,)),
        wire.decode_submit,
    ),
    (
        wire.Submit(
            request=InferenceRequest(request_id="r", tenant="t", model="m", prompt=(1, 2)),
            ingress="i",
        ),
        wire.decode_submit,
    ),
    (REQUEST, wire.decode_request),
    (wire.SubmitReply(replica="m1", accepted=ACCEPTED), wire.decode_submit_reply),
    (wire.SubmitReply(replica="m1", refused=TERMINAL.error), wire.decode_submit_reply),
    (
        wire.Attached(
            submit=wire.Submit(request=REQUEST, ingress="i"),
            accepted=ACCEPTED,
            deltas=(DELTA,),
            terminal=TERMINAL,
        ),
        wire.decode_attached,
    ),
    (
        wire.ModelInfo(id="a/b", revision="r", context_length=1, created=2, backend="mock"),
        wire.decode_info,
    ),
    (wire.StoredStream(deltas=(DELTA,), terminal=TERMINAL), wire.decode_stored),
    (
        wire.LookupReply(outcome=CacheOutcome(outcome="semantic", similarity=0.97, age_s=1.5)),
        wire.decode_lookup_reply,
    ),
    (
        wire.LookupReply(outcome=CacheOutcome(outcome="exact"), stored=b"\0\xff"),
        wire.decode_lookup_reply,
    ),
    (wire.LookupCall(request=REQUEST, model_revision="r"), wire.decode_lookup_call),
    (
        wire.StoreCall(request=REQUEST, model_revision="r", completion_tokens=0, stored=b""),
        wire.decode_store_call,
    ),
]
IDS = [f"{type(record).__name__}-{i}" for i, (record, _) in enumerate(CASES)]


@pytest.mark.parametrize(("record", "decode"), CASES, ids=IDS)
def test_a_record_comes_out_as_it_went_in(
    record: msgspec.Struct, decode: Callable[[bytes], Any]
) -> None:
    assert decode(wire.encode(record)) == record


@pytest.mark.parametrize(("record", "decode"), CASES, ids=IDS)
def test_a_field_that_a_newer_replica_added_is_passed_over(
    record: msgspec.Struct, decode: Callable[[bytes], Any]
) -> None:
    fields = msgspec.msgpack.decode(wire.encode(record))
    assert decode(msgspec.msgpack.encode(fields | {"added_later": [1]})) == record


@pytest.mark.parametrize("raw", [b"", b"\xc1", b"\x90", b"\x05", b"\x81\xa1x"])
def test_rubbish_is_a_decode_error(raw: bytes) -> None:
    for decode in {decode for _, decode in CASES}:
        with pytest.raises(msgspec.DecodeError):
            decode(raw)


def test_a_bus_message_comes_out_as_it_went_in_and_from_a_newer_replica_too() -> None:
    assert wire.decode_bus_message(wire.encode(MESSAGE)) == MESSAGE
    assert wire.decode_bus_message(wire.encode(wire.BusMessage())) == wire.BusMessage()
    parts, load = msgspec.msgpack.decode(wire.encode(MESSAGE))
    newer = [parts, [*load, "added later"], "added later"]
    assert wire.decode_bus_message(msgspec.msgpack.encode(newer)) == MESSAGE
