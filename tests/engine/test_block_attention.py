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
from torch.nn.functional import rms_norm, scaled_dot_product_attention

from deployments.engine.block_attention import (
    BLOCK_TOKENS,
    attend,
    attend_in_parallel,
    block_shapes,
    place_qkv,
)
from deployments.engine.products import (
    bf16_product,
    bf16_product_in_parallel,
    int8_product,
    int8_product_in_parallel,
)

Array = NDArray[Any]
DTYPES = [np.float32, np.uint32]
"""Of words: one number, or two in bfloat16."""


def bfloat16(numbers: Array) -> Array:
    return torch.from_numpy(numbers).bfloat16().view(torch.uint16).numpy()


def floats(bits: Array) -> Array:
    return torch.from_numpy(bits).view(torch.bfloat16).float().numpy()


def keys_of(words: Array) -> Array:
    """(blocks, kv heads, head size, BLOCK_TOKENS) float32."""
    if words.dtype == np.float32:
        return words
    pairs = floats(words.view(np.uint16)).reshape(*words.shape, 2)
    return pairs.transpose(0, 1, 2, 4, 3).reshape(*words.shape[:2], -1, BLOCK_TOKENS)


def values_of(words: Array) -> Array:
    """(blocks, kv heads, BLOCK_TOKENS, head size) float32."""
    if words.dtype == np.float32:
        return words
    pairs = floats(words.view(np.uint16)).reshape(*words.shape, 2)
    return pairs.transpose(0, 1, 2, 4, 3).reshape(*words.shape[:2], BLOCK_TOKENS, -1)


def blocks_for(num_blocks: int, kv_heads: int, size: int, dtype: Any) -> tuple[Array, Array]:
    shapes = block_shapes(num_blocks, kv_heads, size, 1 if dtype == np.float32 else 2)
    keys, values = (np.zeros(shape, dtype) for shape in shapes)
    return keys, values


class Case:
    """Random keys and values of sequences in scattered blocks, and queries for all of their tokens."""

    def __init__(
        self, lengths: list[int], heads: int, kv_heads: int, size: int, dtype: Any
    ) -> None:
        rng = np.random.default_rng(sum(lengths))
        per_row = -(-max(lengths) // BLOCK_TOKENS)
        num_blocks = per_row * len(lengths) + 3
        self.keys, self.values = blocks_for(num_blocks, kv_heads, size, dtype)
        for words in (self.keys, self.values):
            if dtype == np.float32:
                words[:] = rng.standard_normal(words.shape, np.float32)
            else:
                words.view(np.uint16)[:] = bfloat16(
                    rng.standard_normal(words.view(np.uint16).shape, np.float32)
                )
        order = rng.permutation(num_blocks)[: per_row * len(lengths)]
        self.tables = order.reshape(len(lengths), per_row).astype(np.int32)
        self.lengths = lengths
        self.queries = [rng.standard_normal((n, heads, size), np.float32) for n in lengths]
        self.scale = np.float32(0.3)

    def attend(self, pieces: list[tuple[int, int, int]], attend: Any = attend) -> list[Array]:
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
        keys = keys_of(self.keys)[table].transpose(1, 0, 3, 2)
        keys = keys.reshape(keys.shape[0], -1, keys.shape[3])
        values = values_of(self.values)[table].transpose(1, 0, 2, 3).reshape(keys.shape)
        queries = self.queries[row]
        if self.keys.dtype != np.float32:
            queries = floats(bfloat16(queries))
        out = scaled_dot_product_attention(
            torch.from_numpy(queries).transpose(0, 1)[None],
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
    # Weights in bfloat16 have 8 bits.
    tolerance = 3e-5 if dtype == np.float32 else 0.02
    case = Case([1, 31, 32, 33, 70], heads, kv_heads, size, dtype)
    together = case.attend([(row, 0, n) for row, n in enumerate(case.lengths)])
    for row, got in enumerate(together):
        np.testing.assert_allclose(got, case.reference(row), atol=tolerance)


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
    for one, many in zip(case.attend(pieces), case.attend(pieces, attend_in_parallel), strict=True):
        assert (one == many).all()


@pytest.mark.parametrize("num_tokens", [40, 41])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_lies_behind_a_sequence_in_its_last_block_is_not_read(
    dtype: Any, num_tokens: int
) -> None:
    kv_heads, size = 1, 16
    keys, values = blocks_for(3, kv_heads, size, dtype)
    table = np.array([[2, 0]], np.int32)
    rng = np.random.default_rng(0)
    qkv = rng.standard_normal((num_tokens, (2 + 2 * kv_heads) * size), np.float32)
    at = np.arange(num_tokens)
    locations = table[0, at // BLOCK_TOKENS].astype(np.int64) * BLOCK_TOKENS + at % BLOCK_TOKENS
    rotation = np.ones((64, 2, size // 2), np.float32)
    none = np.empty(0, np.float32)

    def answer() -> Array:
        queries = np.empty((num_tokens, 2, size), np.float32)
        place_qkv(qkv, rotation, at, locations, none, none, np.float32(0), queries, keys, values)
        out = np.empty((num_tokens, 2 * size), np.float32)
        pieces = np.array([[0, 0, num_tokens, 0]])
        attend(queries, keys, values, table, pieces, np.float32(0.3), out)
        return out

    expected = answer()
    # As a sequence that went wrong leaves its blocks.
    for words in (keys, values):
        words.view(np.uint16 if dtype == np.uint32 else np.float32)[:] = (
            0x7FC0 if dtype == np.uint32 else np.nan
        )
    assert (answer() == expected).all()
    assert np.isfinite(expected).all()


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
    if dtype == np.uint32:
        qkv = floats(bfloat16(qkv))
    angles = rng.uniform(0, 6, (50, size // 2)).astype(np.float32)
    rotation = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    positions = np.array([7, 8, 9, 0, 49])
    locations = np.array([3, 40, 41, 95, 64])
    keys, values = blocks_for(3, kv_heads, size, dtype)
    queries = np.zeros((tokens + 1, heads, size), np.float32)
    weight = rng.uniform(0.5, 2, size).astype(np.float32)
    place_qkv(
        qkv, rotation, positions, locations, weight, weight, np.float32(1e-6), queries, keys, values
    )
    rows = torch.from_numpy(qkv[:tokens]).view(tokens, -1, size)
    turned = rms_norm(rows, (size,), torch.from_numpy(weight), 1e-6)
    cos, sin = (torch.from_numpy(rotation[positions, i]).unsqueeze(1) for i in (0, 1))
    first, second = turned.chunk(2, -1)
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], -1).numpy()
    np.testing.assert_allclose(queries[:tokens], turned[:, :heads], atol=1e-5)
    precision = 1e-5 if dtype == np.float32 else 0.02
    for t, location in enumerate(locations):
        block, offset = divmod(location, BLOCK_TOKENS)
        held = keys_of(keys)[block, :, :, offset]
        np.testing.assert_allclose(held, turned[t, heads : heads + kv_heads], atol=precision)
        assert (values_of(values)[block, :, offset] == rows[t, heads + kv_heads :].numpy()).all()


@pytest.mark.parametrize(
    ("one", "several"),
    [
        (attend, attend_in_parallel),
        (bf16_product, bf16_product_in_parallel),
        (int8_product, int8_product_in_parallel),
    ],
)
def test_what_runs_on_threads_is_not_kept_as_what_does_not(one: Any, several: Any) -> None:
    # numba keeps compiled code by the function alone: one of the two would be loaded for both.
    assert one.py_func is not several.py_func
    assert several.targetoptions["parallel"]
    assert "parallel" not in one.targetoptions
