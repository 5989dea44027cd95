"""Other people's clients, in the versions their users have, against a real server and model.

Each script uses its client as its documentation says and checks what comes back.
"""

from __future__ import annotations

import datetime
import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from app.settings import Settings
from tests.clients.conftest import Results
from tests.clients.environments import (
    NotInstallable,
    cache_folder,
    node,
    node_environment,
    python_environment,
)
from tests.clients.results import ClientResult
from tests.e2e.cluster import KEY_A, Server

SCRIPTS = Path(__file__).parent / "scripts"
RUN_WITHIN_S = 1800

pytestmark = [pytest.mark.clients, pytest.mark.serve, pytest.mark.model]


@dataclass(frozen=True)
class Client:
    """Its name, the folder of its environment, its script, and what its users install."""

    name: str
    folder: str
    script: str
    packages: tuple[str, ...]


PYTHON_CLIENTS = [
    Client("openai-python", "openai-python", "openai_python.py", ("openai[realtime]==3.57.0",)),
    Client("LangChain", "langchain", "langchain_client.py", ("langchain-openai==1.7.4",)),
    Client("LiteLLM", "litellm", "litellm_client.py", ("litellm==1.110.2",)),
]
NODE_CLIENTS = [
    Client(
        "openai-node",
        "openai-node",
        "openai_node.mjs",
        ("openai@7.59.0", "ws@8.23.0", "zod@4.6.7"),
    ),
    Client(
        "Vercel AI SDK",
        "vercel-ai",
        "vercel_ai.mjs",
        ("ai@7.0.173", "@ai-sdk/openai@4.0.118", "@ai-sdk/openai-compatible@3.0.92", "zod@4.6.7"),
    ),
]


@pytest.mark.parametrize("client", PYTHON_CLIENTS, ids=lambda client: client.folder)
def test_a_python_client_finds_nothing_wrong(
    server: Server, results: Results, client: Client
) -> None:
    python = python_environment(client.folder, client.packages)
    run_script(client, [str(python), str(SCRIPTS / client.script)], server, results)


@pytest.mark.parametrize("client", NODE_CLIENTS, ids=lambda client: client.folder)
def test_a_node_client_finds_nothing_wrong(
    server: Server, results: Results, client: Client
) -> None:
    try:
        program = node().program
    except NotInstallable as error:
        pytest.skip(f"no Node for this machine: {error}")
    folder = node_environment(client.folder, client.packages)
    # Node looks for packages beside the script, not where it is started.
    for file in SCRIPTS.glob("*.mjs"):
        shutil.copy(file, folder)
    run_script(client, [str(program), client.script], server, results, folder)


def run_script(
    client: Client,
    command: list[str],
    server: Server,
    results: Results,
    folder: Path | None = None,
) -> None:
    """Runs a client's script and keeps what it says for the table."""
    settings = Settings()
    environment = os.environ | {
        "SEEDANCE_URL": f"{server.url}/v1",
        "SEEDANCE_KEY": KEY_A,
        "SEEDANCE_MODEL": settings.model.name,
        "SEEDANCE_EMBEDDER": settings.cache.embedder,
        # LiteLLM would ask the internet for the prices of models.
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }
    done = subprocess.run(
        command,
        cwd=folder or cache_folder(),
        env=environment,
        capture_output=True,
        text=True,
        timeout=RUN_WITHIN_S,
    )
    today = datetime.date.today().isoformat()
    if done.returncode != 0:
        said = done.stderr.strip().splitlines() or ["nothing"]
        results.keep(ClientResult(client.name, {}, [], f"failed: {said[-1]}", today))
        pytest.fail(f"{client.name} exited with {done.returncode}:\n{done.stderr[-4000:]}")
    told = json.loads(done.stdout.strip().splitlines()[-1])
    passed = f"all {len(told['exercised'])} passed"
    results.keep(ClientResult(client.name, told["versions"], told["exercised"], passed, today))
