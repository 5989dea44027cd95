"""Prefix routing against Serve's default router: the same chats, two model replicas, by turns.

    python -m bench.routing --chats 32 --turns 4
    python -m bench.routing --trace conversation_trace.jsonl --speed 20

Prints how many prompt tokens did not have to be computed, and the time to the first token.
Chats share a few system prompts and ask several questions each; every turn carries the answers
that the server gave before. A trace is one of the Mooncake kind: requests with arrival times and
the ids of their prefix blocks, each id becoming a piece of text.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import itertools
import json
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from app.client import ConnectionLost, SeedanceClient
from app.launcher import read_config
from app.settings import SettingsError
from bench.cluster import ROOT, ClusterFailed, free_port, serving
from bench.compare import conditions
from bench.workload import ASKED, PADDING, TOPICS, make_arrivals
from protocol.errors import ServingError

POLICIES = ("prefix", "default")
SYSTEM_SENTENCES = 12
SOCKETS = 8
TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Chat:
    """Questions asked one after the other, each with all that was said before.

    `begins_s` counts from the start of the run.
    """

    begins_s: float
    system: str | None
    questions: tuple[str, ...]


@dataclass(frozen=True)
class Turn:
    """What the client saw of one question."""

    number: int
    ttft_s: float | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    error: str | None = None


@dataclass(frozen=True)
class Figures:
    """All turns of one policy. A rate without prompts, or a time without answers, is NaN.

    Args:
        later_hit_rate: the same of every turn but a chat's first.
    """

    turns: int
    errors: dict[str, int]
    prompt_tokens: int
    hit_rate: float
    later_hit_rate: float
    ttft_ms_p50: float
    ttft_ms_p99: float


def make_chats(count: int, seed: int, *, turns: int, systems: int, rate_per_s: float) -> list[Chat]:
    """Chats that begin as a Poisson process, each with one of `systems` system prompts."""
    rng = random.Random(seed)
    shared = [
        f"You are assistant number {number}. " + " ".join(rng.choices(PADDING, k=SYSTEM_SENTENCES))
        for number in range(systems)
    ]
    questions = [pattern.format(topic=topic) for pattern in ASKED for topic in TOPICS]
    return [
        Chat(begins_s, rng.choice(shared), tuple(rng.sample(questions, turns)))
        for begins_s in make_arrivals(count, seed, rate_per_s)
    ]


def read_chats(
    lines: Iterable[str], *, count: int, speed: float, block_chars: int, max_blocks: int
) -> list[Chat]:
    """The first `count` requests of a trace, one question each.

    Args:
        speed: how many times faster than recorded they arrive.
        block_chars: text that stands for one block of the trace, which had 512 tokens.
        max_blocks: of a request; what is longer is cut.

    Raises:
        ValueError: a line lacks `timestamp` or `hash_ids`.
    """
    chats = []
    for line in itertools.islice(lines, count):
        request = json.loads(line)
        try:
            ids, at_ms = request["hash_ids"], request["timestamp"]
        except KeyError as error:
            raise ValueError(f"a request of the trace has no {error}: {line[:80]!r}") from None
        text = " ".join(_block(id, block_chars) for id in ids[:max_blocks])
        chats.append(Chat(at_ms / 1000 / speed, None, (text,)))
    return chats


def _block(id: int, num_chars: int) -> str:
    rng = random.Random(id)
    words = f"{id}:"
    while len(words) < num_chars:
        words += " " + rng.choice(TOPICS)
    return words[:num_chars]


def figures(turns: Sequence[Turn]) -> Figures:
    """Pools `turns`; those that failed count as errors only."""
    good = [turn for turn in turns if turn.error is None]
    later = [turn for turn in good if turn.number > 0]
    ttfts = [turn.ttft_s for turn in good if turn.ttft_s is not None]
    return Figures(
        turns=len(turns),
        errors=dict(Counter(turn.error for turn in turns if turn.error is not None)),
        prompt_tokens=sum(turn.prompt_tokens for turn in good),
        hit_rate=_hit_rate(good),
        later_hit_rate=_hit_rate(later),
        ttft_ms_p50=_percentile_ms(ttfts, 50),
        ttft_ms_p99=_percentile_ms(ttfts, 99),
    )


def _hit_rate(turns: Sequence[Turn]) -> float:
    prompt_tokens = sum(turn.prompt_tokens for turn in turns)
    cached_tokens = sum(turn.cached_tokens for turn in turns)
    return cached_tokens / prompt_tokens if prompt_tokens else float("nan")


def _percentile_ms(seconds: Sequence[float], q: float) -> float:
    return float(np.percentile(seconds, q)) * 1000 if seconds else float("nan")


async def hold(client: SeedanceClient, chat: Chat, max_tokens: int) -> list[Turn]:
    """Asks all questions of a chat; one that fails ends it."""
    said = [{"role": "system", "content": chat.system}] if chat.system is not None else []
    turns = []
    for number, question in enumerate(chat.questions):
        said.append({"role": "user", "content": question})
        # A stored answer would measure the cache instead of the engine.
        stream = client.stream(
            said, max_tokens=max_tokens, temperature=0.0, ignore_eos=True, cache="bypass"
        )
        try:
            async with asyncio.timeout(TIMEOUT_S):
                answer = "".join([delta.text async for delta in stream])
        except (ServingError, ConnectionLost, TimeoutError) as error:
            turns.append(Turn(number, error=f"{type(error).__name__}: {error}"))
            break
        assert stream.done is not None
        usage = stream.done.usage
        turns.append(Turn(number, stream.ttft_s, usage.prompt_tokens, usage.cached_tokens))
        said.append({"role": "assistant", "content": answer})
    return turns


async def run_chats(
    url: str,
    chats: Sequence[Chat],
    max_tokens: int,
    clock: Callable[[], float] = time.monotonic,
) -> list[Turn]:
    """Holds all chats, each from its time on."""
    async with AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(SeedanceClient(url))
            for _ in range(min(SOCKETS, len(chats)))
        ]
        begun_s = clock()

        async def begin(client: SeedanceClient, chat: Chat) -> list[Turn]:
            await asyncio.sleep(begun_s + chat.begins_s - clock())
            return await hold(client, chat, max_tokens)

        pairs = zip(itertools.cycle(clients), chats, strict=False)
        held = await asyncio.gather(*itertools.starmap(begin, pairs))
    return [turn for turns in held for turn in turns]


def server_config(
    document: dict[str, Any], policy: str, port: int, options: argparse.Namespace
) -> dict[str, Any]:
    """The operator's config with this many replicas, this policy, and no prompt cache."""
    config = copy.deepcopy(document)
    config["http_options"] = {"host": "127.0.0.1", "port": port}
    args = config["applications"][0].setdefault("args", {})
    args["cache"] = {"enabled": False}
    args["routing"] = {"policy": policy, "margin_tokens": options.margin_tokens}
    args.setdefault("model", {}).update(num_replicas=options.replicas, num_threads=options.threads)
    return config


