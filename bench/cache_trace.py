"""Replays public cache traces, and a stream of paraphrases, through the eviction policies.

Hit ratios beside those of Belady's optimum, which knows the future. The peers come from
libCacheSim where it is installed; it need not be in the project's own environment:

    python -m venv /tmp/lcs && /tmp/lcs/bin/pip install libcachesim numpy cachetools regex
    /tmp/lcs/bin/python -m bench.cache_trace
"""

from __future__ import annotations

import argparse
import gzip
import json
import lzma
import random
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from heapq import heappop, heappush
from pathlib import Path
from typing import Any

import numpy as np
from cachetools import LRUCache
from numpy.typing import NDArray

from cache.answer import StoredAnswer
from cache.entries import Entry
from cache.key import PromptKey, make_key
from cache.lru_k import EvictionPolicy, LRUKCache
from cache.prompt_cache import CacheConfig, Hit, PromptCache
from cache.s3_fifo import S3FIFOCache
from cache.windowed import WindowedLRUK

try:
    import libcachesim  # type: ignore[import-not-found,unused-ignore]
except ImportError:
    libcachesim = None

TRACES = Path("../shared/data/traces")
SIZES = (0.01, 0.05, 0.1, 0.2)
OURS = "windowed LRU-2"
POLICIES: dict[str, Callable[[int], EvictionPolicy]] = {
    OURS: WindowedLRUK,
    "LRU": lambda size: LRUCache(size, getsizeof=lambda value: value),
    "LRU-2, 4x ghosts": LRUKCache,
    "LRU-3, 4x ghosts": lambda size: LRUKCache(size, k=3),
    "S3-FIFO (ours)": S3FIFOCache,
}
PEERS = {
    "S3-FIFO": "S3FIFO",
    "ARC": "ARC",
    "2Q": "TwoQ",
    "SIEVE": "Sieve",
    "LFU": "LFU",
    "W-TinyLFU": "WTinyLFU",
    "LIRS": "LIRS",
}

Ratios = dict[str, float]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--traces", type=Path, default=TRACES)
    parser.add_argument("--requests", type=int, default=150_000, help="most of each trace")
    parser.add_argument(
        "--tier-requests", type=int, default=20_000, help="through both tiers; 0: none"
    )
    parser.add_argument("--sizes", type=float, nargs="+", default=SIZES, help="of distinct keys")
    options = parser.parse_args()
    if not options.traces.is_dir():
        sys.exit(f"{options.traces} is not there: the traces are not part of the project")
    if libcachesim is None:
        print("libcachesim is not installed: its policies are left out\n")
    rows = replay_all(options.traces, options.requests, options.sizes)
    print_shares(rows)
    if options.tier_requests:
        print_tiers(options.traces, options.tier_requests, options.sizes)
        print_paraphrases()


def read_trace(path: Path, most: int) -> NDArray[np.int64]:
    """The keys of a trace, numbered by value: (N,) with N at most `most`."""
    if path.suffix == ".jsonl":
        keys = _read_blocks(path, most)
    elif path.suffix == ".gz":
        with gzip.open(path, "rt") as lines:
            keys = [int(line) for line in lines if line.strip().lstrip("-").isdigit()]
    else:
        with lzma.open(path) as data:
            keys = np.frombuffer(data.read(4 * most), dtype=">u4").tolist()
    return np.unique(np.asarray(keys[:most]), return_inverse=True)[1].astype(np.int64)


def _read_blocks(path: Path, most: int) -> list[int]:
    keys: list[int] = []
    with path.open() as lines:
        for line in lines:
            keys += json.loads(line)["hash_ids"]
            if len(keys) >= most:
                break
    return keys


def traces(folder: Path, most: int) -> Iterator[tuple[str, NDArray[np.int64]]]:
    for path in sorted(folder.iterdir()):
        if path.name.endswith((".trace.gz", ".trace.xz", "_trace.jsonl")):
            yield path.name.split(".")[0], read_trace(path, most)


def replay(policy: EvictionPolicy, keys: list[str]) -> float:
    """Hit ratio of a policy that holds items of size 1."""
    num_hits = 0
    for key in keys:
        if key in policy:
            policy[key]
            num_hits += 1
        else:
            while policy.currsize >= policy.maxsize:
                policy.popitem()
            policy[key] = 1
    return num_hits / len(keys)


