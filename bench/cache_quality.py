"""How often is the semantic cache wrong, and how often does it help? On pairs with known answers.

    python -m bench.cache_quality --data ../shared/data --embedder FOLDER --work FOLDER

Prints the tables of docs/benchmarks.md, "Cache quality": what is served of each published set of
pairs by the defaults, precision against recall beside plain cosine, and the error budget over
streams of real prompts, beside static thresholds and vCache's decision rule. `--work` keeps
embeddings and scores of pairs; `--out-of-fold` takes the scores that `bench.train_verifier` found
for pairs while it had not seen them.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench.train_verifier import embed_all
from cache.answer import StoredAnswer
from cache.budget import BudgetConfig, ErrorBudget, upper_bound
from cache.decision import Candidate, Decider, Verdict
from cache.guards import compare, disagreement
from cache.key import make_key
from cache.reading import Reading, understand
from cache.verifier import Pair, Verifier

Matrix = NDArray[np.float32]

NEAREST = 24
FLOOR = 0.55
ANSWER = StoredAnswer(b"an answer", 4, "r1")


@dataclass(frozen=True)
class LabelledPair:
    """Two prompts, and whether they have the same answer."""

    name: str
    a: str
    b: str
    is_same: bool


def load_pairs(data: Path) -> list[LabelledPair]:
    pairs: list[LabelledPair] = []
    folder = data / "pairs"
    for line in (folder / "fow.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        name = f"FOW {row['category']}, {row['style']}"
        pairs.append(LabelledPair(name, row["a"], row["b"], row["same_answer"]))
    for line in (folder / "checklist_qqp.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        name = f"CheckList {row['cat']}: {row['test']}"
        pairs.append(LabelledPair(name, row["a"], row["b"], row["label"] == 1))
    return pairs


def load_banking(data: Path) -> list[tuple[str, str]]:
    with (data / "pairs" / "banking77_train.csv").open(encoding="utf-8", newline="") as file:
        rows = {row["text"].strip(): row["category"] for row in csv.DictReader(file)}
    return list(rows.items())


def load_mock(data: Path) -> list[tuple[str, str]]:
    rows = json.loads((data / "pairs" / "gptcache_mock_data.json").read_text(encoding="utf-8"))
    return [(row["origin"], row["similar"]) for row in rows]


# One pair at a time, by the defaults


class FreshCache:
    """Asks a decider that has seen nothing yet about one pair."""

    def __init__(self, verifier: Verifier, vectors: dict[str, Matrix]) -> None:
        self._budget = ErrorBudget(prior=verifier.calibration)
        self._decider = Decider(budget=self._budget, verifier=verifier, rng=random.Random(0))
        self._vectors = vectors
        self._asked = 0

    def verdict(self, stored: str, asked: str, history: object = (), past: object = ()) -> Verdict:
        self._asked += 1
        keys = [
            make_key(
                {"tenant": "t", "history": json.dumps(turns)},
                text,
                max_tokens=None,
                allow_semantic=True,
            )
            for text, turns in ((stored, history), (asked, past))
        ]
        near = float(self._vectors[stored] @ self._vectors[asked])
        candidate = Candidate(keys[0], ANSWER, 0.0, near, self._vectors[stored])
        return self._decider.choose(
            keys[1], self._vectors[asked], [candidate], ttl_s=60.0, category=str(self._asked)
        )


def served_table(
    pairs: Sequence[LabelledPair], cache: FreshCache, vectors: dict[str, Matrix]
) -> None:
    counts: dict[tuple[str, bool], Counter[str]] = defaultdict(Counter)
    for pair in pairs:
        verdict = cache.verdict(pair.a, pair.b)
        likeness = float(vectors[pair.a] @ vectors[pair.b])
        groups = (pair.name, f"{pair.name.split()[0]}, all")
        for group in groups:
            count = counts[group, pair.is_same]
            count["pairs"] += 1
            count["served"] += verdict.action == "serve"
            count["cosine 0.85"] += likeness >= 0.85
            count["cosine 0.95"] += likeness >= 0.95
            count["same wording"] += disagreement(pair.a, pair.b) is None
    print(
        "| set | should be served | pairs | served | same wording only | cosine ≥ 0.85 | ≥ 0.95 |"
    )
    print("|---|---|---|---|---|---|---|")
    for (name, is_same), c in sorted(counts.items()):
        shown = [f"{100 * c[key] / c['pairs']:.1f} %" for key in
                 ("served", "same wording", "cosine 0.85", "cosine 0.95")]  # fmt: skip
        print(f"| {name} | {'yes' if is_same else 'no'} | {c['pairs']} | {' | '.join(shown)} |")
    for name in ("FOW, all", "CheckList, all"):
        right, wrong = counts[name, True]["served"], counts[name, False]["served"]
        print(f"\nprecision of what is served, {name}: {right / max(right + wrong, 1):.4f}")


def conversations_table(data: Path, cache: FreshCache) -> None:
    counts: dict[bool, Counter[str]] = defaultdict(Counter)
    lines = (data / "pairs" / "fow_conversations.jsonl").read_text(encoding="utf-8").splitlines()
    for line in lines:
        row = json.loads(line)
        (*history, stored), (*past, asked) = row["a"], row["b"]
        verdict = cache.verdict(stored["content"], asked["content"], history, past)
        alone = cache.verdict(stored["content"], asked["content"])
        count = counts[row["same_answer"]]
        count["pairs"] += 1
        count["served"] += verdict.action == "serve" or (
            history == past and stored["content"] == asked["content"]
        )
        count["alone"] += alone.action == "serve"
    for is_same, c in sorted(counts.items()):
        label = "should be served" if is_same else "traps"
        print(f"FOW conversations, {label}: {c['served']} of {c['pairs']} served"
              f" (were only the last turn looked at: {c['alone']})")  # fmt: skip


# Precision against recall


def ranking_table(
    mock: Sequence[tuple[str, str]], verifier: Verifier, vectors: dict[str, Matrix]
) -> None:
    """Looks each `similar` up among all `origin`s; and judges pairs, own against nearest other."""
    origins = sorted({origin for origin, _ in mock})
    matrix = np.stack([vectors[text] for text in origins])
    readings = {text: understand(text) for row in mock for text in row}
    found: dict[str, list[tuple[float, bool]]] = defaultdict(list)
    judged: dict[str, list[tuple[float, bool]]] = defaultdict(list)
    for origin, similar in mock:
        likeness = matrix @ vectors[similar]
        nearest = np.argsort(-likeness)[:4]
        pairs = [
            Pair(compare(readings[origins[i]], readings[similar]), vectors[origins[i]])
            for i in nearest
        ]
        scores = verifier.score(vectors[similar], pairs)
        best = int(scores.argmax())
        found["cosine"].append((float(likeness[nearest[0]]), origins[nearest[0]] == origin))
        found["verifier"].append((float(scores[best]), origins[nearest[best]] == origin))
        other = next(i for i in np.argsort(-likeness) if origins[i] != origin)
        for text, is_own in ((origin, True), (origins[other], False)):
            pair = Pair(compare(readings[text], readings[similar]), vectors[text])
            score = float(verifier.score(vectors[similar], [pair])[0])
            judged["cosine"].append((float(vectors[text] @ vectors[similar]), is_own))
            judged["verifier"].append((score, is_own))
    print("| gptcache_mock_data | scorer | precision at recall 0.3 | 0.62 | 0.8 | 0.9 | AUC |")
    print("|---|---|---|---|---|---|---|")
    for task, scored, positives in (
        ("look-up among all origins", found, len(mock)),
        ("own against the nearest other", judged, len(mock)),
    ):
        for name, rows in scored.items():
            shown = [
                f"{precision_at(rows, recall, positives):.4f}" for recall in (0.3, 0.62, 0.8, 0.9)
            ]
            print(f"| {task} | {name} | {' | '.join(shown)} | {auc(rows):.4f} |")


def precision_at(rows: Sequence[tuple[float, bool]], recall: float, positives: int) -> float:
    """Precision at the highest cut that reaches `recall`; NaN where none does."""
    right = 0
    for place, (_, is_right) in enumerate(sorted(rows, key=lambda row: -row[0]), 1):
        right += is_right
        if right >= recall * positives:
            return right / place
    return math.nan


def auc(rows: Sequence[tuple[float, bool]]) -> float:
    """Chance that a right one outranks a wrong one."""
    scores = np.array([score for score, _ in rows])
    labels = np.array([label for _, label in rows])
    if labels.all() or not labels.any():
        return math.nan
    ranks = np.empty(len(scores))
    order = np.argsort(scores, kind="stable")
    ranks[order] = np.arange(1, len(scores) + 1)
    right = labels.sum()
    return float((ranks[labels].sum() - right * (right + 1) / 2) / (right * (~labels).sum()))


# Streams


@dataclass(frozen=True)
class Link:
    """One earlier prompt that may answer a prompt."""

    other: int
    similarity: float
    score: float
    """NaN where a veto stands against it, 2 where the wording is the same."""
    is_right: bool


@dataclass
class World:
    """All prompts of a stream, with their nearest ones."""

    links: list[list[Link]]
    groups: list[str]
    sources: list[str]


def build_world(
    pairs: Sequence[LabelledPair],
    banking: Sequence[tuple[str, str]],
    mock: Sequence[tuple[str, str]],
    vectors: dict[str, Matrix],
    verifier: Verifier,
) -> World:
    """Prompts that may share an answer are of one group; the label of a pair goes before that."""
    groups: dict[str, str] = {}
    sources: dict[str, str] = {}

    def root(text: str) -> str:
        while groups[text] != text:
            text = groups[text]
        return text

    def add(text: str, source: str) -> None:
        groups.setdefault(text, text)
        sources.setdefault(text, source)

    told: dict[tuple[str, str], bool] = {}
    for pair in pairs:
        add(pair.a, pair.name.split()[0])
        add(pair.b, pair.name.split()[0])
        told[pair.a, pair.b] = told[pair.b, pair.a] = pair.is_same
        if pair.is_same:
            groups[root(pair.b)] = root(pair.a)
    for origin, similar in mock:
        add(origin, "GPTCache")
        add(similar, "GPTCache")
        groups[root(similar)] = root(origin)
    intents: dict[str, str] = {}
    for text, intent in banking:
        add(text, "BANKING77")
        groups[root(text)] = root(intents.setdefault(intent, text))
    texts = list(groups)
    matrix = np.stack([vectors[text] for text in texts])
    readings: dict[str, Reading] = {text: understand(text) for text in texts}
    links: list[list[Link]] = []
    for start in range(0, len(texts), 512):
        likeness = matrix[start : start + 512] @ matrix.T
        for row in range(likeness.shape[0]):
            here = start + row
            likeness[row, here] = -1.0
            top = np.argpartition(-likeness[row], NEAREST)[:NEAREST]
            top = top[np.argsort(-likeness[row][top])]
            nearest = [int(i) for i in top if likeness[row, i] >= FLOOR]
            links.append(
                _links(here, nearest, likeness[row], texts, matrix, readings, verifier, told, root)
            )
    return World(links, [root(text) for text in texts], [sources[text] for text in texts])


def _links(
    here: int,
    nearest: Sequence[int],
    likeness: Matrix,
    texts: Sequence[str],
    matrix: Matrix,
    readings: dict[str, Reading],
    verifier: Verifier,
    told: dict[tuple[str, str], bool],
    root: Callable[[str], str],
) -> list[Link]:
    text = texts[here]
    compared = [compare(readings[texts[i]], readings[text]) for i in nearest]
    passing = [k for k, comparison in enumerate(compared) if comparison.veto is None]
    scores = verifier.score(matrix[here], [Pair(compared[k], matrix[nearest[k]]) for k in passing])
    by_place = dict(zip(passing, scores, strict=True))
    found = []
    for k, i in enumerate(nearest):
        is_same_wording = likeness[i] >= 0.95 and disagreement(texts[i], text) is None
        score = 2.0 if is_same_wording else float(by_place.get(k, math.nan))
        is_right = told.get((texts[i], text))
        if is_right is None:
            is_right = root(texts[i]) == root(text)
        found.append(Link(int(i), float(likeness[i]), score, is_right))
    return found


def order_of(world: World, kind: str, length: int, rng: random.Random) -> list[int]:
    """Prompts in the order they are asked, each once.

    `clustered`: source by source and group by group. `adversarial`: first those whose best
    candidate is right, then those whose best candidate is wrong, the most trusted mistakes first.
    """
    chosen = rng.sample(range(len(world.links)), length)
    if kind == "random":
        return chosen
    if kind == "clustered":
        blocks: dict[tuple[str, str], list[int]] = defaultdict(list)
        for place in chosen:
            blocks[world.sources[place], world.groups[place]].append(place)
        names = list(blocks)
        rng.shuffle(names)
        names.sort(key=lambda name: name[0])
        return [place for name in names for place in blocks[name]]
    held = set(chosen)

    def trust(place: int) -> tuple[bool, float]:
        best = max(
            (
                link
                for link in world.links[place]
                if link.other in held and link.score == link.score
            ),
            key=lambda link: link.score,
            default=None,
        )
        return (False, 0.0) if best is None else (not best.is_right, best.score)

    trusted = {place: trust(place) for place in chosen}
    good = [place for place in chosen if not trusted[place][0]]
    bad = sorted((p for p in chosen if trusted[p][0]), key=lambda p: -trusted[p][1])
    # What the mistakes would be served from has to be there already.
    sources = [link.other for place in bad for link in world.links[place] if link.other in held]
    early = [place for place in dict.fromkeys(sources) if place in set(good)]
    rest = [place for place in good if place not in set(early)]
    half = length // 2
    first = [*early, *rest][:half]
    tail = [*early, *rest][half:]
    return [*first, *bad, *tail][:length]


class Rule:
    """Decides on the links to prompts that are held; the nearest first, four at most."""

    def __init__(self, name: str) -> None:
        self.name = name

    def choose(self, links: Sequence[Link], rng: random.Random) -> Link | None:
        raise NotImplementedError


class StaticRule(Rule):
    """Serves the nearest above a cosine; guarded: the nearest without a veto."""

    def __init__(self, threshold: float, *, is_guarded: bool) -> None:
        super().__init__(f"cosine ≥ {threshold}" + (" and vetoes" if is_guarded else ""))
        self._threshold, self._is_guarded = threshold, is_guarded

    def choose(self, links: Sequence[Link], rng: random.Random) -> Link | None:
        for link in links if self._is_guarded else links[:1]:
            if link.similarity >= self._threshold and not (
                self._is_guarded and math.isnan(link.score)
            ):
                return link
        return None


class BudgetRule(Rule):
    """The error budget: of the verifier's scores, or of plain cosine without guards."""

    def __init__(self, limit: float, verifier: Verifier | None) -> None:
        super().__init__("error budget" + ("" if verifier else " on cosine alone"))
        self._budget = ErrorBudget(
            BudgetConfig(max_wrong_rate=limit), prior=verifier.calibration if verifier else ()
        )
        self._is_verified = verifier is not None

    def choose(self, links: Sequence[Link], rng: random.Random) -> Link | None:
        self._budget.count_request("all")
        if self._is_verified:
            links = [link for link in links if link.score == link.score]
            same = next((link for link in links if link.score == 2.0), None)
            if same is not None:
                return same
            best = max(links, key=lambda link: link.score, default=None)
            score = best.score if best else 0.0
        else:
            best = links[0] if links else None
            score = best.similarity if best else 0.0
        if best is None:
            return None
        decision = self._budget.decide("all", score, rng)
        if decision.is_checked:
            self._budget.record(
                "all",
                score,
                best.is_right,
                was_served=decision.action == "serve",
                check_rate=decision.check_rate,
            )
        return best if decision.action == "serve" else None


