"""What this processor can do at the most, whatever the software: memory bandwidth and matrix products.

    python -m bench.limits --threads 2

Each figure is the best of a second's tries, so that other work on the machine lowers it little.
"""

from __future__ import annotations

import argparse
import json
import struct
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

BYTES_READ = 512 * 2**20
"""Much more than any cache holds."""
ROWS, INNER, COLUMNS = 512, 1536, 1536
TRY_S = 1.0
BYTES_PER_WEIGHT = {"fp32": 4, "bf16": 2, "int8": 1}


@dataclass(frozen=True)
class Limits:
    """GiB read and 10⁹ floating point (or integer) operations in a second, of all threads together."""

    threads: int
    read_gib_per_s: float
    bf16_gflops: float
    int8_gflops: float

    def gflops(self, precision: str) -> float:
        return self.int8_gflops if precision == "int8" else self.bf16_gflops


@dataclass(frozen=True)
class ModelSize:
    """How much a token costs: `weights` are all numbers of the model, `embeddings` those of one of
    its two ends, which a token of a prompt does not meet."""

    weights: int
    embeddings: int

    def bound_alone(self, limits: Limits, precision: str) -> float:
        """Tokens a second of one client, where each reads every weight from memory once."""
        return limits.read_gib_per_s * 2**30 / (self.weights * BYTES_PER_WEIGHT[precision])

    def bound_in_batches(
        self, limits: Limits, precision: str, prompt_tokens_per_token: float
    ) -> float:
        """Tokens a second of very many clients, where the matrix products alone take time.

        Args:
            prompt_tokens_per_token: of the load; they are computed as well.
        """
        operations = 2 * self.weights
        operations += 2 * (self.weights - self.embeddings) * prompt_tokens_per_token
        return limits.gflops(precision) * 1e9 / operations


def size_of(folder: Path) -> ModelSize:
    """Reads the heads of a folder's safetensors files."""
    shapes: dict[str, list[int]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            head = json.loads(stream.read(length))
        shapes |= {name: each["shape"] for name, each in head.items() if name != "__metadata__"}
    counts = {name: int(torch.Size(shape).numel()) for name, shape in shapes.items()}
    embeddings = sum(count for name, count in counts.items() if "embed_tokens" in name)
    weights = sum(counts.values())
    # Where both ends share one table, a token meets it at the last; otherwise it meets the other.
    is_tied = not any("lm_head" in name for name in counts)
    return ModelSize(weights if is_tied else weights - embeddings, embeddings)


def best_s(action: Callable[[], object], try_s: float = TRY_S) -> float:
    """Least time of the action over `try_s` seconds of it, after one that does not count."""
    action()
    least = float("inf")
    until = time.perf_counter() + try_s
    while time.perf_counter() < until:
        begun = time.perf_counter()
        action()
        least = min(least, time.perf_counter() - begun)
    return least


def measure_here(threads: int) -> Limits:
    """Measures in this process, whose number of threads it changes."""
    torch.set_num_threads(threads)
    numbers = torch.ones(BYTES_READ // 4)
    readings = (numbers.amax, numbers.sum, numbers.view(torch.int64).sum)
    read_s = min(best_s(reading) for reading in readings)
    del numbers
    operations = 2 * ROWS * INNER * COLUMNS
    return Limits(
        threads,
        BYTES_READ / 2**30 / read_s,
        operations / 1e9 / min(best_s(product) for product in _bf16_products()),
        operations / 1e9 / min(best_s(product) for product in _int8_products()),
    )


def _bf16_products() -> list[Callable[[], object]]:
    x = torch.randn(ROWS, INNER).bfloat16()
    weight = torch.randn(COLUMNS, INNER).bfloat16()
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS)
    return [
        lambda: x @ weight.T,
        lambda: torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], ""),
    ]


def _int8_products() -> list[Callable[[], object]]:
    weight = torch.randint(-100, 100, (INNER, COLUMNS), dtype=torch.int8)
    x = torch.randint(-100, 100, (ROWS, INNER), dtype=torch.int8)
    unsigned = x.abs().to(torch.uint8)
    packed = torch.ops.onednn.qlinear_prepack(weight.T.contiguous().T, [ROWS, INNER])
    scales, zeros = torch.ones(COLUMNS), torch.zeros(COLUMNS, dtype=torch.int64)

    def packed_product() -> object:
        return torch.ops.onednn.qlinear_pointwise(
            unsigned, 0.1, 0, packed, scales, zeros, None, 1.0, 0, torch.float32, "none", [], ""
        )  # fmt: skip

    return [lambda: torch._int_mm(x, weight), packed_product]


def measure(threads: int) -> Limits:
    """Measures in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "bench.limits", "--threads", str(threads), "--json"],
        cwd=Path(__file__).resolve().parent.parent,
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return Limits(**json.loads(done.stdout))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        limits = measure_here(options.threads)
    if options.json:
        print(json.dumps(asdict(limits)))
    else:
        print(
            f"{limits.threads} threads: read {limits.read_gib_per_s:.1f} GiB/s, "
            f"bf16 {limits.bf16_gflops:.0f} GFLOP/s, int8 {limits.int8_gflops:.0f} Gop/s"
        )


if __name__ == "__main__":
    main()
