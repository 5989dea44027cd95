"""schemathesis sends whatever the served OpenAPI document allows, and much that it forbids.

Real server, real model, in a short context so that an answer takes little time. `FUZZ_SECONDS` is
the time it has; `make clients` gives it ten minutes.
"""

from __future__ import annotations

import datetime
import json
import os
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.accounts import hash_key
from app.settings import Settings
from tests.clients.conftest import Results
from tests.clients.environments import python_environment
from tests.clients.results import ClientResult
from tests.e2e.cluster import Server, running_server

VERSION = "4.32.5"
HOOKS = Path(__file__).parent / "scripts" / "fuzz_hooks.py"
FUZZ_SECONDS = int(os.environ.get("FUZZ_SECONDS", "60"))
KEY = "sk-test-admin"
ANSWER_WITHIN_S = 60
CHECKS = (
    "server_has_no_fault",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "unsupported_method",
    "allow_header_conformance",
    "ignored_auth",
)

pytestmark = [pytest.mark.clients, pytest.mark.serve, pytest.mark.model]


@pytest.fixture(scope="module")
def short_server() -> Iterator[Server]:
    """Answers end soon, and nobody is let in without a key."""
    keys = [{"tenant": "fuzz", "sha256": hash_key(KEY), "admin": True}]
    auth = {"keys": keys, "allow_anonymous": False}
    with running_server(model={"max_model_len": 64}, auth=auth) as running:
        yield running


def test_nothing_that_the_document_allows_or_forbids_breaks_the_server(
    short_server: Server, results: Results, tmp_path: Path
) -> None:
    python = python_environment("schemathesis", [f"schemathesis=={VERSION}"])
    settings = Settings()
    environment = os.environ | {
        "SCHEMATHESIS_HOOKS": str(HOOKS),
        "SEEDANCE_MODEL": settings.model.name,
        "SEEDANCE_EMBEDDER": settings.cache.embedder,
    }
    done = subprocess.run(
        [
            str(python.with_name("schemathesis")),
            "run",
            f"{short_server.url}/openapi.json",
            *("--header", f"Authorization: Bearer {KEY}"),
            *("--max-time", str(FUZZ_SECONDS)),
            *("--phases", "examples,coverage,fuzzing"),
            *("--checks", ",".join(CHECKS)),
            # An operation that takes few of the values made for it is no fault.
            *("--suppress-health-check", "all"),
            *("--request-timeout", str(ANSWER_WITHIN_S)),
            "--continue-on-failure",
            *("--report", "json,ndjson"),
            *("--report-json-path", str(tmp_path / "run.json")),
            *("--report-ndjson-path", str(tmp_path / "events.ndjson")),
        ],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=FUZZ_SECONDS + 600,
    )
    said = f"{done.stdout[-20_000:]}\n{done.stderr[-2_000:]}"
    run = json.loads((tmp_path / "run.json").read_text())
    statuses = statuses_of(tmp_path / "events.ndjson")
    num_requests = sum(map(Counter.total, statuses.values()))
    total = sum(statuses.values(), Counter())
    counts = ", ".join(f"{count} × {status}" for status, count in sorted(total.items()))
    is_clean = not run["failures"] and not run["errors"]
    today = datetime.date.today().isoformat()
    found = "nothing found" if is_clean else f"failed: {run['failures'] + run['errors']}"
    results.keep(
        ClientResult(
            "schemathesis",
            {"schemathesis": VERSION},
            [f"all {run['operations']['tested']} operations of the OpenAPI document"],
            f"{num_requests} requests in {FUZZ_SECONDS} s ({counts}): {found}",
            today,
        )
    )
    print(json.dumps({name: dict(sorted(by.items())) for name, by in statuses.items()}, indent=1))
    assert is_clean, said
    assert done.returncode == 0, said
    assert run["operations"]["tested"] == run["operations"]["total"], said
    # A run whose requests were all refused has shown little.
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"):
        assert statuses[f"POST {path}"][200], f"no {path} was answered\n{counts}"
    assert "incident" not in short_server.log.read_text(errors="replace")
    check_still_answers(short_server)


def statuses_of(report: Path) -> dict[str, Counter[int]]:
    """How often each operation answered with each status."""
    statuses: dict[str, Counter[int]] = {}
    with report.open(encoding="utf-8") as lines:
        for line in lines:
            scenario = json.loads(line).get("ScenarioFinished")
            if scenario is None:
                continue
            recorder: dict[str, Any] = scenario["recorder"]
            counted = statuses.setdefault(recorder["label"], Counter())
            for interaction in recorder.get("interactions", {}).values():
                if interaction.get("response"):
                    counted[interaction["response"]["status_code"]] += 1
    return statuses


def check_still_answers(server: Server) -> None:
    """The server computes as before, for whoever comes next."""
    headers = {"authorization": f"Bearer {KEY}"}
    body = {"prompt": "One, two,", "max_tokens": 8, "temperature": 0, "cache": "bypass"}
    with httpx.Client(base_url=server.url, headers=headers, timeout=ANSWER_WITHIN_S) as client:
        reply = client.post("/v1/completions", json=body)
        assert reply.status_code == 200, reply.text
        assert reply.json()["usage"]["completion_tokens"] == 8
