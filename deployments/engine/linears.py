"""Matrix products with weights that are packed once for the CPU, by oneDNN.

Each row of a result is equal to the last bit whatever rows are computed with it. For bfloat16 and
float32 that was measured, from 2 to 300 rows: one alone is rounded otherwise, and gets company.
int8 sums whole numbers, which no order changes.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from deployments.engine import kernels

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
    """Of what goes in and comes out."""

    def __call__(self, x: Tensor) -> Tensor:
        """(M, in) to (M, out)."""
        ...


class BFloat16Linear:
    """Weights in oneDNN's own layout."""

    activation_dtype = torch.bfloat16
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


class Float32Linear(BFloat16Linear):
    """The same in float32: half of the time that plain weights take for 4 rows."""

    activation_dtype = torch.float32
    _packed_for = None


class Int8Linear:
    """Weights of 8 bits a channel, and activations of 8 bits a row (dynamic quantisation)."""

    activation_dtype = torch.float32

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        weight = weight.float()
        self._scales = weight.abs().amax(dim=1).clamp_min(1e-8) / 127.0
        rounded = (weight / self._scales.unsqueeze(1)).round().clamp(-127, 127).to(torch.int8)
        self._packed = torch.ops.onednn.qlinear_prepack(rounded, [32, weight.shape[1]])
        self._zeros = torch.zeros(len(weight), dtype=torch.int32)
        self._bias = None if bias is None else bias.float()

    def __call__(self, x: Tensor) -> Tensor:
        quantised = np.empty(x.shape, np.uint8)
        factors = np.empty(len(x), np.float32)
        kernels.quantise_rows(x.numpy(), quantised, factors)
        result: Tensor = torch.ops.onednn.qlinear_pointwise(
            torch.from_numpy(quantised), 1.0, kernels.ZERO_BYTE, self._packed, self._scales,
            self._zeros, None, 1.0, 0, torch.float32, "none", [], "",
        )  # fmt: skip
        kernels.scale_rows(result.numpy(), factors)
        if self._bias is not None:
            result += self._bias
        return result


def supports_int8() -> bool:
    """Without these instructions two products of 8 x 8 bits may not fit where they are summed."""
    return bool(torch.cpu._is_vnni_supported())
