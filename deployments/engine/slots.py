"""Who sits in which KV slot, and which computed prefixes the free slots still hold.

Pure bookkeeping over token ids: knows nothing of tensors or models. A prefix is kept and
matched in whole blocks of `block_tokens` and within one tenant only. What was computed ahead of
requests (warm-ups) and that none has used yet holds at most half of the slots.
"""

from __future__ import annotations

from dataclasses import dataclass

from deployments.engine.sequence import Sequence


@dataclass(frozen=True)
class Placement:
    """A sequence's slot, how many of its first tokens are computed, and where they lie.

    `source` differs from `slot` when they have to be copied first.
    """

    slot: int
    num_tokens: int
    source: int


@dataclass(frozen=True)
class _Kept:
    tenant: str
    token_ids: list[int]
    is_warm_up: bool


class Slots:
    """A slot belongs to a sequence from `place` to `free`, and may remember its prompt after that."""

    def __init__(self, num_slots: int, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._max_warm_ups = max(1, num_slots // 2)
        # Sorted downwards: the lowest is taken first, so that used slots stay together in front.
        self._empty = list(range(num_slots - 1, -1, -1))
        # Free slots that hold a prefix, the least recently used first.
        self._kept: dict[int, _Kept] = {}
        self._slot_of: dict[Sequence, int] = {}

    @property
    def num_used(self) -> int:
        return len(self._slot_of)

    def find(self, seq: Sequence) -> int | None:
        return self._slot_of.get(seq)

    def place(self, seq: Sequence) -> Placement:
        """Gives a sequence a slot: the one whose kept prefix fits best, else the least useful one.

        Where a prefix is far longer than what the newcomer shares with it, or is still being
        used, the shared part is to be copied, and the prefix stays.
        """
        assert seq not in self._slot_of, "a sequence is placed once"
        # The last token is always computed: its logits are wanted.
        limit = min(len(seq.prompt_token_ids), seq.num_tokens - 1)
        source, num_tokens = self._best_match(seq, self._whole_blocks(limit))
        if source is None:
            slot = source = self._take(seq)
        elif source in self._kept and self._is_taken_over(source, num_tokens):
            del self._kept[source]
            slot = source
        else:
            if source in self._kept:
                self._kept[source] = self._kept.pop(source)
            slot = self._take(seq)
        self._slot_of[seq] = slot
        return Placement(slot, num_tokens, source)

    def holds(self, seq: Sequence) -> bool:
        """Whether some slot holds all whole blocks of a prompt; a prefix that does is used by that."""
        num_wanted = self._whole_blocks(len(seq.prompt_token_ids))
        slot, num_held = self._best_match(seq, num_wanted)
        if num_held < num_wanted:
            return False
        if slot in self._kept:
            self._kept[slot] = self._kept.pop(slot)
        return True

    def free(self, seq: Sequence, *, keep: bool) -> None:
        """Takes the slot back; harmless when the sequence has none.

        Args:
            keep: remember what was computed of the prompt. The answer is not kept: it was
                computed a token at a time, and as part of a prompt it would be computed in
                blocks, which rounds differently.
        """
        slot = self._slot_of.pop(seq, None)
        if slot is None:
            return
        num_kept = self._whole_blocks(_num_computed_prompt_tokens(seq)) if keep else 0
        if num_kept:
            self._kept[slot] = _Kept(seq.tenant, seq.prompt_token_ids[:num_kept], seq.is_warm_up)
        else:
            self._empty.append(slot)
            self._empty.sort(reverse=True)

    def _best_match(self, seq: Sequence, limit: int) -> tuple[int | None, int]:
        """The slot with the longest usable prefix, and its length; a free slot wins a tie."""
        best: int | None = None
        longest = 0
        for slot, kept in self._kept.items():
            if kept.tenant == seq.tenant:
                shared = self._shared(seq.prompt_token_ids, kept.token_ids, limit)
                if shared > longest:
                    best, longest = slot, shared
        for other, slot in self._slot_of.items():
            if other.tenant == seq.tenant:
                computed = min(limit, self._whole_blocks(_num_computed_prompt_tokens(other)))
                if computed > longest:
                    shared = self._shared(seq.prompt_token_ids, other.prompt_token_ids, computed)
                    if shared > longest:
                        best, longest = slot, shared
        return best, longest

    def _shared(self, wanted: list[int], held: list[int], limit: int) -> int:
        limit = min(limit, self._whole_blocks(len(held)))
        step = self._block_tokens
        shared = 0
        while shared < limit and wanted[shared : shared + step] == held[shared : shared + step]:
            shared += step
        return shared

    def _is_taken_over(self, slot: int, num_tokens: int) -> bool:
        is_only_one = not self._empty and len(self._kept) == 1
        return is_only_one or 2 * num_tokens >= len(self._kept[slot].token_ids)

    def _take(self, seq: Sequence) -> int:
        assert self._empty or self._kept, "the scheduler runs at most max_num_seqs sequences"
        slot = self._oldest_warm_up() if seq.is_warm_up else None
        if slot is None:
            if self._empty:
                return self._empty.pop()
            slot = next(iter(self._kept))
        del self._kept[slot]
        return slot

    def _oldest_warm_up(self) -> int | None:
        """The slot that a new warm-up has to take where warm-ups hold all that they may."""
        kept = [slot for slot, kept in self._kept.items() if kept.is_warm_up]
        num_held = len(kept) + sum(seq.is_warm_up for seq in self._slot_of)
        return kept[0] if kept and num_held >= self._max_warm_ups else None

    def _whole_blocks(self, num_tokens: int) -> int:
        return num_tokens // self._block_tokens * self._block_tokens


def _num_computed_prompt_tokens(seq: Sequence) -> int:
    return min(seq.num_computed_tokens, len(seq.prompt_token_ids))
