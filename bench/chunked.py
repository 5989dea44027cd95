"""A long prompt in pieces against the same sent whole when its last piece would have come.

    python -m bench.chunked --prompt-tokens 1000 --pieces 10 --over 2

One server, prompts that it has never seen, by turns: whole, in pieces, whole, … The time to the
first token counts from the last piece, or from the request that has it all. A second round has a
stream running beside, and tells how long that one waits between its tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import copy
import itertools
import json
import random
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from app.client import SeedanceClient
from app.client_stream import ClientStream
from app.launcher import read_config
from app.settings import SettingsError
from bench.cluster import ROOT, ClusterFailed, free_port, serving
from bench.compare import conditions
from bench.workload import ASKED, PADDING, TOPICS

CHARS_PER_TOKEN = 4.7
"""Of the workload's English in SmolLM2's vocabulary, about."""
ANSWER_TOKENS = 4
NEIGHBOUR_TOKENS = 4000
QUIET_S = 2.0
"""How long the stream beside runs alone before each prompt."""
TIMEOUT_S = 120.0
KINDS = ("whole", "pieces")
Clock = Callable[[], float]


@dataclass(frozen=True)
class Asked:
    """One prompt: what the client saw of it."""

    kind: str
    ttft_s: float
    prompt_tokens: int
    cached_tokens: int


@dataclass
class Round:
    """All prompts of one round.

    Attributes:
        gaps_s: times between the tokens of the stream beside, while nothing else ran (`alone`)
            and while a prompt of each kind was on its way.
    """

    asked: list[Asked] = field(default_factory=list)
    gaps_s: dict[str, list[float]] = field(default_factory=dict)

    def of(self, kind: str) -> list[Asked]:
        return [asked for asked in self.asked if asked.kind == kind]

    def ttft_s(self, kind: str) -> float:
        """The median."""
        return float(np.median([asked.ttft_s for asked in self.of(kind)]))

    @property
    def ratio(self) -> float:
        """Pieces against whole."""
        return self.ttft_s("pieces") / self.ttft_s("whole")


def make_prompt(number: int, seed: int, num_tokens: int) -> str:
    """About so many tokens of English that begin and go on as no other prompt's do."""
    rng = random.Random(f"{seed} {number}")
    parts = [f"Notes {rng.randrange(10**9)}, taken by number {number}."]
    topic = rng.choice(TOPICS)
    question = rng.choice(ASKED).format(topic=topic)
    while sum(map(len, parts)) + len(parts) + len(question) < num_tokens * CHARS_PER_TOKEN:
        parts.append(f"{rng.choice(PADDING)[:-1]}, as {rng.choice(TOPICS)} shows.")
    return " ".join([*parts, question])


def cut(text: str, count: int) -> list[str]:
    """Pieces of about one length, wherever that cuts words."""
    ends = [round(len(text) * index / count) for index in range(count + 1)]
    return [text[start:end] for start, end in itertools.pairwise(ends)]


def gaps_within(token_at_s: Sequence[float], since_s: float, until_s: float) -> list[float]:
    """Times between tokens of which the later one came within."""
    return [b - a for a, b in itertools.pairwise(token_at_s) if since_s <= b <= until_s]


class Bench:
    """Asks one server.

    Args:
        over_s: from the first piece to the last.
    """

    def __init__(
        self, client: SeedanceClient, *, num_pieces: int, over_s: float, clock: Clock
    ) -> None:
        self._client = client
        self._num_pieces = num_pieces
        self._over_s = over_s
        self._clock = clock

    async def ask(self, kind: str, prompt: str) -> Asked:
        """Sends one prompt and reads its answer."""
        sent_s = self._clock()
        if kind == "whole":
            stream = self._stream(prompt)
        else:

            async def pieces() -> AsyncIterator[str]:
                nonlocal sent_s
                begun_s = self._clock()
                for number, piece in enumerate(cut(prompt, self._num_pieces)):
                    due_s = begun_s + self._over_s * number / max(1, self._num_pieces - 1)
                    await asyncio.sleep(max(0.0, due_s - self._clock()))
                    sent_s = self._clock()
                    yield piece

            stream = self._stream(pieces=pieces())
        first_s: float | None = None
        async with asyncio.timeout(TIMEOUT_S):
            async for _ in stream:
                first_s = first_s or self._clock()
        assert first_s is not None
        assert stream.done is not None
        usage = stream.done.usage
        return Asked(kind, first_s - sent_s, usage.prompt_tokens, usage.cached_tokens)

    async def run(self, prompts: Sequence[str]) -> Round:
        """Prompts by turns whole and in pieces."""
        asked = []
        for kind, prompt in zip(itertools.cycle(KINDS), prompts, strict=False):
            asked.append(await self.ask(kind, prompt))
        return Round(asked)

    async def run_beside(self, prompts: Sequence[str]) -> Round:
        """The same, each with a stream running beside."""
        done = Round(gaps_s={"alone": [], **{kind: [] for kind in KINDS}})
        for kind, prompt in zip(itertools.cycle(KINDS), prompts, strict=False):
            token_at_s: list[float] = []
            has_begun = asyncio.Event()
            talking = asyncio.create_task(self._talk(prompt[:40], token_at_s, has_begun))
            async with asyncio.timeout(TIMEOUT_S):
                await has_begun.wait()
            quiet_s = self._clock()
            await asyncio.sleep(QUIET_S)
            begun_s = self._clock()
            asked = await self.ask(kind, prompt)
            done.asked.append(asked)
            done.gaps_s["alone"] += gaps_within(token_at_s, quiet_s, begun_s)
            done.gaps_s[kind] += gaps_within(token_at_s, begun_s, self._clock())
            talking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await talking
        return done

    async def _talk(self, prompt: str, token_at_s: list[float], has_begun: asyncio.Event) -> None:
        async with self._stream(prompt, max_tokens=NEIGHBOUR_TOKENS) as stream:
            async for _ in stream:
                token_at_s.append(self._clock())
                has_begun.set()

    def _stream(self, prompt: str | None = None, **params: Any) -> ClientStream:
        # A stored answer would measure the cache; held-back text would hide when a token came.
        fixed = {"temperature": 0.0, "ignore_eos": True, "cache": "bypass", "boundary": "utf8"}
        return self._client.stream(prompt, **{"max_tokens": ANSWER_TOKENS, **fixed, **params})


