"""What is known of prompts is made once, kept within bounds, and changes no decision."""

from __future__ import annotations

import itertools
import sys
import tracemalloc

import pytest

from cache.guards import (
    Comparison,
    compare,
    compare_unless_vetoed,
    disagreement,
    wording_differs,
)
from cache.key import PromptKey, make_key
from cache.prompts import Prompt, PromptMemo
from cache.reading import understand
from cache.wording import read

PROMPTS = (
    "What is the capital of France?",
    "what's the capital of France",
    "Tell me the capital of Spain, please!",
    "How do I turn on the water heater?",
    "How do I turn the water heating off?",
    "Is my smart phone covered until May 23, 2024?",
    "Is my smartphone covered until May 28, 2024?",
    "Is my smartfone not covered before May?",
    "Who did Ann call about Bob's invoice?",
    "Who did Bob call about Ann's invoice?",
    'Does "pip install -r" work with v3.8?',
    "Hugging Face Hub serves as a repository for Git-based models and datasets.",
    "Wie kann ich mein Konto kündigen?",
    "¿Cómo puedo cancelar mi cuenta hoy?",
    "我怎么不能取消我的账户？",
    "one\ntwo",
    "",
)
PAIRS = list(itertools.combinations(PROMPTS, 2))


def key_of(text: str, tenant: str = "t") -> PromptKey:
    return make_key({"tenant": tenant}, text, max_tokens=None, allow_semantic=True)


@pytest.mark.parametrize("text", PROMPTS)
def test_a_prompt_is_read_once_and_as_without_it(text: str) -> None:
    prompt = Prompt(text)
    assert prompt.wording == read(text)
    assert prompt.reading == understand(text)
    assert prompt.row == tuple(term.text for term in read(text).terms)
    assert prompt.reading is prompt.reading
    assert prompt.row is prompt.row


@pytest.mark.parametrize(("a", "b"), PAIRS)
def test_a_veto_found_early_is_the_one_found_in_full(a: str, b: str) -> None:
    whole = compare(understand(a), understand(b))
    early = compare_unless_vetoed(understand(a), understand(b))
    if whole.veto is None:
        assert isinstance(early, Comparison)
        assert early == whole
    else:
        assert early == whole.veto


@pytest.mark.parametrize(("a", "b"), PAIRS)
def test_a_reason_that_nobody_reads_is_still_a_reason(a: str, b: str) -> None:
    reason = disagreement(a, b)
    unworded = wording_differs(Prompt(a), Prompt(b), is_worded=False)
    assert (reason is None) == (unworded is None)


def test_a_stored_prompt_is_kept_for_its_own_partition_only() -> None:
    memo = PromptMemo()
    kept = memo.of(key_of("What is it?"))
    assert memo.of(key_of("What is it?")) is kept
    assert memo.of(key_of("What is it?", tenant="other")) is not kept


def test_the_memo_stays_within_its_bytes_and_forgets_what_was_met_least_lately() -> None:
    memo = PromptMemo(max_bytes=20_000)
    first = memo.of(key_of("question number 0"))
    for number in range(1, 200):
        memo.of(key_of(f"question number {number}"))
        assert memo.bytes <= 20_000
    assert 0 < len(memo) < 200
    assert memo.of(key_of("question number 0")) is not first


def test_a_prompt_larger_than_the_memo_is_given_and_not_kept() -> None:
    memo = PromptMemo(max_bytes=5000)
    assert memo.of(key_of("word " * 1000)).text.startswith("word")
    assert len(memo) == 0


@pytest.mark.parametrize(
    "text", ["How do I pay bill {} at the counter?", "我怎么取消我的账户{}？" * 9]
)
def test_what_is_counted_covers_what_prompts_take(text: str) -> None:
    memo = PromptMemo()
    keys = [key_of(text.replace("{}", str(number))) for number in range(300)]
    Prompt(keys[0].text).reading  # noqa: B018 - the word lists are loaded
    tracemalloc.start()
    for key in keys:
        prompt = memo.of(key)
        assert prompt.row
        assert prompt.reading.letters
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert taken + sum(sys.getsizeof(key.text) for key in keys) <= memo.bytes
