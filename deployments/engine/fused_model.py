"""Models of the Llama family, written out for the CPU: few packed products, compiled loops between.

Projections that share their input are one matrix product with weights that are packed once
(`linears`), and what lies between two products is one compiled loop (`kernels`). The residual
stream is float32 whatever the weights are. A row's result is equal to the last bit in any company,
however its prompt was cut, and whatever of it was reused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from deployments.engine import block_attention, kernels
from deployments.engine.linears import (
    Float32Linear,
    Linear,
    MakeLinear,
    make_bfloat16,
    padded_rows,
)
from deployments.engine.runner import UnsupportedModel
from deployments.engine.vectors import LANES

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
Array = NDArray[Any]
Blocks = tuple[Array, Array]
"""Keys and values of one layer, as `block_attention` has them."""


def find_obstacle(model_config: Any, max_model_len: int) -> str | None:
    """What of a model is not computed here; None when it is for sequences of that length."""
    sizes = (head_size(model_config), model_config.hidden_size, model_config.intermediate_size)
    layer_types = getattr(model_config, "layer_types", None) or ()
    window = getattr(model_config, "sliding_window", None)
    is_windowed = (
        window is not None
        and window < max_model_len
        and (
            "sliding_attention" in layer_types or getattr(model_config, "use_sliding_window", True)
        )
    )
    if model_config.model_type not in MODEL_TYPES:
        return f"models of type {model_config.model_type}"
    if model_config.hidden_act != "silu":
        return f"the activation {model_config.hidden_act}"
    if is_windowed:
        return "attention within a window"
    if any(size % LANES for size in sizes):
        return f"sizes that are no multiples of {LANES}: {sizes}"
    return None


def head_size(model_config: Any) -> int:
    given = getattr(model_config, "head_dim", None)
    return int(given or model_config.hidden_size // model_config.num_attention_heads)


@dataclass(frozen=True)
class Weights:
    """(out, in), and (out,) where there is a bias."""

    weight: Tensor
    bias: Tensor | None = None


@dataclass(frozen=True)
class LayerWeights:
    """One layer as it was trained; the norms of queries and keys are empty where it has none."""

    input_norm: Array
    qkv: Weights
    q_norm: Array
    k_norm: Array
    out: Weights
    middle_norm: Array
    gate_up: Weights
    down: Weights

    def packed(self, make: MakeLinear) -> Layer:
        """The layer with `make`'s products."""
        qkv, out, gate_up, down = (
            make(part.weight, part.bias) for part in (self.qkv, self.out, self.gate_up, self.down)
        )
        return Layer(self.input_norm, qkv, self.q_norm, self.k_norm, out, self.middle_norm,
                     gate_up, down)  # fmt: skip


@dataclass(frozen=True)
class Layer:
    """One layer as it is computed."""

    input_norm: Array
    qkv: Linear
    q_norm: Array
    k_norm: Array
    out: Linear
    middle_norm: Array
    gate_up: Linear
    down: Linear


