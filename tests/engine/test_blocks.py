"""Which blocks a sequence gets, what it finds in them, and that none is ever lost or given twice."""

from __future__ import annotations

import random
from collections.abc import Sequence as SequenceOf
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from deployments.engine.blocks import BlockPool
from deployments.engine.sequence import Sequence
from tests.engine.fakes import sequence


def pool_of(
    num_blocks: int, *, keeps_answers: bool = True, max_kept: int | None = None
) -> BlockPool:
    return BlockPool(num_blocks, 4, keeps_answers=keeps_answers, max_kept=max_kept)


def prompt(token_ids: SequenceOf[int], tenant: str = "t", *, ahead: bool = False) -> Sequence:
    seq = sequence(list(token_ids))
    seq.tenant = tenant
    seq.is_warm_up = ahead
    return seq


def run(pool: BlockPool, seq: Sequence) -> int:
    """Places a sequence and computes all it has; tells what it found."""
    found = pool.place(seq)
    assert pool.reserve(seq, seq.num_tokens)
    seq.num_computed_tokens = seq.num_tokens
    return found


def visit(
    pool: BlockPool, token_ids: SequenceOf[int], tenant: str = "t", *, ahead: bool = False
) -> int:
    seq = prompt(token_ids, tenant, ahead=ahead)
    found = run(pool, seq)
    pool.free(seq, keep=True)
    return found


def holds(pool: BlockPool, token_ids: SequenceOf[int], tenant: str = "t") -> bool:
    return pool.holds(prompt(token_ids, tenant))


# What is found


def test_a_longer_prompt_computes_only_the_rest() -> None:
    pool = pool_of(8)
    assert visit(pool, range(10)) == 0
    assert visit(pool, range(20)) == 8


def test_the_last_token_of_a_prompt_is_always_computed() -> None:
    pool = pool_of(8)
    visit(pool, range(8))
    assert visit(pool, range(8)) == 4
    assert visit(pool, range(9)) == 8


def test_only_whole_blocks_are_matched() -> None:
    pool = pool_of(8)
    visit(pool, range(16))
    assert visit(pool, [*range(7), 99, 98, 97]) == 4


