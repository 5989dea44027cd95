"""From sampled tokens to the deltas of one answer: text, stop strings, log probabilities."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from deployments.engine.sampler import SampledToken
from deployments.engine.sequence import Sequence
from deployments.engine.stop import StopStrings
from deployments.engine.tokenizer import ChatTokenizer
from protocol.token_log import FinishReason, TokenDelta, TokenLogprob


@dataclass
class _PendingToken:
    """A token that no delta has carried yet. `text_start`: where its text begins in the answer."""

    token_id: int
    logprob: TokenLogprob | None
    text_start: int


class AnswerText:
    """The text side of one running sequence.

    A delta carries the text that can no longer change and all tokens since the delta before.
    Text is held back only while it is half a character or may still become a stop string.
    """

    def __init__(self, seq: Sequence, tokenizer: ChatTokenizer) -> None:
        self._seq = seq
        self._tokenizer = tokenizer
        self._detokenizer = tokenizer.detokenizer()
        self._stop = StopStrings(seq.sampling.stop)
        self._pending: list[_PendingToken] = []
        self._num_decoded_chars = 0
        self._num_emitted_chars = 0

    def push(self, sampled: SampledToken) -> tuple[TokenDelta | None, FinishReason | None]:
        """Takes the token that was just appended to the sequence.

        Returns:
            The next delta, if there is new text, and the reason if this token ends the answer;
            the delta then is the last one.
        """
        if self._ends_by_token(sampled.token_id):
            return self.finish(), "stop"
        self._pending.append(
            _PendingToken(sampled.token_id, self._logprob(sampled), self._num_decoded_chars)
        )
        text, is_stopped = self._search(self._detokenizer.push(sampled.token_id))
        if is_stopped:
            return self._cut(text), "stop"
        reason = self._other_end()
        if reason is None:
            return (self._delta(text) if text else None), None
        rest, is_stopped = self._rest()
        if is_stopped:
            return self._cut(text + rest), "stop"
        return self._last_delta(text + rest), reason

    def finish(self) -> TokenDelta | None:
        """The text still held and the tokens no delta has carried, once no more can follow.

        Call it once, after a token that was not pushed or in the place of one.
        """
        text, is_stopped = self._rest()
        return self._cut(text) if is_stopped else self._last_delta(text)

    def _ends_by_token(self, token_id: int) -> bool:
        sampling = self._seq.sampling
        if len(self._seq.output_token_ids) <= sampling.min_tokens:
            return False
        is_eos = token_id in self._seq.eos_token_ids and not sampling.ignore_eos
        return is_eos or token_id in sampling.stop_token_ids

    def _other_end(self) -> FinishReason | None:
        if self._seq.grammar is not None and self._seq.grammar.is_finished:
            return "stop"
        if len(self._seq.output_token_ids) >= self._seq.max_tokens:
            return "length"
        return None

    def _search(self, text: str) -> tuple[str, bool]:
        """Text safe to emit, and whether a stop string was found; none is before `min_tokens`."""
        self._num_decoded_chars += len(text)
        if len(self._seq.output_token_ids) <= self._seq.sampling.min_tokens:
            return text, False
        return self._stop.push(text)

    def _rest(self) -> tuple[str, bool]:
        text, is_stopped = self._search(self._detokenizer.flush())
        return (text, True) if is_stopped else (text + self._stop.flush(), self._stop.matched)

    def _delta(self, text: str) -> TokenDelta:
        tokens, self._pending = self._pending, []
        self._num_emitted_chars += len(text)
        logprobs = None
        if self._seq.sampling.logprobs is not None:
            logprobs = tuple(token.logprob for token in tokens if token.logprob is not None)
        return TokenDelta(
            seq=len(self._seq.output_token_ids) - 1,
            text=text,
            token_ids=tuple(token.token_id for token in tokens),
            logprobs=logprobs,
        )

    def _last_delta(self, text: str) -> TokenDelta | None:
        return self._delta(text) if text or self._pending else None

    def _cut(self, text: str) -> TokenDelta | None:
        """The last delta before a stop string, without the tokens that lie behind the cut."""
        end = self._num_emitted_chars + len(text)
        self._pending = [token for token in self._pending if token.text_start < end]
        return self._last_delta(text)

    def _logprob(self, sampled: SampledToken) -> TokenLogprob | None:
        found = sampled.logprobs
        if found is None:
            return None
        text = self._tokenizer.token_text
        return TokenLogprob(
            sampled.token_id,
            text(sampled.token_id),
            found.logprob,
            tuple((token_id, text(token_id), logprob) for token_id, logprob in found.top),
        )


def replay(seq: Sequence, token_ids: SequenceOf[int], tokenizer: ChatTokenizer) -> None:
    """Puts a fresh sequence to where it stood after the last delta that `token_ids` completes.

    Sets the sequence's `output_token_ids`, its `answer`, its grammar, and `finish_reason` when
    the tokens end the answer; tokens behind the end, or behind the last delta, are dropped.

    Raises:
        InternalError: the grammar does not allow a token.
    """
    num_delivered = _push_all(seq, token_ids, tokenizer)
    num_dropped = len(seq.output_token_ids) - num_delivered
    if num_dropped and seq.finish_reason is None:
        if seq.grammar is not None:
            seq.grammar.rewind()
        _push_all(seq, token_ids[:num_delivered], tokenizer)


def _push_all(seq: Sequence, token_ids: SequenceOf[int], tokenizer: ChatTokenizer) -> int:
    """Answers with given tokens from the start; returns how many of them deltas have carried."""
    seq.output_token_ids.clear()
    seq.answer = AnswerText(seq, tokenizer)
    num_delivered = 0
    for token_id in token_ids:
        seq.output_token_ids.append(token_id)
        if seq.grammar is not None:
            seq.grammar.accept(token_id)
        delta, seq.finish_reason = seq.answer.push(SampledToken(token_id))
        if delta is not None:
            num_delivered = len(seq.output_token_ids)
        if seq.finish_reason is not None:
            break
    return num_delivered