def next_uses(trace: NDArray[np.int64]) -> list[int]:
    """When each request's key is asked for again; the length of the trace for never."""
    latest: dict[int, int] = {}
    uses = [0] * len(trace)
    for place in range(len(trace) - 1, -1, -1):
        key = int(trace[place])
        uses[place] = latest.get(key, len(trace))
        latest[key] = place
    return uses


def replay_belady(trace: NDArray[np.int64], size: int) -> float:
    """Hit ratio when the key that is asked for latest leaves, be it the new one."""
    held: dict[int, int] = {}
    heap: list[tuple[int, int]] = []
    num_hits = 0
    for key, use in zip(trace.tolist(), next_uses(trace), strict=True):
        num_hits += key in held
        held[key] = use
        heappush(heap, (-use, key))
        while len(held) > size:
            latest, victim = heappop(heap)
            if held.get(victim) == -latest:
                del held[victim]
    return num_hits / len(trace)


class Peers:
    """libCacheSim on one trace."""

    def __init__(self, trace: NDArray[np.int64], folder: Path) -> None:
        row = np.dtype([("time", "<u4"), ("key", "<u8"), ("size", "<u4"), ("next", "<i8")])
        rows = np.zeros(len(trace), dtype=row)
        rows["time"], rows["key"], rows["size"] = np.arange(len(trace)), trace, 1
        rows["next"] = [-1 if use == len(trace) else use for use in next_uses(trace)]
        self._path = folder / "trace.oracleGeneral"
        rows.tofile(self._path)

    def replay(self, name: str, size: int) -> float:
        sim: Any = libcachesim
        reader = sim.TraceReader(
            str(self._path),
            sim.TraceType.ORACLE_GENERAL_TRACE,
            sim.ReaderInitParam(ignore_obj_size=True),
        )
        miss_ratio, _ = getattr(sim, PEERS[name])(cache_size=size).process_trace(reader)
        return float(1 - miss_ratio)


def replay_all(folder: Path, most: int, sizes: list[float]) -> list[Ratios]:
    """A row for each trace and size: hit ratios by policy, and Belady's."""
    names = [*POLICIES, *(PEERS if libcachesim else ())]
    print("| trace | requests | held | Belady | " + " | ".join(names) + " |")
    print("|---" * (4 + len(names)) + "|")
    rows = []
    for trace_name, trace in traces(folder, most):
        keys = [str(key) for key in trace]
        with tempfile.TemporaryDirectory() as scratch:
            peers = Peers(trace, Path(scratch)) if libcachesim else None
            for share in sizes:
                size = max(10, round(share * len(set(keys))))
                row = {name: replay(make(size), keys) for name, make in POLICIES.items()}
                if peers is not None:
                    row |= {name: peers.replay(name, size) for name in PEERS}
                row["Belady"] = replay_belady(trace, size)
                rows.append(row)
                shown = " | ".join(f"{row[name]:.4f}" for name in ("Belady", *names))
                print(f"| {trace_name} | {len(keys)} | {size} | {shown} |", flush=True)
    return rows


def print_shares(rows: list[Ratios]) -> None:
    print("\n| policy | mean share of Belady's hits | above LRU | below LRU |\n|---|---|---|---|")
    shares = {
        name: statistics.mean(row[name] / row["Belady"] for row in rows)
        for name in rows[0]
        if name != "Belady"
    }
    for name in sorted(shares, key=lambda name: -shares[name]):
        above, below = (
            sum(sign * (row[name] - row["LRU"]) > 1e-9 for row in rows) for sign in (1, -1)
        )
        print(f"| {name} | {shares[name]:.3f} | {above} of {len(rows)} | {below} |")


# Through the cache itself


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def ask_exactly(cache: PromptCache, keys: list[PromptKey], answer: StoredAnswer) -> float:
    num_hits = 0
    for key in keys:
        if cache.lookup_exact(key) is not None:
            num_hits += 1
        else:
            cache.store(key, answer, None)
    return num_hits / len(keys)