class Checkpoint:
    """The tensors of a model folder, each read once."""

    def __init__(self, folder: Path) -> None:
        paths = sorted(folder.glob("*.safetensors"))
        self.num_bytes = sum(path.stat().st_size for path in paths)
        self._files = [safe_open(path, "pt") for path in paths]
        self._file_of = {
            name: file
            for file in self._files
            for name in file.keys()  # type: ignore[no-untyped-call]  # noqa: SIM118
        }

    def take(self, name: str) -> Tensor:
        """Raises: UnsupportedModel: there is none of that name."""
        tensor = self.find(name)
        if tensor is None:
            raise UnsupportedModel(f"the model folder has no tensor {name}")
        return tensor

    def find(self, name: str) -> Tensor | None:
        file = self._file_of.pop(name, None)
        return None if file is None else file.get_tensor(name)  # type: ignore[no-untyped-call]

    def layer(self, number: int) -> LayerWeights:
        """Raises: UnsupportedModel: it is not laid out as the Llama family's are."""
        name = f"model.layers.{number}"
        norms = [self.find(f"{name}.self_attn.{part}_norm.weight") for part in "qk"]
        q_norm, k_norm = (
            np.empty(0, np.float32) if norm is None else floats(norm) for norm in norms
        )
        return LayerWeights(
            floats(self.take(f"{name}.input_layernorm.weight")),
            self._merged(*(f"{name}.self_attn.{part}_proj" for part in "qkv")),
            q_norm,
            k_norm,
            self._merged(f"{name}.self_attn.o_proj"),
            floats(self.take(f"{name}.post_attention_layernorm.weight")),
            self._merged(f"{name}.mlp.gate_proj", f"{name}.mlp.up_proj"),
            self._merged(f"{name}.mlp.down_proj"),
        )

    def _merged(self, *names: str) -> Weights:
        weight = torch.cat([self.take(f"{name}.weight") for name in names])
        biases = [self.find(f"{name}.bias") for name in names]
        given = [bias for bias in biases if bias is not None]
        if given and len(given) < len(names):
            raise UnsupportedModel(f"only some of {', '.join(names)} have a bias")
        return Weights(weight, torch.cat(given) if given else None)

    @property
    def rest(self) -> list[str]:
        """What nobody has taken."""
        return sorted(name for name in self._file_of if not name.endswith("rotary_emb.inv_freq"))


@dataclass(frozen=True)
class Step:
    """A plan as arrays.

    Attributes:
        token_ids, positions, locations: (T,) int64.
        tables, pieces: as `block_attention.attend` takes them.
        logits_at: (R,) int64, packed tokens behind which logits are wanted.
    """

    token_ids: Array
    positions: Array
    locations: Array
    tables: Array
    pieces: Array
    logits_at: Array


class Pass:
    """One step on its way through the layers.

    `hidden`, (T, H) float32, is the residual stream but for the last `change` to it.
    """

    def __init__(self, model: FusedModel, step: Step, attend: Any) -> None:
        self._model = model
        self._step = step
        self._attend = attend
        embedded = model.embed(step.token_ids)
        # Rows behind the tokens' own are computed on zeros, for nobody.
        num_tokens, width = model.num_rows(len(embedded)), embedded.shape[1]
        self.hidden = np.zeros((num_tokens, width), np.float32)
        self.hidden[: len(embedded)] = embedded
        self._normed = torch.empty(num_tokens, width, dtype=model.dtype)
        self._attended = torch.zeros(
            num_tokens, model.num_heads * model.head_size, dtype=model.dtype
        )
        self._gated = torch.empty(num_tokens, model.intermediate_size, dtype=model.dtype)
        self._queries = np.empty((num_tokens, model.num_heads, model.head_size), np.float32)
        self._change: Array = np.empty((0, width), np.float32)

    def run(self, layer: Layer, keys: Array, values: Array) -> None:
        eps, step, normed = self._model.eps, self._step, self._normed
        kernels.add_and_norm(self.hidden, self._change, layer.input_norm, eps, bits(normed))
        block_attention.place_qkv(
            bits(layer.qkv(normed)), self._model.rotation, step.positions, step.locations,
            layer.q_norm, layer.k_norm, eps, self._queries, keys, values,
        )  # fmt: skip
        self._attend(
            self._queries, keys, values, step.tables, step.pieces, self._model.scale,
            bits(self._attended),
        )  # fmt: skip
        self._change = bits(layer.out(self._attended))
        kernels.add_and_norm(self.hidden, self._change, layer.middle_norm, eps, bits(normed))
        kernels.gate(bits(layer.gate_up(normed)), bits(self._gated))
        self._change = bits(layer.down(self._gated))

    def end(self, norm: Array) -> Tensor:
        """(R', H): what the head takes, for the tokens whose logits are wanted, and padding."""
        at = self._step.logits_at
        last = torch.zeros(padded_rows(len(at)), self.hidden.shape[1], dtype=self._model.head_dtype)
        kernels.add_and_norm(self.hidden[at], self._change[at], norm, self._model.eps, bits(last))
        return last


