"""The vector index against brute force, faiss, hnswlib and usearch, one thread each.

    python3 -m venv ../peers && ../peers/bin/pip install numpy faiss-cpu hnswlib usearch
    ../peers/bin/python -m bench.cache_index                    # 1e3 1e4 1e5
    ../peers/bin/python -m bench.cache_index --rows rows.npy --queries queries.npy
    nice ../peers/bin/python -m bench.cache_index --sizes 1000000 --only seedance numpy faiss-ivf

What is not installed is left out. Rows are made like sentence embeddings: around random unit
vectors of 384 dimensions (topics) 50 questions each, at cosine 0.7 to the topic and 0.5 to each
other, and of each question 1 to 8 wordings, at cosine 0.82 to 0.995 to the question. Queries are
wordings of stored rows. `bench.embedder --vectors` makes real rows and queries. Recall is over
the rows that are among the true nearest four and reach the cosine that stands at the column.
Times of look-ups are the quickest of three rounds a query, those of changes a mean over 2,000.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

# Before numpy and faiss start their threads. The kernel of OpenBLAS is its own choice.
for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_name] = "1"

import numpy as np  # noqa: E402
from numpy.typing import NDArray  # noqa: E402

from cache.index import VectorIndex  # noqa: E402

Matrix = NDArray[np.float32]

DIMENSION = 384
TOP = 4
NUM_QUERIES = 1000
NUM_CHANGES = 2000
HNSW_MOST_ROWS = 100_000
"""Graphs take minutes to build beyond."""


class Index(Protocol):
    """What is measured: rows by number."""

    def add(self, row: int, vector: Matrix) -> None: ...

    def remove(self, row: int) -> None: ...

    def search(self, vector: Matrix) -> Sequence[int]: ...


class Seedance:
    def __init__(self, rows: Matrix) -> None:
        self._index = VectorIndex()
        for row, vector in enumerate(rows):
            self.add(row, vector)
        self._index.maintain(600)

    def add(self, row: int, vector: Matrix) -> None:
        self._index.add("p", str(row), vector)

    def remove(self, row: int) -> None:
        self._index.remove("p", str(row))

    def search(self, vector: Matrix) -> Sequence[int]:
        return [int(row) for row, _ in self._index.search("p", vector, TOP)]


class BruteForce:
    def __init__(self, rows: Matrix) -> None:
        self._rows = np.empty((len(rows) + NUM_CHANGES, DIMENSION), dtype=np.float32)
        self._rows[: len(rows)] = rows
        self._used = len(rows)
        self._numbers = list(range(len(rows)))
        self._place = {row: row for row in range(len(rows))}

    def add(self, row: int, vector: Matrix) -> None:
        self._rows[self._used] = vector
        self._place[row] = self._used
        self._numbers.append(row)
        self._used += 1

    def remove(self, row: int) -> None:
        place, last = self._place.pop(row), self._numbers.pop()
        self._used -= 1
        if last != row:
            self._rows[place] = self._rows[self._used]
            self._numbers[place], self._place[last] = last, place

    def search(self, vector: Matrix) -> Sequence[int]:
        similarities = self._rows[: self._used] @ vector
        found = np.argpartition(similarities, -TOP)[-TOP:]
        return [self._numbers[place] for place in found]


class FaissIVF:
    def __init__(self, rows: Matrix) -> None:
        import faiss

        faiss.omp_set_num_threads(1)
        self._faiss = faiss
        num_lists = max(1, round(3 * len(rows) ** 0.5)) if len(rows) >= 10_000 else 16
        quantizer = faiss.IndexFlatIP(DIMENSION)
        metric = faiss.METRIC_INNER_PRODUCT
        self._index = faiss.IndexIVFFlat(quantizer, DIMENSION, num_lists, metric)
        self._index.train(rows[:: max(1, len(rows) // (40 * num_lists))])
        self._index.add_with_ids(rows, np.arange(len(rows)))
        self._index.nprobe = 8

    def add(self, row: int, vector: Matrix) -> None:
        self._index.add_with_ids(vector[None], np.array([row]))

    def remove(self, row: int) -> None:
        self._index.remove_ids(np.array([row]))

    def search(self, vector: Matrix) -> Sequence[int]:
        found: list[int] = self._index.search(vector[None], TOP)[1][0].tolist()
        return found


class FaissHNSW:
    def __init__(self, rows: Matrix) -> None:
        import faiss

        faiss.omp_set_num_threads(1)
        self._index = faiss.IndexHNSWFlat(DIMENSION, 16, faiss.METRIC_INNER_PRODUCT)
        self._index.hnsw.efConstruction = 100
        self._index.hnsw.efSearch = 64
        self._index.add(rows)

    def add(self, row: int, vector: Matrix) -> None:
        self._index.add(vector[None])

    def remove(self, row: int) -> None:
        raise NotImplementedError

    def search(self, vector: Matrix) -> Sequence[int]:
        found: list[int] = self._index.search(vector[None], TOP)[1][0].tolist()
        return found


class Hnswlib:
    def __init__(self, rows: Matrix) -> None:
        import hnswlib

        self._index: Any = hnswlib.Index("ip", DIMENSION)
        self._index.init_index(len(rows) + NUM_CHANGES, ef_construction=100, M=16)
        self._index.set_num_threads(1)
        self._index.set_ef(64)
        self._index.add_items(rows, np.arange(len(rows)))

    def add(self, row: int, vector: Matrix) -> None:
        self._index.add_items(vector[None], np.array([row]), num_threads=1)

    def remove(self, row: int) -> None:
        self._index.mark_deleted(row)

    def search(self, vector: Matrix) -> Sequence[int]:
        found: list[int] = self._index.knn_query(vector[None], TOP, num_threads=1)[0][0].tolist()
        return found


class Usearch:
    def __init__(self, rows: Matrix) -> None:
        from usearch.index import Index as UsearchIndex

        self._index: Any = UsearchIndex(
            ndim=DIMENSION, metric="ip", dtype="f32", expansion_add=100, expansion_search=64
        )
        self._index.add(np.arange(len(rows)), rows, threads=1)

    def add(self, row: int, vector: Matrix) -> None:
        self._index.add(row, vector, threads=1)

    def remove(self, row: int) -> None:
        self._index.remove(row, threads=1)

    def search(self, vector: Matrix) -> Sequence[int]:
        found: list[int] = self._index.search(vector, TOP, threads=1).keys.tolist()
        return found


KINDS: dict[str, Callable[[Matrix], Index]] = {
    "seedance": Seedance,
    "numpy": BruteForce,
    "faiss-ivf": FaissIVF,
    "faiss-hnsw": FaissHNSW,
    "hnswlib": Hnswlib,
    "usearch": Usearch,
}
GRAPHS = {"faiss-hnsw", "hnswlib", "usearch"}


def make_rows(num_rows: int, rng: np.random.Generator) -> Matrix:
    """Unit vectors (N, 384): topics of 50 questions, of which each has 1 to 8 wordings."""
    rows = np.empty((num_rows, DIMENSION), dtype=np.float32)
    num_made = 0
    while num_made < num_rows:
        topic = _unit(rng.standard_normal(DIMENSION))
        for _ in range(50):
            question = _unit(topic + _unit(rng.standard_normal(DIMENSION)))
            num_wordings = min(int(rng.integers(1, 9)), num_rows - num_made)
            rows[num_made : num_made + num_wordings] = _wordings(question, num_wordings, rng)
            num_made += num_wordings
    return rng.permutation(rows)


def make_queries(rows: Matrix, rng: np.random.Generator) -> Matrix:
    """Other wordings of rows."""
    chosen = rows[rng.integers(len(rows), size=NUM_QUERIES)]
    return np.concatenate([_wordings(row, 1, rng) for row in chosen])


def _wordings(question: NDArray[Any], count: int, rng: np.random.Generator) -> Matrix:
    strength = rng.uniform(0.1, 0.7, size=(count, 1))
    noise = _unit(rng.standard_normal((count, DIMENSION)))
    return _unit(question + strength * noise).astype(np.float32)


def _unit(vectors: NDArray[Any]) -> NDArray[Any]:
    unit: NDArray[Any] = vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)
    return unit


@dataclass(frozen=True)
class Wanted:
    """For each query its true nearest rows, and their cosines."""

    rows: list[list[int]]
    cosines: list[list[float]]


def find_wanted(rows: Matrix, queries: Matrix) -> Wanted:
    """By brute force, many queries at a time."""
    nearest: list[list[int]] = []
    cosines: list[list[float]] = []
    for start in range(0, len(queries), 50):
        products = queries[start : start + 50] @ rows.T
        for product in products:
            found = np.argpartition(product, -TOP)[-TOP:]
            nearest.append(found.tolist())
            cosines.append(product[found].tolist())
    return Wanted(nearest, cosines)


def recall(found: Sequence[Sequence[int]], wanted: Wanted, low: float, high: float) -> str:
    """The share of wanted rows in a band of cosines that was found."""
    hits = total = 0
    for row_found, rows, cosines in zip(found, wanted.rows, wanted.cosines, strict=True):
        inside = {row for row, cosine in zip(rows, cosines, strict=True) if low <= cosine < high}
        total += len(inside)
        hits += len(inside & set(row_found))
    return f"{hits / total:.4f}" if total else "–"


def times(calls: Sequence[Callable[[], object]]) -> NDArray[np.float64]:
    """Microseconds of each."""
    taken = []
    for call in calls:
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
    return np.array(taken) * 1e6


def measure(kind: str, rows: Matrix, queries: Matrix, extra: Matrix, wanted: Wanted) -> str:
    """One line of the table."""
    start = time.perf_counter()
    index = KINDS[kind](rows)
    build_s = time.perf_counter() - start
    found = [index.search(query) for query in queries]
    rounds = [times([partial(index.search, query) for query in queries]) for _ in range(3)]
    quickest = np.min(rounds, axis=0)
    new = range(len(rows), len(rows) + len(extra))
    added = times([partial(index.add, row, vector) for row, vector in zip(new, extra, strict=True)])
    try:
        removed = times([partial(index.remove, row) for row in new])
        delete = f"{removed.mean():.1f} | {np.percentile(removed, 99):.0f}"
    except (NotImplementedError, RuntimeError):
        delete = "cannot | "
    return (
        f"| {len(rows):,} | {kind} | {np.median(quickest) / 1e3:.3f} "
        f"| {np.percentile(quickest, 99) / 1e3:.3f} | {recall(found, wanted, 0.85, 2)} "
        f"| {recall(found, wanted, 0.7, 0.85)} | {recall(found, wanted, 0.5, 0.7)} "
        f"| {added.mean():.1f} | {np.percentile(added, 99):.0f} | {delete} | {build_s:.1f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[1000, 10_000, 100_000])
    parser.add_argument("--only", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rows", type=Path, help="a .npy of rows (N, 384), in place of made ones")
    parser.add_argument("--queries", type=Path, help="with --rows: a .npy of queries")
    args = parser.parse_args()
    print("| rows | index | p50 ms | p99 ms | recall ≥ 0.85 | 0.7–0.85 | 0.5–0.7 "
          "| insert µs | p99 | delete µs | p99 | build s |")  # fmt: skip
    print("|" + "---|" * 12)
    for size in args.sizes if args.rows is None else [0]:
        rng = np.random.default_rng(args.seed)
        if args.rows is None:
            rows = make_rows(size + NUM_CHANGES, rng)
            queries = make_queries(rows[:size], rng)
        else:
            rows, queries = rng.permutation(np.load(args.rows)), np.load(args.queries)
            size = len(rows) - NUM_CHANGES
        rows, extra = rows[:size].copy(), rows[size:].copy()
        wanted = find_wanted(rows, queries)
        for kind in args.only:
            if kind in GRAPHS and size > HNSW_MOST_ROWS:
                continue
            try:
                print(measure(kind, rows, queries, extra, wanted), flush=True)
            except ImportError as exc:
                print(f"{kind} is left out: {exc}", file=sys.stderr)
            gc.collect()


if __name__ == "__main__":
    main()
