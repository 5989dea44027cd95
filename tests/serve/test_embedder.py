"""Texts to vectors: the thread that many share, what is remembered, and the embedders themselves."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from deployments import embedder as embedder_module
from deployments.embedder import Embeddings, Vector, load_embedder
from deployments.embedder_openvino import OpenVINOEmbedder, UnsupportedModel
from deployments.embedder_thread import EmbedderThread
from tests.protocol.fakes import FakeClock

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "how", "much", "is", "it", "?", "a", "b", "c"]
MAX_TOKENS = 40


# ------------------------------------------------------------------------------- the thread


class HeldThread(Executor):
    """Does what it is given only when the test says so, in the thread of the test."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], None]] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()

        def call() -> None:
            try:
                future.set_result(fn(*args, **kwargs))
            except Exception as exc:
                future.set_exception(exc)

        self.calls.append(call)
        return future

    async def run_next(self) -> None:
        self.calls.pop(0)()
        await settle()


class LengthEmbedder:
    """The vector of a text is its length; notes the batches and the threads they came in."""

    def __init__(self, *, poison: str | None = None) -> None:
        self.batches: list[list[str]] = []
        self.threads: set[int] = set()
        self._poison = poison

    def embed(self, texts: list[str]) -> list[Vector | None]:
        self.batches.append(texts)
        self.threads.add(threading.get_ident())
        if self._poison in texts:
            raise RuntimeError("cannot embed this")
        return [np.array([len(text)], dtype=np.float32) if text else None for text in texts]


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def ask(shared: EmbedderThread, *texts: str) -> list[asyncio.Task[Vector | None]]:
    tasks = [asyncio.create_task(shared.embed(text)) for text in texts]
    await settle()
    return tasks


async def test_a_text_goes_at_once_and_those_that_come_meanwhile_go_together() -> None:
    embedder, thread = LengthEmbedder(), HeldThread()
    shared = EmbedderThread(embedder, threads=thread)
    tasks = await ask(shared, "a")
    tasks += await ask(shared, "bb", "", "dddd")
    assert len(thread.calls) == 1
    await thread.run_next()
    assert tasks[0].done()
    assert not tasks[1].done()
    await thread.run_next()
    assert embedder.batches == [["a"], ["bb", "", "dddd"]]
    assert [None if task.result() is None else task.result()[0] for task in tasks] == [
        1,
        2,
        None,
        4,
    ]
    await settle()
    assert thread.calls == []


async def test_an_idle_thread_starts_again() -> None:
    embedder, thread = LengthEmbedder(), HeldThread()
    shared = EmbedderThread(embedder, threads=thread)
    for text in ("a", "b"):
        (task,) = await ask(shared, text)
        await thread.run_next()
        assert task.done()


async def test_a_batch_is_bounded_in_texts_and_in_characters() -> None:
    embedder, thread = LengthEmbedder(), HeldThread()
    shared = EmbedderThread(embedder, threads=thread)
    await ask(shared, *(["short"] * 40), "x" * 3000, "y" * 1500, "z" * 1500)
    while thread.calls:
        await thread.run_next()
    assert [len(batch) for batch in embedder.batches] == [32, 8, 1, 1, 1]


async def test_one_text_does_not_fail_its_neighbours() -> None:
    embedder, thread = LengthEmbedder(poison="bad"), HeldThread()
    shared = EmbedderThread(embedder, threads=thread)
    tasks = await ask(shared, "first", "good", "bad", "fine")
    while thread.calls:
        await thread.run_next()
    assert [task.exception() is None for task in tasks] == [True, True, False, True]


async def test_a_text_that_nobody_waits_for_is_not_embedded() -> None:
    embedder, thread = LengthEmbedder(), HeldThread()
    shared = EmbedderThread(embedder, threads=thread)
    tasks = await ask(shared, "first")
    tasks += await ask(shared, "gone", "there")
    tasks[1].cancel()
    tasks[0].cancel()
    await settle()
    while thread.calls:
        await thread.run_next()
    assert embedder.batches == [["first"], ["there"]]
    assert tasks[2].done()


async def test_an_embedder_that_loses_a_text_is_an_error_for_all_of_the_batch() -> None:
    class Forgetful(LengthEmbedder):
        def embed(self, texts: list[str]) -> list[Vector | None]:
            return []

    shared = EmbedderThread(Forgetful())
    with pytest.raises(ValueError, match="0 vectors for 1 texts"):
        await shared.embed("a")


async def test_one_thread_embeds_and_never_that_of_the_event_loop() -> None:
    embedder = LengthEmbedder()
    shared = EmbedderThread(embedder)
    await asyncio.gather(*(shared.embed(str(number)) for number in range(100)))
    await shared.embed("again")
    assert len(embedder.threads) == 1
    assert threading.get_ident() not in embedder.threads


