"""Trains `cache/data/verifier.npz`, the model that scores pairs of prompts.

    python -m bench.train_verifier --data ../shared/data --embedder FOLDER --work FOLDER

Data: FOW (CC BY 4.0), CheckList's QQP suite (MIT), BANKING77 (CC BY 4.0), and pairs made here:
sentences of BANKING77 reworded or turned by rule or set in pairs, and templates in four languages. Quora's pairs
(`gptcache_mock_data.json`) are not read. `--work` keeps embeddings, so that a second run is quick.

Figures are out of fold: whole test kinds of CheckList, whole category-and-style groups of FOW,
whole intents and whole templates are held out together. What comes out is written to
`cache/data/verifier.npz`, with the calibration that the error budget starts from.
"""

from __future__ import annotations

import argparse
import csv
import json
import random
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from cache import senses
from cache.budget import BAND_FLOORS, Evidence
from cache.guards import MAX_PROMPT_CHARS, Comparison, compare, disagreement
from cache.reading import Reading, understand
from cache.verifier import (
    DATA,
    NUM_WORDING_FEATURES,
    Pair,
    Verifier,
    Weights,
    features,
    save,
)

FOLDS = 6
NEIGHBOURS = 2
HIDDEN = 32
EPOCHS = 10
MEMBERS = 3
CALIBRATION_PER_GROUP = 40
MIN_SIMILARITY = 0.55

Matrix = NDArray[np.float32]


@dataclass(frozen=True)
class Example:
    """A labelled pair; examples of one group are held out together."""

    group: str
    a: str
    b: str
    is_same: bool
    weight: float = 1.0

    @property
    def source(self) -> str:
        return self.group.split(":")[0]