def report(rounds: dict[str, Round]) -> str:
    """Both tables, as Markdown."""
    lines = [
        "| | prompt tokens | whole: TTFT ms | pieces: TTFT ms | computed ahead | ratio |",
        "|---|---|---|---|---|---|",
    ]
    for name, done in rounds.items():
        pieces = done.of("pieces")
        tokens = np.median([asked.prompt_tokens for asked in done.asked])
        ahead = np.median([asked.cached_tokens / asked.prompt_tokens for asked in pieces])
        lines.append(
            f"| {name} | {tokens:.0f} | {_spread(done.of('whole'))} | {_spread(pieces)} "
            f"| {ahead:.0%} | {done.ratio:.2f} |"
        )
    for name, done in rounds.items():
        if not done.gaps_s:
            continue
        lines += [
            "",
            f"| between tokens, {name} | p50 ms | p99 ms | longest ms |",
            "|---|---|---|---|",
        ]
        for what, gaps_s in done.gaps_s.items():
            p50, p99, longest = np.percentile(gaps_s, [50, 99, 100]) * 1000
            lines.append(f"| {what} | {p50:.0f} | {p99:.0f} | {longest:.0f} |")
    return "\n".join(lines)


def _spread(asked: Sequence[Asked]) -> str:
    ttfts_ms = [each.ttft_s * 1000 for each in asked]
    return f"{np.median(ttfts_ms):.0f} ({min(ttfts_ms):.0f} to {max(ttfts_ms):.0f})"


def server_config(document: dict[str, Any], port: int, threads: int) -> dict[str, Any]:
    """The operator's config with one model replica and no prompt cache."""
    config = copy.deepcopy(document)
    config["http_options"] = {"host": "127.0.0.1", "port": port}
    args = config["applications"][0].setdefault("args", {})
    args["cache"] = {"enabled": False}
    args.setdefault("model", {}).update(num_replicas=1, num_threads=threads)
    return config


async def measure(url: str, options: argparse.Namespace) -> dict[str, Round]:
    """Both rounds, after a prompt of each kind that does not count."""
    number = itertools.count()

    def prompts(count: int) -> list[str]:
        made = itertools.islice(number, count)
        return [make_prompt(each, options.seed, options.prompt_tokens) for each in made]

    async with SeedanceClient(url) as client:
        bench = Bench(client, num_pieces=options.pieces, over_s=options.over, clock=time.monotonic)
        await bench.run(prompts(2))
        num_prompts = 2 * options.repeats
        return {
            "nothing else": await bench.run(prompts(num_prompts)),
            "a stream beside": await bench.run_beside(prompts(num_prompts)),
        }


def parse_options(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the command line.

    Raises:
        SystemExit: a value is out of range.
    """
    parser = argparse.ArgumentParser(prog="python -m bench.chunked", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--prompt-tokens", type=int, default=1000, help="of each prompt, about")
    parser.add_argument("--pieces", type=int, default=10)
    parser.add_argument("--over", type=float, default=2.0, help="seconds from first to last piece")
    parser.add_argument("--repeats", type=int, default=5, help="prompts of each kind in a round")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of the model")
    parser.add_argument("--config", type=Path, default=ROOT / "serve_config.yaml")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    options = parser.parse_args(argv)
    for name in ("prompt_tokens", "pieces", "repeats", "threads"):
        if getattr(options, name) < 1:
            raise SystemExit(f"{name} is {getattr(options, name)}, the least is 1")
    if not options.over >= 0:
        raise SystemExit(f"over is {options.over}, the least is 0")
    return options


def main() -> int:
    options = parse_options()
    # The server is stopped on the way out, however we end.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    try:
        document, _ = read_config(options.config)
        with tempfile.TemporaryDirectory(prefix="sdb-") as folder:
            file = Path(folder) / "serve_config.yaml"
            file.write_text(yaml.safe_dump(server_config(document, port, options.threads)))
            command = [sys.executable, "-c", "from app.cli import main; main()", "serve", str(file)]
            with serving(command, url):
                rounds = asyncio.run(measure(url, options))
    except (SettingsError, ClusterFailed, OSError, ValueError) as error:
        raise SystemExit(f"bench: {error}") from None
    if options.json:
        plain = {
            name: {
                "ratio": done.ratio,
                "asked": [vars(a) for a in done.asked],
                "gaps_s": done.gaps_s,
            }
            for name, done in rounds.items()
        }
        print(json.dumps({**conditions(), **plain}))
    else:
        facts = "\n".join(f"{name:12} {value}" for name, value in conditions().items())
        print(f"\n{facts}\n\n{report(rounds)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