# ------------------------------------------------------------------------- what is remembered


async def test_what_is_remembered_is_bounded_in_bytes_and_the_oldest_use_goes_first() -> None:
    async def embed(text: str) -> Vector | None:
        return np.zeros(128, dtype=np.float32)  # 512 bytes and as many of book-keeping

    memory = Embeddings(embed, clock=FakeClock(), max_bytes=3 * 1024)
    for digest in ("1", "2", "3"):
        await memory.begin(digest, digest)
    assert memory.known("1") is not None
    await memory.begin("4", "4")
    assert memory.known("2") is None
    assert all(memory.known(digest) is not None for digest in ("1", "3", "4"))


async def test_a_vector_larger_than_the_memory_is_given_and_not_remembered() -> None:
    async def embed(text: str) -> Vector | None:
        return np.zeros(128, dtype=np.float32)

    memory = Embeddings(embed, clock=FakeClock(), max_bytes=1000)
    assert await memory.begin("1", "1") is not None
    assert memory.known("1") is None


# ------------------------------------------------------------------------------- the models


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random BERT with the files that a sentence-transformers folder has."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import BertConfig, BertModel
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    folder = tmp_path_factory.mktemp("tiny")
    config = BertConfig(
        vocab_size=len(WORDS),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=64,
        initializer_range=0.5,
    )
    BertModel(config).save_pretrained(folder)
    tokenizer = Tokenizer(
        models.WordPiece({word: place for place, word in enumerate(WORDS)}, unk_token="[UNK]")
    )
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(folder / "tokenizer.json"))
    change(folder, "modules.json", [{"type": f"x.{name}"} for name in ("Transformer", "Pooling")])
    change(folder, "sentence_bert_config.json", {"max_seq_length": MAX_TOKENS})
    pool(folder, "mean_tokens")
    return folder


def change(folder: Path, name: str, value: Any) -> None:
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(value))


def pool(folder: Path, mode: str) -> None:
    modes = {f"pooling_mode_{name}": name == mode for name in ("mean_tokens", "cls_token", "max")}
    change(folder, "1_Pooling/config.json", modes)


def copy_of(folder: Path, tmp_path: Path) -> Path:
    for path in folder.rglob("*"):
        if path.is_file():
            to = tmp_path / path.relative_to(folder)
            to.parent.mkdir(exist_ok=True)
            to.write_bytes(path.read_bytes())
    return tmp_path


def reference(folder: Path, text: str, *, mode: str = "mean") -> Vector:
    """What transformers' own BERT makes of a text, pooled and of unit norm."""
    import torch
    from tokenizers import Tokenizer
    from transformers import BertModel

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    model = BertModel.from_pretrained(folder).eval()
    with torch.inference_mode():
        hidden = model(torch.tensor([tokenizer.encode(text).ids])).last_hidden_state[0].numpy()
    pooled = hidden.mean(axis=0) if mode == "mean" else hidden[0]
    vector: Vector = pooled / np.linalg.norm(pooled)
    return vector


TEXTS = ["how much is it ?", "", "a", "how is a ?", "b " * 30, "a b c " * 4, "it is", "c " * 38]


def test_a_batch_gives_each_text_what_it_gets_alone_and_what_bert_gives(tiny_folder: Path) -> None:
    embedder = OpenVINOEmbedder(tiny_folder, precision="f32")
    together = embedder.embed(TEXTS * 3)
    assert len(together) == 3 * len(TEXTS)
    for place, text in enumerate(TEXTS):
        expected = reference(tiny_folder, text)
        alone = embedder.embed([text])[0]
        for vector in (alone, together[place], together[place + 2 * len(TEXTS)]):
            assert vector is not None
            assert vector.dtype == np.float32
            assert np.allclose(vector, expected, atol=1e-4)


def test_the_first_token_may_stand_for_the_text(tiny_folder: Path, tmp_path: Path) -> None:
    folder = copy_of(tiny_folder, tmp_path)
    pool(folder, "cls_token")
    vectors = OpenVINOEmbedder(folder, precision="f32").embed(TEXTS)
    for text, vector in zip(TEXTS, vectors, strict=True):
        assert vector is not None
        assert np.allclose(vector, reference(folder, text, mode="cls"), atol=1e-4)


