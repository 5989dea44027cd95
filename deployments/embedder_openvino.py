"""BERT sentence embedders on OpenVINO, built from the weights: no torch, loaded in a second.

The graph is that of Devlin et al. 2019 with the pooling of Reimers and Gurevych 2019. Texts of
a batch lie one after the other in a single row, and a mask keeps each to itself: nothing is
padded, and the shapes, each of which OpenVINO compiles kernels for and remembers, are few.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
from numpy.typing import NDArray
from openvino import opset13 as op
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from deployments.embedder import Vector, is_hopelessly_long

Array = NDArray[Any]

EXACT_TOKENS = 64
"""Up to here a row is as long as its texts; beyond, it is filled up to a multiple of 16."""
ROW_TOKENS = 256
"""Texts are put into one row up to this many tokens: attention costs the square of it."""
OUT_OF_REACH = np.float32(-1e9)


class UnsupportedModel(Exception):
    """The folder holds another kind of model."""


class OpenVINOEmbedder:
    """Embeds batches of texts; blocks, so call it from a worker thread, one at a time.

    Args:
        folder: a prepared sentence-transformers model: BERT, mean or CLS pooling.
        precision: of the products; None is bf16 where the processor has it.

    Raises:
        UnsupportedModel: the folder holds another kind of model.
    """

    def __init__(self, folder: Path, *, precision: str | None = None) -> None:
        config = _read(folder / "config.json")
        self._pools_first = _check(folder, config)
        self._max_tokens = min(
            int(_read(folder / "sentence_bert_config.json")["max_seq_length"]),
            int(config["max_position_embeddings"]),
        )
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        core = ov.Core()
        if precision is None:
            can_bf16 = "BF16" in core.get_property("CPU", "OPTIMIZATION_CAPABILITIES")
            precision = "bf16" if can_bf16 else "f32"
        weights = _Weights(folder / "model.safetensors")
        # Unpinned: OpenVINO would pin the thread to the first core, which every process on
        # the machine would share.
        compiled = core.compile_model(
            _graph(weights, config),
            "CPU",
            {
                "INFERENCE_NUM_THREADS": 1,
                "NUM_STREAMS": 1,
                "ENABLE_CPU_PINNING": False,
                "INFERENCE_PRECISION_HINT": precision,
            },
        )
        self._request = compiled.create_infer_request()

    def embed(self, texts: list[str]) -> list[Vector | None]:
        """A unit-norm float32 vector of shape (D,) per text; None for one longer than the window."""
        vectors: list[Vector | None] = [None] * len(texts)
        row: list[tuple[int, list[int]]] = []
        num_tokens = 0
        for place, text in enumerate(texts):
            tokens = self._tokens(text)
            if tokens is None:
                continue
            if row and num_tokens + len(tokens) > ROW_TOKENS:
                self._embed_row(row, vectors)
                row, num_tokens = [], 0
            row.append((place, tokens))
            num_tokens += len(tokens)
        if row:
            self._embed_row(row, vectors)
        return vectors

    def _tokens(self, text: str) -> list[int] | None:
        if is_hopelessly_long(text, self._max_tokens):
            return None
        tokens: list[int] = self._tokenizer.encode(text).ids
        return tokens if len(tokens) <= self._max_tokens else None

    def _embed_row(self, row: list[tuple[int, list[int]]], vectors: list[Vector | None]) -> None:
        ids, positions, mask, starts = _pack([tokens for _, tokens in row])
        outputs = self._request.infer([ids, positions, mask], share_inputs=True)
        hidden: Array = outputs[0][0]
        if self._pools_first:
            pooled = hidden[starts]
        else:
            used = sum(len(tokens) for _, tokens in row)
            # A sum points where the mean points.
            pooled = np.add.reduceat(hidden[:used], starts, axis=0)
        norms = np.linalg.norm(pooled, axis=1, keepdims=True)
        for (place, _), vector in zip(row, pooled / norms, strict=True):
            vectors[place] = np.array(vector, dtype=np.float32)


def _pack(texts: list[list[int]]) -> tuple[Array, Array, Array, list[int]]:
    """Token ids (1, T), positions (1, T), additive mask (1, 1, T, T), and where each text starts."""
    used = sum(map(len, texts))
    length = used if used <= EXACT_TOKENS else -(-used // 16) * 16
    ids = np.zeros((1, length), dtype=np.int32)
    positions = np.zeros((1, length), dtype=np.int32)
    mask = np.full((1, 1, length, length), OUT_OF_REACH, dtype=np.float32)
    # Tokens that fill up see each other, since a row that sees nothing would be NaN.
    mask[0, 0, used:, used:] = 0.0
    starts, start = [], 0
    for tokens in texts:
        end = start + len(tokens)
        ids[0, start:end] = tokens
        positions[0, start:end] = np.arange(len(tokens))
        mask[0, 0, start:end, start:end] = 0.0
        starts.append(start)
        start = end
    return ids, positions, mask, starts


def _check(folder: Path, config: dict[str, Any]) -> bool:
    """Whether the first token stands for the text, rather than the mean of all."""
    wanted = {"model_type": "bert", "hidden_act": "gelu"}
    for name, value in wanted.items():
        if config.get(name) != value:
            raise UnsupportedModel(f"{name} is {config.get(name)}, not {value}")
    if config.get("position_embedding_type", "absolute") != "absolute":
        raise UnsupportedModel(f"positions are {config['position_embedding_type']}, not absolute")
    modules = [str(module["type"]).rsplit(".", 1)[-1] for module in _read(folder / "modules.json")]
    if modules[:2] != ["Transformer", "Pooling"] or modules[2:] not in ([], ["Normalize"]):
        raise UnsupportedModel(f"modules are {', '.join(modules)}")
    pooling = _read(folder / "1_Pooling" / "config.json")
    modes = {name for name, value in pooling.items() if name.startswith("pooling_mode") and value}
    if modes not in ({"pooling_mode_mean_tokens"}, {"pooling_mode_cls_token"}):
        raise UnsupportedModel(f"pooling is {', '.join(sorted(modes)) or 'not told'}")
    settings = folder / "config_sentence_transformers.json"
    if settings.is_file() and _read(settings).get("default_prompt_name"):
        raise UnsupportedModel("a prompt is put before each text")
    return "pooling_mode_cls_token" in modes


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UnsupportedModel(f"there is no {path.name}") from None


class _Weights:
    """The tensors of a checkpoint as constants of a graph."""

    def __init__(self, path: Path) -> None:
        try:
            self._tensors: dict[str, Array] = load_file(path)
        except FileNotFoundError:
            raise UnsupportedModel(f"there is no {path.name}") from None

    def array(self, name: str) -> NDArray[np.float32]:
        """Float32, whatever is stored.

        Raises:
            UnsupportedModel: there is no such tensor.
        """
        tensor = self._tensors.get(name, self._tensors.get(f"bert.{name}"))
        if tensor is None:
            raise UnsupportedModel(f"there is no tensor {name}")
        return np.ascontiguousarray(tensor, dtype=np.float32)

    def constant(self, name: str) -> Any:
        return op.constant(self.array(name))


def _graph(weights: _Weights, config: dict[str, Any]) -> ov.Model:
    """Token ids (1, T), positions (1, T) and additive mask (1, 1, T, T) to hidden states (1, T, D)."""
    epsilon = float(config["layer_norm_eps"])
    ids = op.parameter([1, -1], np.int32)
    positions = op.parameter([1, -1], np.int32)
    mask = op.parameter([1, 1, -1, -1], np.float32)
    types = weights.array("embeddings.token_type_embeddings.weight")
    # Every token is of the first type.
    words = op.constant(weights.array("embeddings.word_embeddings.weight") + types[0])
    places = weights.constant("embeddings.position_embeddings.weight")
    rows = op.constant(np.int32(0))
    x = op.add(op.gather(words, ids, rows), op.gather(places, positions, rows))
    x = _normalized(x, weights, "embeddings.LayerNorm", epsilon)
    for layer in range(int(config["num_hidden_layers"])):
        name = f"encoder.layer.{layer}"
        attended = _attention(x, mask, weights, name, int(config["num_attention_heads"]))
        x = op.add(x, _linear(attended, weights, f"{name}.attention.output.dense"))
        x = _normalized(x, weights, f"{name}.attention.output.LayerNorm", epsilon)
        widened = op.gelu(_linear(x, weights, f"{name}.intermediate.dense"), "erf")
        x = op.add(x, _linear(widened, weights, f"{name}.output.dense"))
        x = _normalized(x, weights, f"{name}.output.LayerNorm", epsilon)
    return ov.Model([x], [ids, positions, mask], "sentence embedder")


def _attention(x: Any, mask: Any, weights: _Weights, layer: str, num_heads: int) -> Any:
    by_head = _integers((0, 0, num_heads, -1))
    swapped = _integers((0, 2, 1, 3))
    query, key, value = (
        op.transpose(
            op.reshape(_linear(x, weights, f"{layer}.attention.self.{part}"), by_head, True),
            swapped,
        )
        for part in ("query", "key", "value")
    )
    attended = op.scaled_dot_product_attention(query, key, value, mask)
    return op.reshape(op.transpose(attended, swapped), _integers((0, 0, -1)), True)


def _linear(x: Any, weights: _Weights, name: str) -> Any:
    product = op.matmul(x, weights.constant(f"{name}.weight"), False, True)
    return op.add(product, weights.constant(f"{name}.bias"))


def _normalized(x: Any, weights: _Weights, name: str, epsilon: float) -> Any:
    x = op.mvn(x, _integers((-1,)), True, epsilon, "inside_sqrt")
    return op.add(
        op.multiply(x, weights.constant(f"{name}.weight")), weights.constant(f"{name}.bias")
    )


def _integers(values: Iterable[int]) -> Any:
    return op.constant(np.array(list(values), dtype=np.int32))
