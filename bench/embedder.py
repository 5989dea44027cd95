"""The embedder beside plain sentence-transformers, one thread each.

    .venv/bin/python -m bench.embedder FOLDER                   # in ~/.cache/seedance/models
    .venv/bin/python -m bench.embedder FOLDER --vectors OUT     # rows.npy and queries.npy

Each embedder loads in a process of its own; then rounds of all of them in turn, of which the
quickest and the median are told. The cold start is from an empty interpreter to the first
vector. Cosines are to sentence-transformers in float32. Texts are from the shared data.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

os.environ.update(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")

import numpy as np
from numpy.typing import NDArray

from bench.worker import Worker, rounds, tell

Matrix = NDArray[np.float32]
KINDS = ("sentence-transformers", "torch bf16", "openvino f32", "openvino bf16")
DEFAULT = "openvino bf16"
PLAIN = "sentence-transformers"
ONE = "What is the capital of France and how many people live in it?"


def load(kind: str, folder: Path) -> Callable[[list[str]], Matrix]:
    if kind.startswith("openvino"):
        from deployments.embedder_openvino import OpenVINOEmbedder

        embedder = OpenVINOEmbedder(folder, precision=kind.split()[1])
        return lambda texts: np.array(embedder.embed(texts))
    import torch
    from sentence_transformers import SentenceTransformer

    torch.set_num_threads(1)
    model = SentenceTransformer(str(folder), device="cpu", local_files_only=True)
    if kind == "torch bf16":
        model.bfloat16()

    def embed(texts: list[str]) -> Matrix:
        vectors = model.encode(
            texts, normalize_embeddings=True, show_progress_bar=False, convert_to_tensor=True
        )
        rows: Matrix = vectors.float().numpy()
        return rows

    return embed


def read_texts(data: Path) -> tuple[list[str], list[str]]:
    """Questions to store and others to ask, of all shared pairs."""
    pairs = data / "pairs"
    rows, queries = [], []
    for name in ("fow.jsonl", "checklist_qqp.jsonl"):
        for line in (pairs / name).read_text().splitlines():
            pair = json.loads(line)
            rows.append(pair["a"])
            queries.append(pair["b"])
    for pair in json.loads((pairs / "gptcache_mock_data.json").read_text()):
        rows.append(pair["origin"])
        queries.append(pair["similar"])
    with (pairs / "banking77_train.csv").open(newline="") as file:
        rows += [row["text"] for row in csv.DictReader(file)]
    return list(dict.fromkeys(rows)), list(dict.fromkeys(queries))


def write_vectors(folder: Path, data: Path, out: Path) -> None:
    from deployments.embedder import load_embedder

    embedder = load_embedder(folder)
    out.mkdir(parents=True, exist_ok=True)
    for name, texts in zip(("rows", "queries"), read_texts(data), strict=True):
        found = [vector for vector in embedder.embed(texts) if vector is not None]
        np.save(out / f"{name}.npy", np.array(found))
        print(f"{out / name}.npy: {len(found)} vectors")


def serve_rounds(kind: str, folder: Path, texts: list[str]) -> None:
    """Loads, then does a round for every line that comes in and prints its result."""
    import psutil

    start = time.perf_counter()
    embed = load(kind, folder)
    embed([ONE])
    cold_s = time.perf_counter() - start
    vectors = embed([ONE, *texts]).tolist()
    for _ in rounds(cold_s):
        taken = {"one": [seconds(lambda: embed([ONE])) for _ in range(20)]}
        taken["many"] = [seconds(lambda: embed(texts)) for _ in range(2)]
        bytes_held = psutil.Process().memory_info().rss
        tell({"vectors": vectors, "bytes": bytes_held, **taken})


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


class Runner:
    """One embedder in a process of its own."""

    def __init__(self, kind: str, folder: Path, data: Path) -> None:
        self.kind = kind
        self.taken: dict[str, list[float]] = {"one": [], "many": []}
        command = [sys.executable, "-m", "bench.embedder", str(folder)]
        self._worker = Worker(
            kind, [*command, "--data", str(data), "--serve", kind], stderr=subprocess.DEVNULL
        )
        self.cold_s: float = self._worker.greeting

    def run(self) -> None:
        answer = self._worker.run()
        for name, taken in self.taken.items():
            taken += answer[name]
        self.vectors = np.array(answer["vectors"])
        self.mib = answer["bytes"] / 2**20

    def close(self) -> None:
        self._worker.close()


def show(runners: list[Runner]) -> None:
    plain = next(runner for runner in runners if runner.kind == PLAIN)
    print("| embedder | one text ms (median) | better | 32 texts ms (median) | better "
          "| cold start s | memory MiB | least cosine |")  # fmt: skip
    print("|" + "---|" * 8)
    for runner in runners:
        cells = [f"{runner.kind}{' (default)' if runner.kind == DEFAULT else ''}"]
        for name, taken in runner.taken.items():
            cells.append(f"{min(taken) * 1e3:.1f} ({np.median(taken) * 1e3:.1f})")
            quickest, typical = (
                f(plain.taken[name]) / f(taken)
                for f in (min, lambda values: float(np.median(values)))
            )
            cells.append(f"{quickest:.1f}× ({typical:.1f}×)")
        cosines = (runner.vectors * plain.vectors).sum(axis=1)
        cells += [f"{runner.cold_s:.1f}", f"{runner.mib:.0f}", f"{cosines.min():.6f}"]
        print(f"| {' | '.join(cells)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--vectors", type=Path, metavar="OUT")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--serve", choices=KINDS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not args.data.is_dir():
        parser.error(f"the shared data is not in {args.data}")
    if args.vectors is not None:
        write_vectors(args.folder, args.data, args.vectors)
        return
    if args.serve is not None:
        serve_rounds(args.serve, args.folder, read_texts(args.data)[1][:32])
        return
    runners = [Runner(kind, args.folder, args.data) for kind in KINDS]
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
