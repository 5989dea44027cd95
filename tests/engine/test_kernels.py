"""Attention over blocks: right, and equal to the last bit however it is cut."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu

from deployments.engine import kernels
from deployments.engine.kernels import BLOCK_TOKENS

Array = NDArray[Any]
DTYPES = [np.float32, np.uint16]


def bfloat16(numbers: Array) -> Array:
    return torch.from_numpy(numbers).bfloat16().view(torch.uint16).numpy()


def floats(array: Array) -> Array:
    if array.dtype == np.float32:
        return array
    return torch.from_numpy(array).view(torch.bfloat16).float().numpy()


class Case:
    """Random keys and values of sequences in scattered blocks, and queries for all of their tokens."""

    def __init__(
        self, lengths: list[int], heads: int, kv_heads: int, size: int, dtype: Any
    ) -> None:
        rng = np.random.default_rng(sum(lengths))
        per_row = -(-max(lengths) // BLOCK_TOKENS)
        num_blocks = per_row * len(lengths) + 3
        keys = rng.standard_normal((num_blocks, kv_heads, size, BLOCK_TOKENS), np.float32)
        values = rng.standard_normal((num_blocks, kv_heads, BLOCK_TOKENS, size), np.float32)
        self.keys, self.values = (
            (keys, values) if dtype == np.float32 else (bfloat16(keys), bfloat16(values))
        )
        order = rng.permutation(num_blocks)[: per_row * len(lengths)]
        self.tables = order.reshape(len(lengths), per_row).astype(np.int32)
        self.lengths = lengths
        self.queries = [rng.standard_normal((n, heads, size), np.float32) for n in lengths]
        self.scale = np.float32(0.3)

    def attend(
        self, pieces: list[tuple[int, int, int]], attend: Any = kernels.attend
    ) -> list[Array]:
        """What pieces (row, first token, number of tokens) give, all in one call."""
        packed = np.concatenate([self.queries[row][first : first + n] for row, first, n in pieces])
        numbers, at = [], 0
        for row, first, n in pieces:
            numbers.append((row, at, n, first))
            at += n
        out = np.full((len(packed), packed.shape[1] * packed.shape[2]), np.nan, np.float32)
        attend(packed, self.keys, self.values, self.tables, np.array(numbers), self.scale, out)
        return [out[at : at + n] for _, at, n, _ in numbers]

    def reference(self, row: int) -> Array:
        table, length = self.tables[row], self.lengths[row]
        keys = (
            floats(self.keys)[table]
            .transpose(1, 0, 3, 2)
            .reshape(self.keys.shape[1], -1, self.keys.shape[2])
        )
        values = floats(self.values)[table].transpose(1, 0, 2, 3)
        values = values.reshape(keys.shape)
        out = scaled_dot_product_attention(
            torch.from_numpy(self.queries[row]).transpose(0, 1)[None],
            torch.from_numpy(keys[None, :, :length]),
            torch.from_numpy(values[None, :, :length]),
            is_causal=True,
            scale=float(self.scale),
            enable_gqa=True,
        )
        return out[0].transpose(0, 1).reshape(length, -1).numpy()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "size"),
    [(1, 1, 16), (9, 3, 64), (4, 4, 48), (7, 1, 80), (10, 2, 128)],
)
def test_attention_is_that_of_torch(heads: int, kv_heads: int, size: int, dtype: Any) -> None:
    case = Case([1, 31, 32, 33, 70], heads, kv_heads, size, dtype)
    together = case.attend([(row, 0, n) for row, n in enumerate(case.lengths)])
    for row, got in enumerate(together):
        np.testing.assert_allclose(got, case.reference(row), atol=3e-5)


@settings(max_examples=30)
@given(data=st.data())
@pytest.mark.parametrize("dtype", DTYPES)
def test_no_cut_and_no_company_changes_a_bit(data: Any, dtype: Any) -> None:
    case = Case([90, 41, 64], 6, 2, 32, dtype)
    alone = [case.attend([(row, 0, n)])[0] for row, n in enumerate(case.lengths)]
    pieces = []
    for row, length in enumerate(case.lengths):
        cuts = sorted(data.draw(st.sets(st.integers(1, length - 1), max_size=5)))
        pieces += [(row, a, b - a) for a, b in zip([0, *cuts], [*cuts, length], strict=True)]
    pieces = data.draw(st.permutations(pieces))
    for (row, first, n), got in zip(pieces, case.attend(pieces), strict=True):
        assert (got == alone[row][first : first + n]).all()


def test_more_threads_change_no_bit() -> None:
    case = Case([150, 3], 6, 2, 32, np.float32)
    pieces = [(0, 0, 150), (1, 0, 3)]
    numba.set_num_threads(min(2, numba.config.NUMBA_NUM_THREADS))
    for one, many in zip(
        case.attend(pieces), case.attend(pieces, kernels.attend_in_parallel), strict=True
    ):
        assert (one == many).all()


def test_what_lies_behind_a_sequence_in_its_last_block_is_not_read() -> None:
    case = Case([40], 2, 1, 16, np.float32)
    expected = case.attend([(0, 0, 40)])[0]
    last = case.tables[0, 1]
    case.keys[last, :, :, 8:] = np.nan
    case.values[last, :, 8:] = np.nan
    assert (case.attend([(0, 0, 40)])[0] == expected).all()


def test_a_nan_in_a_sequence_shows_in_it_and_nowhere_else() -> None:
    case = Case([40, 40], 2, 1, 16, np.float32)
    before = case.attend([(1, 0, 40)])[0]
    case.values[case.tables[0, 0], :, 3] = np.nan
    bad, good = case.attend([(0, 0, 40), (1, 0, 40)])
    assert np.isnan(bad[3:]).all()
    assert (good == before).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_placed_queries_and_keys_are_turned_and_values_are_not(dtype: Any) -> None:
    rng = np.random.default_rng(1)
    tokens, heads, kv_heads, size = 5, 4, 2, 16
    qkv = rng.standard_normal((tokens + 1, (heads + 2 * kv_heads) * size), np.float32)
    if dtype == np.uint16:
        qkv = bfloat16(qkv)
    angles = rng.uniform(0, 6, (50, size // 2)).astype(np.float32)
    rotation = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    positions = np.array([7, 8, 9, 0, 49])
    locations = np.array([3, 40, 41, 95, 64])
    keys = np.zeros((3, kv_heads, size, BLOCK_TOKENS), dtype)
    values = np.zeros((3, kv_heads, BLOCK_TOKENS, size), dtype)
    queries = np.zeros((tokens + 1, heads, size), np.float32)
    weight = rng.uniform(0.5, 2, size).astype(np.float32)
    kernels.place_qkv(
        qkv, rotation, positions, locations, weight, weight, np.float32(1e-6), queries, keys, values
    )
    rows = torch.from_numpy(floats(qkv)[:tokens]).view(tokens, -1, size)
    turned = rms_norm(rows, (size,), torch.from_numpy(weight), 1e-6)
    cos, sin = (torch.from_numpy(rotation[positions, i]).unsqueeze(1) for i in (0, 1))
    first, second = turned.chunk(2, -1)
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], -1).numpy()
    np.testing.assert_allclose(queries[:tokens], turned[:, :heads], atol=1e-5)
    precision = 1e-5 if dtype == np.float32 else 0.02
    for t, location in enumerate(locations):
        block, offset = divmod(location, BLOCK_TOKENS)
        held = floats(keys)[block, :, :, offset]
        np.testing.assert_allclose(held, turned[t, heads : heads + kv_heads], atol=precision)
        assert (floats(values)[block, :, offset] == rows[t, heads + kv_heads :].numpy()).all()


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
