"""Layers in 8 bits for the CPU: weights by channel, activations by row, large columns smoothed."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from deployments.engine import block_attention
from deployments.engine.block_attention import BLOCK_TOKENS, block_shapes
from deployments.engine.fused_model import FusedModel, Layer, LayerWeights, Pass, Step, Weights
from deployments.engine.linears import Float32Linear, Linear, make_int8

CALIBRATION_TOKENS = 128


class Quantiser:
    """Brings layers to 8 bits, one after the other, by what a few tokens make of them.

    A column of activations that is much larger than the others would take all of the 8 bits of
    its row. So large columns are divided by a number by which the weight's are multiplied
    (SmoothQuant: Xiao et al. 2023, alpha 0.5); the division is folded into what comes before: a
    norm, or the rows of the projection up.
    """

    def __init__(self, model: FusedModel, *, num_threads: int) -> None:
        self._make = make_int8(num_threads)
        rng = np.random.default_rng(0)
        # Which columns are large is the layers' own doing: random tokens show it as text does.
        token_ids = rng.integers(0, model.vocab_size, CALIBRATION_TOKENS)
        at = np.arange(CALIBRATION_TOKENS)
        blocks = np.arange(-(-CALIBRATION_TOKENS // BLOCK_TOKENS), dtype=np.int32)
        pieces = np.array([[0, 0, CALIBRATION_TOKENS, 0]])
        step = Step(token_ids, at, at, blocks[None], pieces, at[-1:])
        self._pass = Pass(model, step, block_attention.attend)
        shapes = block_shapes(len(blocks), model.num_kv_heads, model.head_size, 1)
        self._keys, self._values = (np.zeros(shape, np.float32) for shape in shapes)

    def __call__(self, layer: LayerWeights) -> Layer:
        """The layer as it will be computed; the tokens go on through the layer as it was."""
        watched = layer.packed(_Watched)
        self._pass.run(watched, self._keys, self._values)
        down, down_factor = _smoothed(layer.down.weight, watched.down)
        gate_up = layer.gate_up.weight.float().clone()
        gate_up[gate_up.shape[0] // 2 :] /= down_factor.unsqueeze(1)
        gate_up, gate_up_factor = _smoothed(gate_up, watched.gate_up)
        qkv, qkv_factor = _smoothed(layer.qkv.weight, watched.qkv)
        up_bias = layer.gate_up.bias
        if up_bias is not None:
            up_bias = up_bias.float().clone()
            up_bias[up_bias.shape[0] // 2 :] /= down_factor
        return LayerWeights(
            layer.input_norm / qkv_factor.numpy(),
            Weights(qkv, layer.qkv.bias),
            layer.q_norm,
            layer.k_norm,
            layer.out,
            layer.middle_norm / gate_up_factor.numpy(),
            Weights(gate_up, up_bias),
            Weights(down, layer.down.bias),
        ).packed(self._make)


class _Watched(Float32Linear):
    """Remembers the largest number of each column that came in."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight, bias)
        self.largest = torch.zeros(weight.shape[1])

    def __call__(self, x: Tensor) -> Tensor:
        self.largest = torch.maximum(self.largest, x.abs().amax(dim=0))
        return super().__call__(x)


def _smoothed(weight: Tensor, watched: Linear) -> tuple[Tensor, Tensor]:
    """The weight with its columns multiplied, and by what."""
    assert isinstance(watched, _Watched)
    weight = weight.float()
    largest = weight.abs().amax(dim=0).clamp_min(1e-5)
    factor = (watched.largest.clamp_min(1e-5) / largest).sqrt()
    return weight * factor, factor