class FusedModel:
    """Weights, and the forward over packed rows.

    Args:
        dtype: of the weights, and of keys and values: bfloat16 or float32.
        quantise: makes what brings the layers to 8 bits, one after the other, in the order of
            the model (`quantization.Quantiser`); the embedding and the head stay in `dtype`.

    Raises:
        UnsupportedModel: the folder holds something else than the config says.
    """

    def __init__(
        self,
        model_config: Any,
        checkpoint: Checkpoint,
        *,
        max_model_len: int,
        dtype: torch.dtype,
        num_threads: int = 1,
        quantise: Callable[[FusedModel], Callable[[LayerWeights], Layer]] | None = None,
    ) -> None:
        linear: MakeLinear = (
            make_bfloat16(num_threads) if dtype == torch.bfloat16 else Float32Linear
        )
        self.kv_dtype = self.head_dtype = dtype
        self.dtype = dtype if quantise is None else torch.float32
        self.num_heads = model_config.num_attention_heads
        self.num_kv_heads = model_config.num_key_value_heads
        self.head_size = head_size(model_config)
        self.num_layers = model_config.num_hidden_layers
        self.intermediate_size = model_config.intermediate_size
        self.eps = np.float32(model_config.rms_norm_eps)
        self.scale = np.float32(self.head_size**-0.5)
        self.rotation = _rotation(model_config, max_model_len)
        embedding = checkpoint.take("model.embed_tokens.weight")
        # A copy, which lets go of the file.
        self._embedding = embedding.to(dtype, copy=True)
        head = checkpoint.find("lm_head.weight")
        self._head = linear(embedding if head is None else head, None)
        self._is_padded = self._head.has_kernels_by_rows
        pack = (lambda layer: layer.packed(linear)) if quantise is None else quantise(self)
        self._layers = [pack(checkpoint.layer(number)) for number in range(self.num_layers)]
        self._norm = floats(checkpoint.take("model.norm.weight"))
        if checkpoint.rest:
            raise UnsupportedModel(f"tensors of unknown use: {', '.join(checkpoint.rest[:3])}")

    @property
    def vocab_size(self) -> int:
        return int(self._embedding.shape[0])

    def num_rows(self, num_rows: int) -> int:
        """How many rows are computed where so many are needed."""
        return padded_rows(num_rows) if self._is_padded else num_rows

    def embed(self, token_ids: Array) -> Array:
        """(T,) to (T, H) float32."""
        embedded: Array = self._embedding[torch.from_numpy(token_ids)].float().numpy()
        return embedded

    def forward(self, step: Step, blocks: list[Blocks], attend: Any) -> Tensor:
        """Computes a step.

        Args:
            blocks: keys and values of each layer.
            attend: `block_attention.attend` or its parallel form.

        Returns:
            (R, V) float32 logits for `step.logits_at`.
        """
        pass_ = Pass(self, step, attend)
        for layer, held in zip(self._layers, blocks, strict=True):
            pass_.run(layer, *held)
        return self._head(pass_.end(self._norm))[: len(step.logits_at)].float()


def _rotation(model_config: Any, max_model_len: int) -> Array:
    """(max_model_len, 2, D / 2): cosines and sines of each position's turns."""
    rotary = LlamaRotaryEmbedding(model_config)
    angles = torch.outer(torch.arange(max_model_len).float(), rotary.inv_freq.float())
    turns: Array = (torch.stack([angles.cos(), angles.sin()], 1) * rotary.attention_scaling).numpy()
    return turns


def floats(weight: Tensor) -> Array:
    return np.ascontiguousarray(weight.float().numpy())


def bits(tensor: Tensor) -> Array:
    """A view of a tensor for the kernels: float32, or the bits of bfloat16."""
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.uint16).numpy()
    return tensor.numpy()


def words(tensor: Tensor) -> Array:
    """(..., g) numbers as (...) words of 32 bits, for the blocks of `block_attention`."""
    array = bits(tensor)
    return array.view(np.uint32 if array.itemsize == 2 else np.float32)[..., 0]
