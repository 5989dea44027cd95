"""Matrix products with weights that are packed once for the CPU.

Each row of a result is equal to the last bit whatever rows are computed with it. For oneDNN's
packed kernels that was measured, from 2 to 300 rows: one alone is rounded otherwise, and gets
company. int8 sums whole numbers, which no order changes.
"""

from __future__ import annotations

import warnings
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from deployments.engine import kernels

LEAST_ROWS = 2


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
    """Weights of 8 bits a channel, and activations of 8 bits a row (dynamic quantisation).

    FBGEMM finds one scale for all rows together, which would make an answer depend on its
    neighbours. So each row is divided by its largest number first, and one more row holds 1 and
    -1: the scale is then always 2 / 255.
    """

    activation_dtype = torch.float32

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        weight = weight.float()
        scales = weight.abs().amax(dim=1).clamp_min(1e-8).double() / 127.0
        rounded = (weight / scales.float().unsqueeze(1)).round().clamp(-127, 127).to(torch.int8)
        with warnings.catch_warnings():
            # torch means to take these tensors out some day; nothing else reaches FBGEMM yet.
            warnings.simplefilter("ignore", UserWarning)
            quantised = torch._make_per_channel_quantized_tensor(
                rounded, scales, torch.zeros(len(scales), dtype=torch.long), 0
            )
        self._packed = torch.ops.quantized.linear_prepack(quantised, None)
        self._bias = None if bias is None else bias.float()
        # Without VNNI two products of 8 x 8 bits may not fit the 16 bits they are added up in.
        self._reduce_range = not has_vnni()

    def __call__(self, x: Tensor) -> Tensor:
        num_rows, size = x.shape
        scaled = np.empty((num_rows + 1, size), np.float32)
        largest = np.empty((num_rows, 1), np.float32)
        kernels.scale_rows(x.numpy(), scaled, largest)
        result: Tensor = torch.ops.quantized.linear_dynamic(
            torch.from_numpy(scaled), self._packed, self._reduce_range
        )[:num_rows]
        kernels.unscale_rows(result.numpy(), largest)
        if self._bias is not None:
            result += self._bias
        return result


def has_vnni() -> bool:
    return bool(torch.cpu._is_vnni_supported())


def supports_int8() -> bool:
    return torch.backends.quantized.engine in ("x86", "fbgemm")
