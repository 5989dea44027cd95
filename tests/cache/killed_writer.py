"""A process that stores and deletes answers until it is killed, and says so after each.

Run as `python -m tests.cache.killed_writer FILE FIRST`; prints `NUMBER SECONDS` for an answer
that was stored, and `-NUMBER SECONDS` for one that was deleted, on the system's steady clock.
With each tenth number goes a paraphrase that was learnt, and a mistake that was found.
"""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path

from cache.answer import StoredAnswer
from cache.budget import ErrorBudget
from cache.cold_sqlite import sqlite_store
from cache.decision import Decider
from cache.key import PromptKey, make_key
from cache.prompt_cache import CacheConfig, PromptCache
from cache.stats import EntryFilter
from cache.wall_clock import WallClock
from tests.cache.test_decision import ROW, TRUSTED, verifier

# Space for a few entries only in memory: most are on their way from one tier to the other.
CONFIG = CacheConfig(max_bytes=200_000, cold_max_bytes=2**30)


def open_cache(path: Path, budget: ErrorBudget | None = None) -> PromptCache:
    clock = WallClock()
    store = sqlite_store(path, max_bytes=2**30, wall_clock=clock)
    budget = budget or ErrorBudget(prior=TRUSTED)
    decider = Decider(budget=budget, verifier=verifier(), rng=random.Random(0))
    return PromptCache(CONFIG, clock=clock, store=store, decider=decider)


def key_of(number: int) -> PromptKey:
    return make_key({"tenant": "a"}, f"question {number}", max_tokens=None, allow_semantic=False)


def answer_of(number: int) -> StoredAnswer:
    return StoredAnswer(f"answer {number} ".encode() * 50, 5, "r1")


def tenant_of(number: int) -> str:
    return f"t{number}"


def wording_of(number: int, verb: str) -> PromptKey:
    text = f"How do I {verb} logs?"
    return make_key({"tenant": tenant_of(number)}, text, max_tokens=None, allow_semantic=True)


def learn(cache: PromptCache, budget: ErrorBudget, number: int) -> None:
    cache.store(wording_of(number, "turn on"), answer_of(number), ROW)
    cache.lookup_semantic(wording_of(number, "enable"), ROW)
    budget.spend(tenant_of(number))


def main() -> None:
    path, number = Path(sys.argv[1]), int(sys.argv[2])
    budget = ErrorBudget(prior=TRUSTED)
    cache = open_cache(path, budget)
    while True:
        if number % 10 == 0:
            learn(cache, budget, number)
        cache.store(key_of(number), answer_of(number), None)
        print(number, time.monotonic(), flush=True)
        if number % 10 == 9:
            cache.delete(EntryFilter(prompt=f"question {number - 5}"))
            print(-(number - 5), time.monotonic(), flush=True)
        number += 1
        time.sleep(0.001)


if __name__ == "__main__":
    main()
