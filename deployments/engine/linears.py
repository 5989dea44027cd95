"""Matrix products with weights that are packed once for the CPU.

Our own (`products`) where the CPU has the instructions, oneDNN elsewhere, and where it has AMX,
which only oneDNN uses. Each row of a result is equal to the last bit whatever rows are computed
with it. For oneDNN in bfloat16 and float32 that was measured, from 2 to 300 rows: one alone is
rounded otherwise, and gets company. int8 sums whole numbers, which no order changes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from deployments.engine import kernels, products
from deployments.engine.kernels import ZERO_BYTE
from deployments.engine.vectors import LANES

LEAST_ROWS = 2


def padded_rows(num_rows: int) -> int:
    """The number of rows to compute in the place of so many, at most an eighth more but for one.

    oneDNN makes a kernel of its own for each number of rows and keeps it: 1 ms and 0.6 MB a
    product in bfloat16, 0.4 MB in int8. With any number there would be a gigabyte of them.
    """
    if num_rows <= 8:
        return max(num_rows, LEAST_ROWS)
    step = max(2, 1 << ((num_rows - 1).bit_length() - 4))
    return -(-num_rows // step) * step


class Linear(Protocol):
    """x @ W^T + b."""

    activation_dtype: torch.dtype
    """Of what goes in."""
    has_kernels_by_rows: bool
    """Whether it is to be given few different numbers of rows."""

    def __call__(self, x: Tensor) -> Tensor:
        """(M, in) to (M, out), in the same type or in float32."""
        ...


MakeLinear = Callable[[Tensor, Tensor | None], Linear]


class BFloat16Linear:
    """Products of bfloat16, summed and given in float32."""

    activation_dtype = torch.bfloat16
    has_kernels_by_rows = False

    def __init__(self, weight: Tensor, bias: Tensor | None, *, in_parallel: bool = False) -> None:
        bits = weight.to(self.activation_dtype).contiguous().view(torch.uint16).numpy()
        self._packed = products.pack(bits).view(np.uint32)[..., 0]
        self._num_out = len(weight)
        self._bias = None if bias is None else bias.float().numpy()
        self._product = products.bf16_product_in_parallel if in_parallel else products.bf16_product

    def __call__(self, x: Tensor) -> Tensor:
        out = np.empty((len(x), _whole(self._num_out)), np.float32)
        self._product(x.view(torch.uint16).numpy().view(np.uint32), self._packed, out)
        return _finished(out, self._num_out, self._bias)


class Int8Linear:
    """Weights of 8 bits a channel, and activations of 8 bits a row (dynamic quantisation)."""

    activation_dtype = torch.float32
    has_kernels_by_rows = False

    def __init__(self, weight: Tensor, bias: Tensor | None, *, in_parallel: bool = False) -> None:
        rounded, scales = quantised(weight)
        self._packed = products.pack(rounded.numpy()).view(np.int32)[..., 0]
        padding = (0, self._packed.shape[0] * products.TILE - len(weight))
        sums = rounded.sum(dim=1, dtype=torch.int32)
        self._starts = np.pad(-ZERO_BYTE * sums.numpy(), padding)
        self._scales = np.pad(scales.numpy(), padding)
        self._num_out = len(weight)
        self._bias = None if bias is None else bias.float().numpy()
        self._product = products.int8_product_in_parallel if in_parallel else products.int8_product

    def __call__(self, x: Tensor) -> Tensor:
        numbers, factors = np.empty(x.shape, np.uint8), np.empty(len(x), np.float32)
        kernels.quantise_rows(x.numpy(), numbers, factors)
        out = np.empty((len(x), _whole(self._num_out)), np.float32)
        self._product(
            numbers.view(np.int32), self._packed, self._starts, self._scales, factors, out
        )
        return _finished(out, self._num_out, self._bias)


class OneDnnBFloat16Linear:
    """Weights in oneDNN's own layout."""

    activation_dtype = torch.bfloat16
    has_kernels_by_rows = True
    # For how many rows it is laid out. 1 and 32 measured alike, no number 40 % slower.
    _packed_for: int | None = 32

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(
            weight.to(self.activation_dtype).contiguous(), self._packed_for
        )
        self._bias = None if bias is None else bias.to(self.activation_dtype)

    def __call__(self, x: Tensor) -> Tensor:
        num_rows = x.shape[0]
        if num_rows < LEAST_ROWS:
            x = torch.cat([x, x.new_zeros(LEAST_ROWS - num_rows, x.shape[1])])
        result: Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self._packed, self._bias, "none", [], ""
        )
        return result[:num_rows]


class Float32Linear(OneDnnBFloat16Linear):
    """The same in float32: half of the time that plain weights take for 4 rows."""

    activation_dtype = torch.float32
    _packed_for = None


class OneDnnInt8Linear:
    """As Int8Linear, bit for bit."""

    activation_dtype = torch.float32
    has_kernels_by_rows = True

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        rounded, self._scales = quantised(weight)
        self._packed = torch.ops.onednn.qlinear_prepack(rounded, [32, weight.shape[1]])
        self._zeros = torch.zeros(len(weight), dtype=torch.int32)
        self._bias = None if bias is None else bias.float()

    def __call__(self, x: Tensor) -> Tensor:
        numbers, factors = np.empty(x.shape, np.uint8), np.empty(len(x), np.float32)
        kernels.quantise_rows(x.numpy(), numbers, factors)
        result: Tensor = torch.ops.onednn.qlinear_pointwise(
            torch.from_numpy(numbers), 1.0, ZERO_BYTE, self._packed, self._scales, self._zeros,
            None, 1.0, 0, torch.float32, "none", [], "",
        )  # fmt: skip
        kernels.scale_rows(result.numpy(), factors)
        if self._bias is not None:
            result += self._bias
        return result


def quantised(weight: Tensor) -> tuple[Tensor, Tensor]:
    """(N, K) int8 and (N,) float32 scales."""
    weight = weight.float()
    scales = weight.abs().amax(dim=1).clamp_min(1e-8) / 127.0
    return (weight / scales.unsqueeze(1)).round().clamp(-127, 127).to(torch.int8), scales


def make_bfloat16(num_threads: int) -> MakeLinear:
    if not supports_own_bfloat16() or torch.cpu._is_amx_tile_supported():
        return OneDnnBFloat16Linear
    return partial(BFloat16Linear, in_parallel=num_threads > 1)


def make_int8(num_threads: int) -> MakeLinear:
    if not supports_own_int8() or torch.cpu._is_amx_tile_supported():
        return OneDnnInt8Linear
    return partial(Int8Linear, in_parallel=num_threads > 1)


def supports_own_bfloat16() -> bool:
    return bool(torch.cpu._is_avx512_bf16_supported())


def supports_own_int8() -> bool:
    return bool(torch.cpu._is_avx512_supported()) and supports_int8()


def supports_int8() -> bool:
    """Without these instructions two products of 8 x 8 bits may not fit where they are summed."""
    return bool(torch.cpu._is_vnni_supported())


def _whole(num_out: int) -> int:
    """The output columns in whole vectors, which is what a product fills."""
    return -(-num_out // LANES) * LANES


def _finished(out: np.ndarray, num_out: int, bias: np.ndarray | None) -> Tensor:
    """What was asked for of a product, with the bias."""
    if out.shape[1] > num_out:
        out = np.ascontiguousarray(out[:, :num_out])
    if bias is not None:
        out += bias
    return torch.from_numpy(out)