def print_tiers(folder: Path, most: int, sizes: list[float]) -> None:
    """Three quarters of the space warm and one cold, against one tier with all of it."""
    names = ("warm and cold", OURS, "LRU")
    print(f"\nThe first {most} requests through the cache itself, one tier or two:\n")
    print("| trace | held | " + " | ".join(names) + " |\n|---|---|---|---|---|")
    answer = StoredAnswer(b"answer", 1, "r")
    rows = []
    for trace_name, trace in traces(folder, most):
        made: dict[int, PromptKey] = {}
        for number in trace.tolist():
            if number not in made:
                made[number] = make_key(
                    {"tenant": "t"}, f"{number:09d}", max_tokens=None, allow_semantic=False
                )
        keys = [made[number] for number in trace.tolist()]
        unit = Entry(keys[0], answer, 0.0).size_bytes
        for share in sizes:
            size = max(12, round(share * len(made)))
            cold = size // 4
            two, one = (
                PromptCache(
                    CacheConfig(
                        max_bytes=(size - held_cold) * unit,
                        cold_max_bytes=held_cold * unit,
                        ttl_s=1e9,
                        cold_ttl_s=1e9,
                    ),
                    clock=Clock(),
                )
                for held_cold in (cold, 0)
            )
            words = [str(number) for number in trace.tolist()]
            row = (
                ask_exactly(two, keys, answer),
                ask_exactly(one, keys, answer),
                replay(POLICIES["LRU"](size), words),
            )
            rows.append(row)
            shown = " | ".join(f"{ratio:.4f}" for ratio in row)
            print(f"| {trace_name} | {size} | {shown} |", flush=True)
    means = " | ".join(f"{statistics.mean(column):.4f}" for column in zip(*rows, strict=True))
    print(f"| mean | | {means} |")


NUM_TOPICS, NUM_ASKED, DIMENSION = 20_000, 20_000, 64
WORDINGS = (
    "What is the price of item {}?",
    "Tell me the price of item {}.",
    "what's the price of item {}",
    "Could you please tell me what the price of item {} is?",
    "Please tell me the price of item {}",
    "Hi! What is the price of item {}? Thanks!",
)


def print_paraphrases() -> None:
    """Topics by Zipf's law, each in several wordings that the guards let pass as one."""
    rng = np.random.default_rng(1)
    weights = 1 / np.arange(1, NUM_TOPICS + 1) ** 0.8
    topics = rng.choice(NUM_TOPICS, size=NUM_ASKED, p=weights / weights.sum())
    wordings = rng.choice(len(WORDINGS), size=NUM_ASKED)
    centres = rng.standard_normal((NUM_TOPICS, DIMENSION)).astype(np.float32)
    centres /= np.linalg.norm(centres, axis=1, keepdims=True)
    print(f"\n{NUM_ASKED} questions on {NUM_TOPICS} topics in {len(WORDINGS)} wordings:\n")
    print("| policy | held | hit ratio | of LRU's |\n|---|---|---|---|")
    for size in (200, 400, 800):
        ratios: Ratios = {}
        for policy in ("lru", "lru-k", "s3-fifo", "windowed"):
            ratios[policy] = ask_by_meaning(policy, size, topics, wordings, centres)
            relative = ratios[policy] / ratios["lru"]
            print(f"| {policy} | {size} | {ratios[policy]:.4f} | {relative:.2f} |", flush=True)


def ask_by_meaning(
    policy: Any,
    size: int,
    topics: NDArray[np.int64],
    wordings: NDArray[np.int64],
    centres: NDArray[np.float32],
) -> float:
    answer = StoredAnswer(b"answer", 1, "r")
    largest = make_key({"tenant": "t"}, "x" * 70, max_tokens=None, allow_semantic=True)
    unit = Entry(largest, answer, 0.0, centres[0]).size_bytes
    cache = PromptCache(
        CacheConfig(max_bytes=size * unit, ttl_s=1e9, policy=policy, max_alias_bytes=0),
        clock=Clock(),
        rng=random.Random(1),
    )
    num_hits = 0
    for topic, wording in zip(topics.tolist(), wordings.tolist(), strict=True):
        key = make_key(
            {"tenant": "t"}, WORDINGS[wording].format(topic), max_tokens=None, allow_semantic=True
        )
        # The same topic in other words: a cosine of 0.97.
        noise = np.random.default_rng([topic, wording]).standard_normal(DIMENSION)
        vector = centres[topic] + np.float32(0.18) * (noise / np.linalg.norm(noise))
        vector = (vector / np.linalg.norm(vector)).astype(np.float32)
        hit = cache.lookup_exact(key) or cache.lookup_semantic(key, vector)
        if isinstance(hit, Hit):
            num_hits += 1
        else:
            cache.store(key, answer, vector)
    return num_hits / len(topics)


if __name__ == "__main__":
    main()
