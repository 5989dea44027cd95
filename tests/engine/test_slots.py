"""Which slot a newcomer gets, and what it finds there."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from hypothesis import given
from hypothesis import strategies as st

from deployments.engine.sequence import Sequence
from deployments.engine.slots import Placement, Slots
from tests.engine.fakes import sequence


def prompt(token_ids: SequenceOf[int], tenant: str = "t") -> Sequence:
    seq = sequence(list(token_ids))
    seq.tenant = tenant
    return seq


def run(slots: Slots, seq: Sequence) -> Placement:
    """Places a sequence and computes its prompt."""
    placement = slots.place(seq)
    seq.num_computed_tokens = seq.num_tokens
    return placement


def leave(slots: Slots, seq: Sequence, *, keep: bool = True) -> None:
    slots.free(seq, keep=keep)


def visit(slots: Slots, token_ids: SequenceOf[int], tenant: str = "t") -> Placement:
    seq = prompt(token_ids, tenant)
    placement = run(slots, seq)
    leave(slots, seq)
    return placement


def test_a_longer_prompt_takes_the_slot_over_and_computes_only_the_rest() -> None:
    slots = Slots(2, 4)
    assert visit(slots, range(10)) == Placement(0, 0, 0)
    assert visit(slots, range(20)) == Placement(0, 8, 0)


def test_the_last_token_of_a_prompt_is_always_computed() -> None:
    slots = Slots(2, 4)
    visit(slots, range(8))
    assert visit(slots, range(8)).num_tokens == 4
    assert visit(slots, range(9)).num_tokens == 8


def test_only_whole_blocks_are_matched() -> None:
    slots = Slots(2, 4)
    visit(slots, range(16))
    assert visit(slots, [*range(7), 99, 98, 97]).num_tokens == 4


def test_the_longest_match_wins() -> None:
    slots = Slots(3, 4)
    a, b = prompt([1] * 9), prompt([1] * 4 + [2] * 9)
    run(slots, a)
    run(slots, b)
    leave(slots, a)
    leave(slots, b)
    assert visit(slots, [1] * 4 + [2] * 20) == Placement(1, 12, 1)


def test_what_another_tenant_computed_is_neither_matched_nor_copied() -> None:
    slots = Slots(2, 4)
    visit(slots, range(12), "a")
    stays = prompt(range(12), "a")
    run(slots, stays)
    assert visit(slots, range(12), "b").num_tokens == 0


def test_an_unsound_slot_is_forgotten() -> None:
    slots = Slots(2, 4)
    seq = prompt(range(12))
    run(slots, seq)
    leave(slots, seq, keep=False)
    assert visit(slots, range(12)).num_tokens == 0


def test_only_what_was_computed_is_kept() -> None:
    slots = Slots(1, 4)
    seq = prompt(range(12))
    slots.place(seq)
    seq.num_computed_tokens = 6
    leave(slots, seq)
    assert visit(slots, range(12)).num_tokens == 4


def test_answers_are_not_kept() -> None:
    slots = Slots(1, 4)
    seq = prompt(range(4))
    slots.place(seq)
    seq.output_token_ids = [4, 5, 6, 7]
    seq.num_computed_tokens = 8
    leave(slots, seq)
    assert visit(slots, range(12)).num_tokens == 4


def test_a_newcomer_that_matches_nothing_takes_an_empty_slot_then_the_least_recently_used() -> None:
    slots = Slots(3, 4)
    starts = (0, 100, 200, 300, 400)
    assert [visit(slots, range(i, i + 9)).slot for i in starts] == [0, 1, 2, 0, 1]


def test_kept_prefixes_live_until_every_slot_holds_one() -> None:
    slots = Slots(2, 4)
    a, b = prompt(range(9)), prompt(range(50, 59))
    run(slots, a)
    run(slots, b)
    leave(slots, b)
    leave(slots, a)
    assert visit(slots, range(80, 89)).slot == 1, "b left first"
    assert visit(slots, range(9)).num_tokens == 8


def test_the_beginning_of_a_long_prefix_is_copied_and_the_prefix_stays() -> None:
    slots = Slots(2, 4)
    visit(slots, range(40))
    assert visit(slots, [*range(8), 99, 98]) == Placement(1, 8, 0)
    assert visit(slots, range(41)).num_tokens == 40


def test_a_running_neighbours_prompt_is_copied() -> None:
    slots = Slots(2, 4)
    stays = prompt(range(20))
    run(slots, stays)
    assert visit(slots, range(30)) == Placement(1, 20, 0)


def test_a_neighbours_prompt_is_copied_only_as_far_as_it_is_computed() -> None:
    slots = Slots(2, 4)
    half_way = prompt(range(20))
    slots.place(half_way)
    half_way.num_computed_tokens = 10
    assert visit(slots, range(30)).num_tokens == 8


def ahead(token_ids: SequenceOf[int], tenant: str = "t") -> Sequence:
    seq = prompt(token_ids, tenant)
    seq.is_warm_up = True
    return seq


def test_a_prompt_is_held_when_all_its_blocks_lie_in_one_slot_of_its_tenant() -> None:
    slots = Slots(2, 4)
    visit(slots, range(10))
    stays = prompt(range(50, 60))
    run(slots, stays)
    assert slots.holds(prompt(range(8)))
    assert slots.holds(prompt([*range(8), 99])), "the rest of a block is nobody's"
    assert slots.holds(prompt(range(50, 58))), "running ones count"
    assert not slots.holds(prompt(range(12)))
    assert not slots.holds(prompt([*range(4), 99, 98, 97, 96]))
    assert not slots.holds(prompt(range(8), "u"))


def test_a_prefix_that_is_asked_for_is_not_the_next_to_go() -> None:
    slots = Slots(2, 4)
    visit(slots, range(8))
    visit(slots, range(50, 58))
    assert slots.holds(prompt(range(8)))
    visit(slots, range(80, 88))
    assert slots.holds(prompt(range(8)))
    assert not slots.holds(prompt(range(50, 58)))


def test_what_was_computed_ahead_and_not_used_holds_half_of_the_slots_at_most() -> None:
    slots = Slots(4, 4)
    visit(slots, range(9))
    for start in (100, 200, 300, 400):
        seq = ahead(range(start, start + 9))
        run(slots, seq)
        leave(slots, seq)
    assert [slots.holds(prompt(range(i, i + 8))) for i in (0, 100, 200, 300, 400)] == [
        True, False, False, True, True,
    ]  # fmt: skip
    assert slots.num_used == 0


def test_what_a_request_has_used_is_its_own_from_then_on() -> None:
    slots = Slots(4, 4)
    for start in (100, 200):
        seq = ahead(range(start, start + 9))
        run(slots, seq)
        leave(slots, seq)
        assert visit(slots, range(start, start + 12)).num_tokens == 8
    for start in (300, 400):
        run(slots, seq := ahead(range(start, start + 9)))
        leave(slots, seq)
    assert all(slots.holds(prompt(range(i, i + 8))) for i in (100, 200, 300, 400))


def test_freeing_twice_or_without_a_slot_is_harmless() -> None:
    slots = Slots(1, 4)
    seq = prompt(range(5))
    leave(slots, seq)
    run(slots, seq)
    leave(slots, seq)
    leave(slots, seq)
    assert slots.num_used == 0
    assert visit(slots, range(9)).num_tokens == 4


PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=14)


@given(
    visits=st.lists(
        st.tuples(PROMPTS, st.sampled_from("ab"), st.booleans(), st.integers(0, 3)), max_size=30
    ),
    block=st.integers(1, 5),
)
def test_whatever_comes_and_goes_a_slot_holds_what_it_promises(
    visits: list[tuple[list[int], str, bool, int]], block: int
) -> None:
    """Replays placements on a memory that notes who computed what."""
    slots = Slots(3, block)
    memory: dict[int, list[tuple[str, int]]] = {slot: [] for slot in range(3)}
    inside: list[Sequence] = []
    for token_ids, tenant, keep, leaver in visits:
        if len(inside) == 3 or (inside and leaver < len(inside)):
            leave(slots, inside.pop(leaver % len(inside)), keep=keep)
        seq = prompt(token_ids, tenant)
        placement = slots.place(seq)
        assert placement.num_tokens < seq.num_tokens
        assert placement.num_tokens % block == 0
        assert placement.slot not in {slots.find(other) for other in inside}
        reused = memory[placement.source][: placement.num_tokens]
        assert reused == [(tenant, token) for token in token_ids[: placement.num_tokens]]
        seq.num_computed_tokens = seq.num_cached_tokens = placement.num_tokens
        memory[placement.slot] = reused + [
            (tenant, token) for token in token_ids[placement.num_tokens :]
        ]
        seq.num_computed_tokens = seq.num_tokens
        inside.append(seq)
    assert slots.num_used == len(inside)