def measure(
    policy: str, document: dict[str, Any], chats: Sequence[Chat], options: argparse.Namespace
) -> list[Turn]:
    """Starts a server with the policy, warms it up, holds the chats, stops it."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    warm_up = make_chats(
        2 * options.replicas, options.seed + 1_000_003, turns=1, systems=1, rate_per_s=100
    )

    async def warm_up_and_run() -> list[Turn]:
        await run_chats(url, warm_up, 4)
        return await run_chats(url, chats, options.max_tokens)

    with tempfile.TemporaryDirectory(prefix="sdb-") as folder:
        file = Path(folder) / "serve_config.yaml"
        file.write_text(yaml.safe_dump(server_config(document, policy, port, options)))
        command = [sys.executable, "-c", "from app.cli import main; main()", "serve", str(file)]
        with serving(command, url):
            return asyncio.run(warm_up_and_run())


def table(results: dict[str, Figures]) -> str:
    """The figures of each policy side by side, as Markdown."""
    rows: tuple[tuple[str, Callable[[Figures], str]], ...] = (
        ("turns", lambda f: f"{f.turns}"),
        ("errors", lambda f: f"{sum(f.errors.values())}"),
        ("prompt tokens", lambda f: f"{f.prompt_tokens:,}"),
        ("prefix hit rate", lambda f: f"{f.hit_rate:.1%}"),
        ("… of later turns", lambda f: f"{f.later_hit_rate:.1%}"),
        ("TTFT p50, ms", lambda f: f"{f.ttft_ms_p50:.0f}"),
        ("TTFT p99, ms", lambda f: f"{f.ttft_ms_p99:.0f}"),
    )
    lines = ["| | " + " | ".join(results) + " |", "|---" * (1 + len(results)) + "|"]
    for name, cell in rows:
        lines.append(f"| {name} | " + " | ".join(map(cell, results.values())) + " |")
    return "\n".join(lines)


def parse_options(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the command line.

    Raises:
        SystemExit: a value is out of range.
    """
    parser = argparse.ArgumentParser(prog="python -m bench.routing", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--chats", type=int, default=32, help="or requests of the trace")
    parser.add_argument("--turns", type=int, default=4, help="questions of each chat")
    parser.add_argument("--systems", type=int, default=4, help="system prompts they share")
    parser.add_argument("--rate", type=float, default=1.0, help="chats that begin in a second")
    parser.add_argument("--max-tokens", type=int, default=24, help="length of each answer")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--trace", type=Path, help="requests from this file instead")
    parser.add_argument("--speed", type=float, default=10.0, help="of the trace")
    parser.add_argument("--block-chars", type=int, default=128, help="text of a trace's block")
    parser.add_argument("--max-blocks", type=int, default=24, help="of one of its requests")
    parser.add_argument("--replicas", type=int, default=2, help="of the model")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of each")
    parser.add_argument("--margin-tokens", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=2, help="times that each is measured")
    parser.add_argument("--config", type=Path, default=ROOT / "serve_config.yaml")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    options = parser.parse_args(argv)
    for name in ("chats", "turns", "systems", "max_tokens", "replicas", "threads", "rounds"):
        if getattr(options, name) < 1:
            raise SystemExit(f"{name} is {getattr(options, name)}, the least is 1")
    for name in ("rate", "speed"):
        if not getattr(options, name) > 0:
            raise SystemExit(f"{name} is {getattr(options, name)}, it must be above 0")
    return options


def chats_from(options: argparse.Namespace) -> list[Chat]:
    """The workload that the command line asks for.

    Raises:
        ValueError: the trace is of another kind.
        OSError: it cannot be read.
    """
    if options.trace is None:
        return make_chats(
            options.chats,
            options.seed,
            turns=options.turns,
            systems=options.systems,
            rate_per_s=options.rate,
        )
    with options.trace.open() as lines:
        return read_chats(
            lines,
            count=options.chats,
            speed=options.speed,
            block_chars=options.block_chars,
            max_blocks=options.max_blocks,
        )


def main() -> int:
    options = parse_options()
    # The servers are stopped on the way out, however we end.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    turns: dict[str, list[Turn]] = {policy: [] for policy in POLICIES}
    try:
        document, _ = read_config(options.config)
        chats = chats_from(options)
        for number in range(options.rounds):
            for policy in POLICIES:
                print(f"round {number + 1}, {policy}", file=sys.stderr, flush=True)
                turns[policy] += measure(policy, document, chats, options)
    except (SettingsError, ClusterFailed, OSError, ValueError) as error:
        raise SystemExit(f"bench: {error}") from None
    results = {policy: figures(each) for policy, each in turns.items()}
    if options.json:
        print(json.dumps({**conditions(), **{name: vars(each) for name, each in results.items()}}))
    else:
        facts = "\n".join(f"{name:12} {value}" for name, value in conditions().items())
        print(f"\n{facts}\n\n{table(results)}")
        for text in {text: None for each in results.values() for text in each.errors}:
            print(f"error: {text}")
    return 1 if any(each.errors for each in results.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