@dataclass
class _Seen:
    similarities: list[float] = field(default_factory=list)
    labels: list[bool] = field(default_factory=list)


class VCacheRule(Rule):
    """vCache's rule (Schroeder et al. 2025, arXiv 2502.03771), re-implemented from the paper.

    Each entry fits a logistic curve of its own to the similarities and labels that it has seen, six
    at least, and explores with probability tau: the least, over confidence levels 1 - e, of
    `1 - d / (1 - (1 - e) L)`, where L is the curve's value with its threshold put at the upper
    quantile 1 - e. Exploring tells it the label.
    """

    _LEVELS = np.linspace(1e-6, 1 - 1e-6, 50)

    def __init__(self, limit: float) -> None:
        super().__init__("vCache")
        self._limit = limit
        self._seen: dict[int, _Seen] = defaultdict(_Seen)
        self._quantiles = np.array([_normal_quantile(1 - e) for e in self._LEVELS])

    def choose(self, links: Sequence[Link], rng: random.Random) -> Link | None:
        if not links:
            return None
        link = links[0]
        seen = self._seen[link.other]
        if len(seen.labels) >= 6 and rng.random() > self._tau(seen, link.similarity):
            return link
        seen.similarities.append(link.similarity)
        seen.labels.append(link.is_right)
        return None

    def _tau(self, seen: _Seen, similarity: float) -> float:
        threshold, slope, deviation = _fit_logistic(seen.similarities, seen.labels)
        thresholds = np.clip(threshold + self._quantiles * deviation, 0, 1)
        likely = 1 / (1 + np.exp(-np.clip(slope * (similarity - thresholds), -50, 50)))
        taus = 1 - self._limit / np.maximum(1 - (1 - self._LEVELS) * likely, 1e-9)
        return float(np.clip(taus, 0, 1).min())