def load_fow(data: Path) -> Iterator[Example]:
    for line in (data / "pairs" / "fow.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        group = f"fow:{row['category']}:{row['style']}"
        yield Example(group, row["a"], row["b"], row["same_answer"], 4.0)


def load_checklist(data: Path) -> Iterator[Example]:
    for line in (data / "pairs" / "checklist_qqp.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        # The preamble differs but the question does not: no cache should bet on that.
        if row["test"].startswith("Irrelevant preamble"):
            continue
        yield Example(f"checklist:{row['test']}", row["a"], row["b"], row["label"] == 1, 0.06)


def load_banking(data: Path) -> list[tuple[str, str]]:
    with (data / "pairs" / "banking77_train.csv").open(encoding="utf-8", newline="") as file:
        return [(row["text"].strip(), row["category"]) for row in csv.DictReader(file)]


# Pairs made by rule

TEMPLATES = {
    "en:entity": "What is the population of [Kenya|Ghana|Laos]?",
    "en:entity2": "How do I reset my [router|thermostat|dishwasher]?",
    "en:entity3": "Is [basil|parsley|thyme] good for rabbits?",
    "en:entity4": "Who directed [Alien|Heat|Seven]?",
    "en:entity5": "Can I park near the [station|hospital|stadium]?",
    "en:entity6": "What does the [budget|premium|family] plan include?",
    "en:entity7": "How do I grow [carrots|mushrooms|melons] at home?",
    "en:entity8": "How do I complain about my [bank|school|neighbour]?",
    "en:entity9": "Are [students|pensioners|veterans] exempt from the fee?",
    "en:entity10": "What are the side effects of [statins|opioids|steroids]?",
    "en:verb": "How do I [cancel|change|confirm|extend] my booking?",
    "en:verb2": "Can I [rent|buy|repair] skis there?",
    "en:verb3": "How do I [wash|iron|fold] a shirt?",
    "en:verb4": "Who [designed|owns|paid for] the bridge?",
    "en:verb5": "How do I [verify|delete|merge] my account?",
    "en:adjective": "What does a [junior|chief|freelance] analyst do?",
    "en:adjective2": "Is [tap|mineral|salt] water bad for plants?",
    "en:adjective3": "Are [electric|diesel|hybrid] cars allowed in the centre?",
    "en:adjective4": "What is the late fee for [library books|rent|taxes]?",
    "en:adjective5": "Do [contractors|interns|managers] get sick pay?",
    "en:modifier": "How much is a [|monthly|group|first-class] pass?",
    "en:modifier2": "Is [|frozen|smoked|raw] salmon healthy?",
    "en:number": "How do I feed [3|30|13] guests?",
    "en:order": "Does [Ivan trust Olga|Olga trust Ivan]?",
    "en:before": "Do I sign [before|after] the inspection?",
    "en:negation": "Should I [|not |never ]answer this letter?",
    "es:entity": "¿Cuánto cuesta un billete a [Roma|Praga|Viena]?",
    "es:verb": "¿Cómo puedo [pintar|limpiar|vender] mi casa?",
    "es:order": "¿[Pedro conoce a Julia|Julia conoce a Pedro]?",
    "de:entity": "Was kostet eine Fahrt nach [Rom|Prag|Wien]?",
    "de:verb": "Wie kann ich mein Fahrrad [putzen|reparieren|verkaufen]?",
    "de:order": "Kennt [Peter Julia|Julia Peter]?",
    "zh:entity": "去[罗马|东京|巴黎]的机票多少钱？",
    "zh:verb": "怎么[洗|修|卖]自行车？",
}
REWORDINGS = {
    "en:how": ["How do I {}?", "How can I {}?", "What's the way to {}?", "how to {}",
               "What is the process to {}?", "Please tell me how I can {}.",
               "I'd like to know how to {}", "what are the steps to {}"],
    "en:cost": ["How much is {}?", "What does {} cost?", "What is the price of {}?",
                "how much does {} cost"],
    "en:allow": ["Can I {}?", "Am I able to {}?", "Is it possible to {}?", "Am I allowed to {}?",
                 "may i {}"],
    "en:where": ["Where can I find {}?", "Where do I find {}?", "where is {}"],
}  # fmt: skip
FILLINGS = {
    "en:how": ["plant tulips", "change my tariff", "renew a passport", "block a caller",
               "print a label", "remove a wine stain", "merge two branches", "join the choir"],
    "en:cost": ["a day pass", "an oil change", "the evening course", "a new roof"],
    "en:allow": ["bring a guest", "pay in cash", "camp by the lake", "swap my seat"],
    "en:where": ["the lost property office", "my tax number", "a cash machine"],
}  # fmt: skip
FOREIGN_SAME = {
    "es": [("¿Cómo puedo cancelar mi cuenta?", "¿Cómo cancelo mi cuenta?"),
           ("¿Cuál es el horario de la tienda?", "¿Cuál es el horario de apertura de la tienda?"),
           ("¿Cómo cambio mi contraseña?", "¿Cómo puedo cambiar mi clave?")],
    "de": [("Wie kann ich mein Konto kündigen?", "Wie kündige ich mein Konto?"),
           ("Wie ändere ich mein Passwort?", "Wie kann ich mein Kennwort ändern?")],
    "zh": [("怎么取消订单？", "如何取消订单？"), ("如何修改密码？", "请问怎样更改密码？")],
}  # fmt: skip
_SLOT = re.compile(r"\[([^\]]*)\]")


def templated() -> Iterator[Example]:
    for name, template in TEMPLATES.items():
        slot = _SLOT.search(template)
        assert slot is not None
        filled = [" ".join(_SLOT.sub(filling, template).split()) for filling in slot[1].split("|")]
        for i, a in enumerate(filled):
            for b in filled[i + 1 :]:
                yield Example(f"template:{name}", a, b, is_same=False)
    for name, forms in REWORDINGS.items():
        for number, filling in enumerate(FILLINGS[name]):
            texts = [form.format(filling) for form in forms]
            for i, a in enumerate(texts):
                for b in texts[i + 1 :]:
                    yield Example(f"template:{name}:{number}", a, b, is_same=True)
                other = FILLINGS[name][(number + 1) % len(FILLINGS[name])]
                yield Example(
                    f"template:{name}:{number}", a, forms[-1].format(other), is_same=False
                )
    for language, pairs in FOREIGN_SAME.items():
        for a, b in pairs:
            yield Example(f"template:{language}", a, b, is_same=True)


def reworded(banking: Sequence[tuple[str, str]], rng: random.Random) -> Iterator[Example]:
    """Sentences of customers, changed by a rule that keeps or turns what they ask."""
    swaps = {
        member: [m for m in group if m != member]
        for group in senses.ENGLISH.same
        for member in group
        if " " not in member and len(member) > 3
    }
    nouns = ["card", "account", "transfer", "payment", "refund", "app", "top-up", "cash", "fee"]
    for text, intent in rng.sample(list(banking), 1600):
        group = f"reworded:{intent}"
        words = text.split()
        at = [i for i, word in enumerate(words) if word.lower() in swaps]
        if at:
            i = rng.choice(at)
            other = rng.choice(swaps[words[i].lower()])
            yield Example(group, text, " ".join([*words[:i], other, *words[i + 1 :]]), True)
        change = rng.choice(["slip", "polite", "not", "noun", "adds", "drops"])
        turned = list(words)
        i = rng.randrange(len(words))
        if change == "slip" and words[i].isalpha() and len(words[i]) > 5:
            k = rng.randrange(1, len(words[i]) - 2)
            word = words[i]
            turned[i] = word[:k] + word[k + 1] + word[k] + word[k + 2 :]
            yield Example(group, text, " ".join(turned), True)
        elif change == "polite":
            yield Example(group, text, f"Hi, {text[0].lower()}{text[1:]} Thanks!", True)
        elif change == "not":
            turned.insert(i, "not")
            yield Example(group, text, " ".join(turned), False)
        elif change == "noun":
            held = [k for k, word in enumerate(words) if word.lower() in nouns]
            if held:
                k = rng.choice(held)
                turned[k] = rng.choice([n for n in nouns if n != words[k].lower()])
                yield Example(group, text, " ".join(turned), False)
        elif change == "adds":
            extra = rng.choice(["in Spain", "for my son", "on Sundays", "with a debit card"])
            yield Example(group, text, f"{text.rstrip('?.')} {extra}?", False)


def neighbours(
    banking: Sequence[tuple[str, str]], vectors: Matrix, count: int
) -> Iterator[Example]:
    """Customers' questions and the nearest of other intents (not the same), or of the same."""
    for i, (text, intent) in enumerate(banking):
        likeness = vectors @ vectors[i]
        likeness[i] = -1
        for j in np.argpartition(-likeness, count)[:count]:
            is_same = banking[j][1] == intent
            if i < j or banking[j][0] == text:
                # An intent is wider than an answer, so that counts little.
                yield Example(
                    f"banking:{intent}", text, banking[j][0], is_same, 0.15 if is_same else 0.5
                )


def paragraphs(
    banking: Sequence[tuple[str, str]], vectors: Matrix, count: int, rng: random.Random
) -> Iterator[Example]:
    """Two sentences each: both reworded by another customer, or one of them exchanged."""
    intents = np.array([intent for _, intent in banking])
    for _ in range(count):
        i, j = rng.sample(range(len(banking)), 2)
        text = f"{banking[i][0]} {banking[j][0]}"
        near = [
            np.argsort(-np.where(intents == intents[k], vectors @ vectors[k], -1)) for k in (i, j)
        ]
        far = np.argsort(-np.where(intents != intents[j], vectors @ vectors[j], -1))
        one, other = banking[near[0][1]][0], banking[near[1][1]][0]
        group = f"paragraph:{intents[i]}"
        reworded = f"{one} {other}" if rng.random() < 0.5 else f"{other} {one}"
        yield Example(group, text, reworded, True, 0.3)
        yield Example(group, text, f"{one} {banking[far[rng.randrange(5)]][0]}", False, 0.3)


# Embeddings


def embed_all(texts: Sequence[str], folder: Path, work: Path) -> dict[str, Matrix]:
    """Unit vectors of all texts, with those of earlier runs taken from `work`."""
    work.mkdir(parents=True, exist_ok=True)
    names, rows = work / "texts.json", work / "vectors.npy"
    known: dict[str, Matrix] = {}
    if names.exists():
        known = dict(zip(json.loads(names.read_text()), np.load(rows), strict=True))
    missing = sorted(set(texts) - known.keys())
    if missing:
        import torch
        from sentence_transformers import SentenceTransformer

        torch.set_num_threads(1)
        model = SentenceTransformer(str(folder), device="cpu", local_files_only=True)
        vectors = model.encode(
            missing, batch_size=64, normalize_embeddings=True, show_progress_bar=False
        )
        known.update(zip(missing, np.asarray(vectors, dtype=np.float32), strict=True))
        names.write_text(json.dumps(list(known)))
        np.save(rows, np.stack(list(known.values())))
    return known


# Training


def rows_of(
    examples: Sequence[Example], vectors: dict[str, Matrix]
) -> tuple[Matrix, list[Comparison]]:
    readings: dict[str, Reading] = {}

    def reading(text: str) -> Reading:
        if text not in readings:
            readings[text] = understand(text)
        return readings[text]

    comparisons = [compare(reading(e.a), reading(e.b)) for e in examples]
    rows = [
        features(vectors[e.a], [Pair(comparison, vectors[e.b])])[0]
        for e, comparison in zip(examples, comparisons, strict=True)
    ]
    return np.stack(rows), comparisons


def fit_likeness(rows: Matrix, labels: Matrix) -> tuple[Matrix, float]:
    """Weights and bias of a logistic regression on the wording features of paragraphs."""
    from sklearn.linear_model import LogisticRegression  # type: ignore[import-untyped]

    wording = rows[:, -NUM_WORDING_FEATURES:]
    mean, deviation = wording.mean(axis=0), np.maximum(wording.std(axis=0), 1e-3)
    model = LogisticRegression(C=0.3, max_iter=1000)
    model.fit((wording - mean) / deviation, labels > 0.5)
    weights = model.coef_[0] / deviation
    bias = float(model.intercept_[0] - (weights * mean).sum())
    return weights.astype(np.float32), bias


def train(
    rows: Matrix,
    labels: Matrix,
    weights: Matrix,
    is_paragraph: NDArray[np.bool_],
    *,
    seed: int,
    members: int,
) -> Weights:
    """Fits `members` small networks and sets them side by side as one."""
    import torch

    torch.set_num_threads(1)
    mean = rows.mean(axis=0)
    scale = 1.0 / np.maximum(rows.std(axis=0), 1e-3)
    even = torch.from_numpy(np.clip((rows - mean) * scale, -5, 5).astype(np.float32))
    targets, importance = torch.from_numpy(labels), torch.from_numpy(weights)
    parts = []
    for number in range(members):
        torch.manual_seed(seed * 100 + number)
        net = torch.nn.Sequential(
            torch.nn.Linear(rows.shape[1], HIDDEN),
            torch.nn.ReLU(),
            torch.nn.Dropout(0.3),
            torch.nn.Linear(HIDDEN, 1),
        )
        optimiser = torch.optim.AdamW(net.parameters(), lr=2e-3, weight_decay=0.05)
        for _ in range(EPOCHS):
            net.train()
            order = torch.randperm(len(rows))
            for start in range(0, len(rows), 512):
                batch = order[start : start + 512]
                # Hidden embeddings keep it from learning templates by heart.
                inputs = torch.nn.functional.dropout(even[batch], 0.1)
                hidden = torch.rand(len(batch), 1) < 0.5
                inputs[:, :-NUM_WORDING_FEATURES] *= ~hidden
                loss = torch.nn.functional.binary_cross_entropy_with_logits(
                    net(inputs).squeeze(1), targets[batch], importance[batch]
                )
                optimiser.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimiser.step()
        parts.append([p.detach().numpy() for p in net.parameters()])
    likeness, likeness_bias = fit_likeness(rows[is_paragraph], labels[is_paragraph])
    return Weights(
        mean=mean.astype(np.float32),
        scale=scale.astype(np.float32),
        hidden=np.concatenate([p[0].T for p in parts], axis=1),
        hidden_bias=np.concatenate([p[1] for p in parts]),
        output=(np.concatenate([p[2][0] for p in parts]) / members).astype(np.float32),
        output_bias=float(np.mean([p[3][0] for p in parts])),
        likeness=likeness,
        likeness_bias=likeness_bias,
    )


def out_of_fold(
    examples: Sequence[Example], rows: Matrix, labels: Matrix, weights: Matrix
) -> Matrix:
    is_paragraph = np.array([e.source == "paragraph" for e in examples])
    folds = np.array([crc32(e.group.encode()) % FOLDS for e in examples])
    scores = np.zeros(len(examples), dtype=np.float32)
    for fold in range(FOLDS):
        held = folds == fold
        if held.any():
            model = train(
                rows[~held],
                labels[~held],
                weights[~held],
                is_paragraph[~held],
                seed=fold,
                members=1,
            )
            scores[held] = Verifier(model).score_features(rows[held])
            print(f"fold {fold}: {held.sum()} held out", flush=True)
    return scores


def calibration(
    examples: Sequence[Example], scores: Matrix, is_askable: Callable[[int], bool]
) -> list[Evidence]:
    """Right and wrong by band, of pairs that would have been decided by score."""
    by_group: dict[str, list[int]] = defaultdict(list)
    for i, example in enumerate(examples):
        if example.source not in ("banking", "paragraph") and is_askable(i):
            by_group[example.group].append(i)
    counts = [[0.0, 0.0] for _ in BAND_FLOORS]
    for members in by_group.values():
        weight = min(1.0, CALIBRATION_PER_GROUP / len(members))
        for i in members:
            band = int(np.searchsorted(BAND_FLOORS, scores[i], side="right")) - 1
            if band >= 0:
                counts[band][not examples[i].is_same] += weight
    return [Evidence(round(right, 2), round(wrong, 2)) for right, wrong in counts]


def report(
    examples: Sequence[Example], scores: Matrix, is_askable: Callable[[int], bool]
) -> list[str]:
    lines = [
        "group | pairs | pass the vetoes | of those at score >= 0.9 | >= 0.97",
        "---|---|---|---|---",
    ]
    groups: dict[tuple[str, bool], Counter[str]] = defaultdict(Counter)
    for i, example in enumerate(examples):
        name = example.group if example.source in ("fow", "checklist") else example.source
        counts = groups[name, example.is_same]
        counts["all"] += 1
        if is_askable(i):
            counts["askable"] += 1
            counts["0.9"] += scores[i] >= 0.9
            counts["0.97"] += scores[i] >= 0.97
    for (name, is_same), c in sorted(groups.items()):
        label = "same" if is_same else "other"
        lines.append(f"{name} ({label}) | {c['all']} | {c['askable']} | {c['0.9']} | {c['0.97']}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--embedder", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=DATA)
    args = parser.parse_args()
    if not (args.data / "pairs").is_dir():
        raise SystemExit(f"no pairs in {args.data}, give their folder with --data")
    banking = load_banking(args.data)
    examples = [*load_fow(args.data), *load_checklist(args.data), *templated()]
    examples += reworded(banking, random.Random(1))
    texts = [t for e in examples for t in (e.a, e.b)] + [text for text, _ in banking]
    vectors = embed_all(texts, args.embedder, args.work)
    matrix = np.stack([vectors[text] for text, _ in banking])
    longer = list(paragraphs(banking, matrix, 900, random.Random(2)))
    vectors |= embed_all([t for e in longer for t in (e.a, e.b)], args.embedder, args.work)
    examples += longer
    examples += neighbours(banking, matrix, NEIGHBOURS)
    examples = [e for e in examples if e.a != e.b and max(len(e.a), len(e.b)) < MAX_PROMPT_CHARS]
    print(f"{len(examples)} examples", flush=True)
    rows, comparisons = rows_of(examples, vectors)
    labels = np.array([e.is_same for e in examples], dtype=np.float32)
    # What the verifier is asked about counts more than what a veto settles anyway.
    passing = np.array([c.veto is None for c in comparisons])
    weights = np.array([e.weight for e in examples], dtype=np.float32) * (0.4 + 0.6 * passing)
    scores = out_of_fold(examples, rows, labels, weights.astype(np.float32))

    def is_askable(i: int) -> bool:
        likeness = float(vectors[examples[i].a] @ vectors[examples[i].b])
        return (
            bool(passing[i])
            and likeness >= MIN_SIMILARITY
            and disagreement(examples[i].a, examples[i].b) is not None
        )

    evidence = calibration(examples, scores, is_askable)
    lines = report(examples, scores, is_askable)
    print("\n".join(lines))
    for floor, found in zip(BAND_FLOORS, evidence, strict=True):
        print(f"score >= {floor}: {found.right:.0f} right, {found.wrong:.1f} wrong")
    doubtful = [
        [e.group, e.a, e.b, e.is_same, float(scores[i])]
        for i, e in enumerate(examples)
        if is_askable(i)
    ]
    (args.work / "out_of_fold.json").write_text(json.dumps(doubtful, ensure_ascii=False))
    is_paragraph = np.array([e.source == "paragraph" for e in examples])
    model = train(rows, labels, weights.astype(np.float32), is_paragraph, seed=99, members=MEMBERS)
    about: dict[str, Any] = {"examples": len(examples), "folds": FOLDS, "report": lines}
    save(args.out, model, evidence, about)
    print(f"{args.out}: {args.out.stat().st_size} bytes")


if __name__ == "__main__":
    main()