def test_weights_of_half_precision_under_another_prefix_are_read(
    tiny_folder: Path, tmp_path: Path
) -> None:
    folder = copy_of(tiny_folder, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    halves = {f"bert.{name}": tensor.astype(np.float16) for name, tensor in tensors.items()}
    save_file(halves, folder / "model.safetensors")
    vector = OpenVINOEmbedder(folder, precision="f32").embed(["how much is it ?"])[0]
    assert vector is not None
    assert vector @ reference(tiny_folder, "how much is it ?") > 0.999


def test_a_text_longer_than_the_window_has_no_vector(tiny_folder: Path) -> None:
    embedder = OpenVINOEmbedder(tiny_folder, precision="f32")
    just, over = "a " * (MAX_TOKENS - 2), "a " * (MAX_TOKENS - 1)
    vectors = embedder.embed([over, just, "x" * 1_000_000])
    assert [vector is None for vector in vectors] == [True, False, True]
    assert embedder.embed([]) == []


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("config.json", {"model_type": "roberta"}, "model_type is roberta"),
        ("config.json", {"model_type": "bert", "hidden_act": "relu"}, "hidden_act is relu"),
        ("modules.json", [{"type": "x.Transformer"}, {"type": "x.Dense"}], "Transformer, Dense"),
        ("1_Pooling/config.json", {"pooling_mode_max_tokens": True}, "pooling_mode_max_tokens"),
        ("config_sentence_transformers.json", {"default_prompt_name": "query"}, "prompt"),
    ],
)
def test_another_kind_of_model_is_told_apart(
    tiny_folder: Path, tmp_path: Path, name: str, value: Any, message: str
) -> None:
    folder = copy_of(tiny_folder, tmp_path)
    change(folder, name, value)
    with pytest.raises(UnsupportedModel, match=message):
        OpenVINOEmbedder(folder)


def test_a_folder_without_a_file_or_a_tensor_is_another_kind_of_model(
    tiny_folder: Path, tmp_path: Path
) -> None:
    folder = copy_of(tiny_folder, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors.pop("encoder.layer.1.output.dense.bias")
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(UnsupportedModel, match=r"encoder\.layer\.1\.output\.dense\.bias"):
        OpenVINOEmbedder(folder)
    (folder / "sentence_bert_config.json").unlink()
    with pytest.raises(UnsupportedModel, match="sentence_bert_config"):
        OpenVINOEmbedder(folder)


@pytest.mark.parametrize("obstacle", ["no openvino", "another model", "broken"])
def test_torch_embeds_where_openvino_cannot(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, obstacle: str
) -> None:
    folder = copy_of(tiny_folder, tmp_path)
    if obstacle == "no openvino":
        monkeypatch.setitem(sys.modules, "deployments.embedder_openvino", None)
    elif obstacle == "another model":
        change(folder, "config.json", {"model_type": "mpnet"})
    else:
        (folder / "model.safetensors").write_bytes(b"rubbish")
    taken: list[Path] = []
    monkeypatch.setattr("deployments.embedder_torch.TorchEmbedder.__init__", _take(taken))
    assert type(load_embedder(folder)).__name__ == "TorchEmbedder"
    assert taken == [folder]


def _take(taken: list[Path]) -> Callable[[Any, Path], None]:
    def init(self: Any, folder: Path) -> None:
        taken.append(folder)

    return init


@pytest.mark.model
def test_the_default_embedder_gives_the_vectors_of_sentence_transformers() -> None:
    from deployments.embedder_torch import TorchEmbedder
    from deployments.engine.weights import DEFAULT_EMBEDDER, resolve

    model = resolve(DEFAULT_EMBEDDER)
    assert model is not None
    texts = [
        *["What is the capital of France?", "Cancel my subscription", "a", "", " ", "\n", "?"],
        *[
            "法国的首都是哪里？",
            "¿Cuál es la capital de Francia?",
            "Wie heißt Österreichs Hauptstadt?",
        ],
        *[
            "ما هي عاصمة فرنسا؟",
            "फ्रांस की राजधानी क्या है?",
            "🙂👩‍👩‍👧",
            "e\u0301\u200b\u00ad",
            "\x00\x07",
        ],
        *["def f(x):\n    return x ** 2", "[CLS] [SEP] [PAD]", "I paid 1,234.56 € on 2026-11-30."],
        *["word " * 100, "a " * 254, "a " * 255, "x" * 9000, "Donaudampfschifffahrt" * 40],
    ]
    given, expected = load_embedder(model.path), TorchEmbedder(model.path)
    assert isinstance(given, OpenVINOEmbedder)
    assert embedder_module.MAX_TOKEN_CHARS * 256 < 9000
    for one, other in zip(given.embed(texts), expected.embed(texts), strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert one @ other > 1 - 1e-3
            assert abs(one @ one - 1) < 1e-5