def _fit_logistic(
    similarities: Sequence[float], labels: Sequence[bool]
) -> tuple[float, float, float]:
    """Threshold, slope and the threshold's deviation, by Newton's method with a faint ridge."""
    x = np.stack([np.ones(len(labels)), np.array(similarities)], axis=1)
    y = np.array(labels, dtype=float)
    beta = np.zeros(2)
    for _ in range(50):
        p = 1 / (1 + np.exp(-np.clip(x @ beta, -50, 50)))
        curvature = x.T @ (x * (p * (1 - p))[:, None]) + 1e-3 * np.eye(2)
        step = np.linalg.solve(curvature, x.T @ (y - p) - 1e-3 * beta)
        beta += step
        if np.abs(step).max() < 1e-8:
            break
    slope = max(beta[1], 1e-6)
    threshold = float(np.clip(-beta[0] / slope, 0, 1))
    gradient = np.array([-1 / slope, beta[0] / slope**2])
    variance = float(gradient @ np.linalg.inv(curvature) @ gradient)
    return threshold, float(slope), math.sqrt(max(variance, 0.0))


def _normal_quantile(p: float) -> float:
    low, high = -8.0, 8.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if math.erf(middle / math.sqrt(2)) < 2 * p - 1 else (low, middle)
    return low