def test_a_block_is_found_only_behind_the_same_beginning() -> None:
    pool = pool_of(8)
    visit(pool, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert visit(pool, [5, 6, 7, 8, 1, 2, 3, 4, 9]) == 0


def test_prefixes_that_part_share_what_they_have_in_common() -> None:
    pool = pool_of(12)
    visit(pool, [1] * 4 + [2] * 5)
    assert visit(pool, [1] * 4 + [3] * 5) == 4
    assert visit(pool, [1] * 4 + [2] * 5) == 8
    assert visit(pool, [1] * 4 + [3] * 5) == 8
    assert pool.num_kept == 3


def test_what_another_tenant_computed_is_not_found() -> None:
    pool = pool_of(12)
    visit(pool, range(12), "a")
    stays = prompt(range(12), "a")
    run(pool, stays)
    assert visit(pool, range(12), "b") == 0
    assert not holds(pool, range(12), "c")


def test_blocks_of_a_running_neighbour_are_shared_as_far_as_they_are_computed() -> None:
    pool = pool_of(12)
    half_way, newcomer = prompt(range(20)), prompt(range(30))
    pool.place(half_way)
    assert pool.reserve(half_way, 20)
    half_way.num_computed_tokens = 10
    assert pool.place(newcomer) == 8
    assert pool.blocks(newcomer) == pool.blocks(half_way)[:2]
    assert pool.num_used == 5
    pool.free(half_way, keep=True)
    assert pool.num_used == 2, "those that the newcomer holds"
    pool.free(newcomer, keep=True)
    assert (pool.num_used, pool.num_free) == (0, 12)


def test_an_unsound_sequence_leaves_nothing_but_what_others_had_computed() -> None:
    pool = pool_of(12)
    visit(pool, range(8))
    seq = prompt(range(16))
    assert run(pool, seq) == 8
    assert len(pool.free(seq, keep=False)) == 2
    assert visit(pool, range(17)) == 8


def test_what_an_unsound_sequence_shared_is_not_found_any_more() -> None:
    pool = pool_of(12)
    bad, heir = prompt(range(8)), prompt(range(9))
    run(pool, bad)
    assert run(pool, heir) == 8
    assert pool.free(bad, keep=False) == [], "the heir holds them"
    assert not holds(pool, range(8))
    pool.free(heir, keep=True)
    assert holds(pool, range(8)), "the heir has shown that they are sound"


def test_only_what_was_computed_is_found() -> None:
    pool = pool_of(4)
    seq = prompt(range(12))
    pool.place(seq)
    assert pool.reserve(seq, 12)
    seq.num_computed_tokens = 6
    pool.free(seq, keep=True)
    assert visit(pool, range(12)) == 4


@pytest.mark.parametrize("keeps_answers", [True, False])
def test_answers_are_found_where_they_are_computed_as_prompts_are(keeps_answers: bool) -> None:
    pool = pool_of(8, keeps_answers=keeps_answers)
    seq = prompt(range(4))
    run(pool, seq)
    seq.output_token_ids = [4, 5, 6, 7, 8]
    assert pool.reserve(seq, 9)
    seq.num_computed_tokens = 8
    pool.free(seq, keep=True)
    assert visit(pool, range(13)) == (8 if keeps_answers else 4)


def test_a_draft_that_was_wrong_is_not_found() -> None:
    pool = pool_of(8)
    seq = prompt(range(6))
    run(pool, seq)
    assert pool.reserve(seq, 10), "of the row's end, drafts included"
    seq.output_token_ids = [99]
    pool.free(seq, keep=True)
    assert visit(pool, range(12)) == 4


def test_one_that_goes_on_finds_its_own_answer() -> None:
    pool = pool_of(8)
    seq = prompt(range(4))
    run(pool, seq)
    seq.output_token_ids = [4, 5, 6, 7, 8]
    assert pool.reserve(seq, 9)
    seq.num_computed_tokens = 8
    pool.free(seq, keep=True)
    seq.num_computed_tokens = 0
    assert pool.place(seq) == 8


def test_a_prompt_is_held_when_all_its_blocks_are_computed() -> None:
    pool = pool_of(12)
    visit(pool, range(10))
    run(pool, prompt(range(50, 60)))
    assert holds(pool, range(8))
    assert holds(pool, [*range(8), 99]), "the rest of a block is nobody's"
    assert holds(pool, range(50, 58)), "running ones count"
    assert not holds(pool, range(12))
    assert not holds(pool, [*range(4), 99, 98, 97, 96])
    assert not holds(pool, range(8), "u")


# What goes first


def test_the_least_recently_used_goes_first() -> None:
    pool = pool_of(6)
    visit(pool, range(8))
    visit(pool, range(50, 58))
    visit(pool, range(9))
    visit(pool, range(80, 92))
    assert holds(pool, range(8))
    assert not holds(pool, range(50, 58))


def test_of_one_chain_the_tail_goes_before_its_head() -> None:
    pool = pool_of(4)
    visit(pool, range(16))
    visit(pool, range(50, 58))
    assert holds(pool, range(8))
    assert not holds(pool, range(12))


def test_a_prefix_that_is_asked_for_is_not_the_next_to_go() -> None:
    pool = pool_of(4)
    visit(pool, range(8))
    visit(pool, range(50, 58))
    assert holds(pool, range(8))
    visit(pool, range(80, 88))
    assert holds(pool, range(8))
    assert not holds(pool, range(50, 58))


def test_a_block_stays_for_those_behind_it_that_another_computed_twice() -> None:
    pool = pool_of(6)
    first, second = prompt(range(8)), prompt(range(12))
    for seq in (first, second):  # at the same time: neither finds the other's
        pool.place(seq)
        assert pool.reserve(seq, seq.num_tokens)
    for seq in (first, second):
        seq.num_computed_tokens = seq.num_tokens
        pool.free(seq, keep=True)
    visit(pool, range(80, 92))
    assert visit(pool, range(13)) >= 8, "the head that is found is the one of `first`"


def test_blocks_that_are_in_use_never_go() -> None:
    pool = pool_of(4)
    stays = prompt(range(8))
    run(pool, stays)
    newcomer = prompt(range(50, 62))
    pool.place(newcomer)
    assert not pool.reserve(newcomer, 12)
    assert pool.blocks(newcomer) == []
    assert pool.reserve(newcomer, 8)
    assert pool.num_free == 0


def test_memory_that_was_never_touched_is_left_alone_while_enough_is_kept() -> None:
    pool = pool_of(1000, max_kept=8)
    touched: set[int] = set()
    for start in range(0, 4000, 10):
        seq = prompt(range(start, start + 10))
        run(pool, seq)
        touched.update(pool.blocks(seq))
        pool.free(seq, keep=True)
    assert len(touched) < 8 + 2 * 3
    assert pool.num_kept >= 8


# Prompts computed ahead


def test_what_was_computed_ahead_and_not_used_holds_half_of_the_blocks_at_most() -> None:
    pool = pool_of(8)
    visit(pool, range(9))
    for start in (100, 200, 300, 400):
        visit(pool, range(start, start + 8), ahead=True)
    assert [holds(pool, range(i, i + 8)) for i in (0, 100, 200, 300, 400)] == [
        True, False, False, True, True,
    ]  # fmt: skip
    assert pool.num_used == 0


def test_what_a_request_has_used_is_its_own_from_then_on() -> None:
    pool = pool_of(20)
    for start in (100, 200):
        visit(pool, range(start, start + 9), ahead=True)
        assert visit(pool, range(start, start + 12)) == 8
    for start in (300, 400, 500):
        visit(pool, range(start, start + 16), ahead=True)
    assert all(holds(pool, range(i, i + 8)) for i in (100, 200))
    assert [holds(pool, range(i, i + 16)) for i in (300, 400, 500)] == [False, True, True]


def test_computing_ahead_stops_at_half_of_the_blocks() -> None:
    pool = pool_of(8)
    seq = prompt(range(40), ahead=True)
    pool.place(seq)
    assert pool.reserve(seq, 16)
    assert not pool.reserve(seq, 20)
    assert len(pool.blocks(seq)) == 4


# Where blocks lie


def is_run(blocks: list[int]) -> bool:
    return blocks == list(range(blocks[0], blocks[0] + len(blocks)))


def test_sequences_that_grow_side_by_side_keep_adjacent_blocks() -> None:
    pool = BlockPool(256, 4, keeps_answers=True, extent=16)
    seqs = [prompt(range(start, start + 10)) for start in range(0, 400, 100)]
    for seq in seqs:
        run(pool, seq)
    for end in range(11, 33):
        for seq in seqs:
            assert pool.reserve(seq, end)
    assert all(is_run(pool.blocks(seq)) for seq in seqs)


def test_most_sequences_find_adjacent_blocks_where_all_memory_holds_prefixes() -> None:
    rng = random.Random(1)
    pool = BlockPool(1024, 4, keeps_answers=True, extent=16)
    live: list[tuple[Sequence, int]] = []
    runs = []
    for number in range(600):
        seq = prompt([number, *range(rng.randrange(8, 80))])
        run(pool, seq)
        live.append((seq, seq.num_tokens + rng.randrange(4, 40)))
        while len(live) == 8:
            for other, end in list(live):
                assert pool.reserve(other, other.num_tokens + 1)
                other.output_token_ids.append(1)
                if other.num_tokens == end:
                    runs.append(is_run(pool.blocks(other)))
                    live.remove((other, end))
                    other.num_computed_tokens = end
                    pool.free(other, keep=True)
    assert pool.num_kept > 700
    assert sum(runs[-200:]) > 180


def test_a_hole_is_filled_before_new_ground_is_taken() -> None:
    pool = BlockPool(256, 4, keeps_answers=True, extent=16)
    hole, stays = prompt(range(40)), prompt(range(100, 140))
    for seq in (hole, stays):
        run(pool, seq)
    left = set(pool.blocks(hole))
    pool.free(hole, keep=False)
    newcomer = prompt(range(200, 220))
    run(pool, newcomer)
    assert set(pool.blocks(newcomer)) <= left
    assert is_run(pool.blocks(newcomer))


def test_freeing_twice_or_without_blocks_is_harmless() -> None:
    pool = pool_of(4)
    seq = prompt(range(5))
    pool.free(seq, keep=True)
    run(pool, seq)
    pool.free(seq, keep=True)
    pool.free(seq, keep=True)
    assert (pool.num_used, pool.num_free, pool.num_seqs) == (0, 4, 0)
    assert visit(pool, range(9)) == 4


# Whatever comes and goes

PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=14)


