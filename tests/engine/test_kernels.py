"""What lies between products: as torch computes it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch.nn.functional import rms_norm, silu

from deployments.engine import kernels

Array = NDArray[Any]
DTYPES = [np.float32, np.uint16]


def bfloat16(numbers: Array) -> Array:
    return torch.from_numpy(numbers).bfloat16().view(torch.uint16).numpy()


def floats(array: Array) -> Array:
    if array.dtype == np.float32:
        return array
    return torch.from_numpy(array).view(torch.bfloat16).float().numpy()


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_and_gates_are_those_of_torch(dtype: Any) -> None:
    rng = np.random.default_rng(2)
    hidden, change = (rng.standard_normal((3, 48), np.float32) for _ in range(2))
    weight = rng.uniform(0.5, 2, 48).astype(np.float32)
    expected = hidden + change
    out = np.zeros((3, 48), dtype)
    kernels.add_and_norm(hidden, change, weight, np.float32(1e-5), out)
    np.testing.assert_allclose(hidden, expected, atol=1e-6)
    normed = rms_norm(torch.from_numpy(expected), (48,), torch.from_numpy(weight), 1e-5).numpy()
    np.testing.assert_allclose(
        floats(out), normed, atol=1e-5, rtol=0 if dtype == np.float32 else 0.01
    )

    both = np.array([[-1e9, -90, -3, -0.0, 0, 2, 90, 1e9] * 4] * 2, np.float32)
    gated = np.zeros((2, 16), dtype)
    kernels.gate(both, gated)
    left, right = (torch.from_numpy(half) for half in np.split(both, 2, axis=1))
    # Below -87 the exponential stays where it was there, which leaves next to nothing.
    np.testing.assert_allclose(
        floats(gated), (silu(left) * right).numpy(), rtol=0.01, atol=1e-18 * 1e9
    )


def test_numbers_are_rounded_to_bfloat16_as_torch_rounds_them() -> None:
    rng = np.random.default_rng(3)
    bits = rng.integers(0, 2**32, (64, 32), dtype=np.uint32)
    numbers = bits.view(np.float32)
    numbers = np.where(np.abs(numbers) < 1e30, numbers, np.nan).astype(np.float32)
    change = np.zeros((0, 32), np.float32)
    ones = np.ones(32, np.float32)
    # The norm of numbers over their own root mean square is nearly the numbers.
    for row in numbers:
        row[np.isnan(row)] = 1.5
    out = np.zeros((64, 32), np.uint16)
    plain = np.zeros((64, 32), np.float32)
    kernels.add_and_norm(numbers.copy(), change, ones, np.float32(1e-30), plain)
    kernels.add_and_norm(numbers.copy(), change, ones, np.float32(1e-30), out)
    assert (out == bfloat16(plain)).all()