@dataclass
class Outcome:
    """What happened in one half of one stream."""

    requests: int = 0
    hits: int = 0
    wrong: int = 0


def play(
    world: World, order: Sequence[int], rule: Rule, rng: random.Random
) -> tuple[Outcome, Outcome]:
    """Asks in order; what is not served is stored."""
    halves = (Outcome(), Outcome())
    held: set[int] = set()
    for number, place in enumerate(order):
        half = halves[2 * number // len(order)]
        half.requests += 1
        near = [link for link in world.links[place] if link.other in held][:4]
        link = rule.choose(near, rng)
        if link is None:
            held.add(place)
            continue
        half.hits += 1
        half.wrong += not link.is_right
    return halves


def budget_table(world: World, verifier: Verifier, seeds: int, length: int) -> None:
    print("| order | limit | rule | violations (seeds × halves) | wrong, 1st half | 2nd half |"
          " 95 % interval | semantic hits |")  # fmt: skip
    print("|---|---|---|---|---|---|---|---|")
    for kind in ("random", "clustered", "adversarial"):
        orders = [order_of(world, kind, length, random.Random(seed)) for seed in range(seeds)]
        for limit in (0.01, 0.02, 0.05):
            rules: list[Callable[[], Rule]] = [
                partial(BudgetRule, limit, verifier),
                partial(BudgetRule, limit, None),
                partial(VCacheRule, limit),
            ]
            _rows(world, kind, limit, rules, orders)
        fixed: list[Callable[[], Rule]] = [
            partial(StaticRule, t, is_guarded=g) for g in (False, True) for t in (0.85, 0.9, 0.95)
        ]
        _rows(world, kind, None, fixed, orders)


def _rows(
    world: World,
    kind: str,
    limit: float | None,
    rules: Sequence[Callable[[], Rule]],
    orders: Sequence[Sequence[int]],
) -> None:
    for make in rules:
        played = [play(world, order, make(), random.Random(i)) for i, order in enumerate(orders)]
        violations = sum(
            half.wrong > (0.01 if limit is None else limit) * half.requests
            for halves in played
            for half in halves
        )
        rates = [
            sum(halves[i].wrong for halves in played) / sum(halves[i].requests for halves in played)
            for i in (0, 1)
        ]
        requests = sum(half.requests for halves in played for half in halves)
        wrong = sum(half.wrong for halves in played for half in halves)
        hits = sum(half.hits for halves in played for half in halves)
        worst = upper_bound(wrong, requests, 0.025)
        least = 1 - upper_bound(requests - wrong, requests, 0.025)
        shown = "—" if limit is None else f"{100 * limit:.0f} %"
        print(
            f"| {kind} | {shown} | {make().name} | {violations} of {2 * len(played)} |"
            f" {100 * rates[0]:.3f} % | {100 * rates[1]:.3f} % |"
            f" {100 * least:.3f}–{100 * worst:.3f} % | {100 * hits / requests:.3f} % |",
            flush=True,
        )


def texts_of(
    data: Path, pairs: Sequence[LabelledPair], banking: Sequence[tuple[str, str]],
    mock: Sequence[tuple[str, str]],
) -> Iterator[str]:  # fmt: skip
    yield from (text for pair in pairs for text in (pair.a, pair.b))
    yield from (text for text, _ in banking)
    yield from (text for row in mock for text in row)
    lines = (data / "pairs" / "fow_conversations.jsonl").read_text(encoding="utf-8").splitlines()
    for line in lines:
        row = json.loads(line)
        yield from (row[side][-1]["content"] for side in "ab")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--embedder", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--length", type=int, default=8000)
    parser.add_argument("--only", choices=("pairs", "ranking", "budget"))
    args = parser.parse_args()
    if not (args.data / "pairs").is_dir():
        raise SystemExit(f"no pairs in {args.data}, give their folder with --data")
    pairs, banking, mock = load_pairs(args.data), load_banking(args.data), load_mock(args.data)
    vectors = embed_all(
        sorted(set(texts_of(args.data, pairs, banking, mock))), args.embedder, args.work
    )
    verifier = Verifier.load()
    if args.only in (None, "pairs"):
        cache = FreshCache(verifier, vectors)
        served_table(pairs, cache, vectors)
        conversations_table(args.data, cache)
    if args.only in (None, "ranking"):
        ranking_table(mock, verifier, vectors)
    if args.only in (None, "budget"):
        world = build_world(pairs, banking, mock, vectors, verifier)
        budget_table(world, verifier, args.seeds, args.length)


if __name__ == "__main__":
    main()