class Pool(RuleBasedStateMachine):
    """Runs sequences on a memory that notes in each location who wrote what behind which tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.pool: BlockPool
        self.seqs: list[Sequence] = []
        self.memory: dict[int, tuple[str, tuple[int, ...]]] = {}

    @precondition(lambda self: not hasattr(self, "pool"))
    @rule(
        num_blocks=st.integers(1, 9),
        block_tokens=st.integers(1, 4),
        keeps_answers=st.booleans(),
        max_kept=st.sampled_from([None, 0, 2]),
        extent=st.sampled_from([0, 3]),
    )
    def begin(self, **given: Any) -> None:
        self.pool = BlockPool(given.pop("num_blocks"), given.pop("block_tokens"), **given)

    @precondition(lambda self: hasattr(self, "pool"))
    @rule(token_ids=PROMPTS, tenant=st.sampled_from("ab"), ahead=st.booleans())
    def place(self, token_ids: list[int], tenant: str, ahead: bool) -> None:
        seq = prompt(token_ids, tenant, ahead=ahead)
        found = self.pool.place(seq)
        assert found < seq.num_tokens
        assert found % self.pool.block_tokens == 0
        assert len(self.pool.blocks(seq)) * self.pool.block_tokens == found
        seq.num_computed_tokens = found
        self.seqs.append(seq)

    @precondition(lambda self: self.seqs)
    @rule(data=st.data(), num_tokens=st.integers(1, 6), wrong=st.integers(0, 3))
    def compute(self, data: st.DataObject, num_tokens: int, wrong: int) -> None:
        """Computes the next tokens, appends one where all are; and some that will be thrown away."""
        seq = data.draw(st.sampled_from(self.seqs))
        end = min(seq.num_computed_tokens + num_tokens, seq.num_tokens)
        before = list(self.pool.blocks(seq))
        if not self.pool.reserve(seq, end + wrong):
            assert self.pool.blocks(seq) == before
            return
        for position in range(seq.num_computed_tokens, end + wrong):
            is_wrong = position >= end
            self.memory[self.location(seq, position)] = (
                ("wrong", ()) if is_wrong else (seq.tenant, self.text(seq, position))
            )
        seq.num_computed_tokens = end
        if end == seq.num_tokens and not seq.is_warm_up:
            seq.output_token_ids.append(data.draw(st.integers(0, 1)))

    @precondition(lambda self: self.seqs)
    @rule(data=st.data(), keep=st.booleans(), again=st.booleans())
    def leave(self, data: st.DataObject, keep: bool, again: bool) -> None:
        seq = data.draw(st.sampled_from(self.seqs))
        for block in self.pool.free(seq, keep=keep):
            assert not any(
                block in self.pool.blocks(other) for other in self.seqs if other is not seq
            )
        self.pool.free(seq, keep=keep)
        seq.num_computed_tokens = 0
        if again:
            seq.num_computed_tokens = self.pool.place(seq)
        else:
            self.seqs.remove(seq)

    @precondition(lambda self: hasattr(self, "pool"))
    @rule(token_ids=PROMPTS, tenant=st.sampled_from("ab"))
    def ask(self, token_ids: list[int], tenant: str) -> None:
        holds(self.pool, token_ids, tenant)

    @precondition(lambda self: hasattr(self, "pool"))
    @rule(token_ids=PROMPTS, tenant=st.sampled_from("ab"), places=st.booleans())
    def wait(self, token_ids: list[int], tenant: str, places: bool) -> None:
        """Asks who is awaited, and whether the block is found once that one is there."""
        seq = prompt(token_ids, tenant)
        other = self.pool.awaited(seq)
        if other is not None:
            assert other in self.seqs
            assert not other.is_warm_up
            end = other.num_computed_tokens // self.pool.block_tokens * self.pool.block_tokens
            end += self.pool.block_tokens
            assert (seq.tenant, seq.token_ids(0, end)) == (other.tenant, other.token_ids(0, end))
            assert end < seq.num_tokens, "never for its last token"
        if not places:
            self.pool.free(seq, keep=True)
            return
        seq.num_computed_tokens = self.pool.place(seq)
        self.seqs.append(seq)

    @invariant()
    def no_block_is_lost_or_given_twice(self) -> None:
        if not hasattr(self, "pool"):
            return
        used = {block for seq in self.seqs for block in self.pool.blocks(seq)}
        assert self.pool.num_used == len(used)
        assert self.pool.num_free + self.pool.num_used == self.pool.num_blocks
        assert self.pool.num_kept <= self.pool.num_free
        assert used <= set(range(self.pool.num_blocks))
        for seq in self.seqs:
            assert len(set(self.pool.blocks(seq))) == len(self.pool.blocks(seq))

    @invariant()
    def every_sequence_finds_what_it_would_have_computed(self) -> None:
        for seq in self.seqs:
            for position in range(seq.num_computed_tokens):
                expected = (seq.tenant, self.text(seq, position))
                assert self.memory[self.location(seq, position)] == expected

    def location(self, seq: Sequence, position: int) -> int:
        size = self.pool.block_tokens
        return self.pool.blocks(seq)[position // size] * size + position % size

    def text(self, seq: Sequence, position: int) -> tuple[int, ...]:
        return tuple(seq.token_ids(0, position + 1))


TestPool = Pool.TestCase
TestPool.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


@given(sizes=st.lists(st.integers(1, 30), min_size=1, max_size=20), left=st.integers(0, 10**6))
def test_all_blocks_can_be_had_whatever_lay_where(sizes: list[int], left: int) -> None:
    pool = pool_of(40)
    seqs = []
    for number, size in enumerate(sizes):
        seq = prompt(range(100 * number, 100 * number + size))
        pool.place(seq)
        if pool.reserve(seq, size):
            seq.num_computed_tokens = size
            seqs.append(seq)
        else:
            pool.free(seq, keep=True)
    for number, seq in enumerate(seqs):
        if left >> number & 1:
            pool.free(seq, keep=bool(number % 3))
    last = prompt([7])
    pool.place(last)
    assert pool.reserve(last, 4 * pool.num_free)
    assert pool.num_free == 0
