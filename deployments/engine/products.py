"""Matrix products of 16 and 8 bits by the AVX-512 instructions that sum such products.

Compiled by numba, of `vectors`. Weights are packed once, in tiles of 64 output columns, and
each tile is read once for up to six rows: 24 sums, four vectors of weights and one of activations
fit the 32 registers. Every number of a result is one chain of sums over the
input columns, in their order: it does not depend on how many rows or threads there are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from deployments.engine.vectors import I64, LANES, VECTOR, VECTOR_I, Vectors

TILE = 64
"""Output columns that are computed together: four vectors."""
NUM_VECTORS = TILE // LANES


def pack(weight: NDArray[Any]) -> NDArray[Any]:
    """Lays weights out in the order in which the kernels read them.

    Args:
        weight: (N, K), bits of bfloat16 (uint16) or int8; K a multiple of 2, or of 4 for int8.

    Returns:
        (tiles, K / g, TILE, g), g inputs of each of the tile's columns being neighbours: what one
        instruction multiplies. Columns behind the last are zeros.
    """
    num_out, num_in = weight.shape
    group = 4 // weight.itemsize
    num_tiles = -(-num_out // TILE)
    padded = np.zeros((num_tiles * TILE, num_in), weight.dtype)
    padded[:num_out] = weight
    tiles = padded.reshape(num_tiles, TILE, num_in // group, group)
    return np.ascontiguousarray(tiles.transpose(0, 2, 1, 3))


def _sums(
    vectors: Vectors,
    num_rows: int,
    add: Callable[[Any, Any, Any], Any],
    starts: list[Any],
    x: tuple[Any, Any, Any],
    packed: tuple[Any, Any],
    num_groups: Any,
) -> list[list[Any]]:
    """The sums of `num_rows` rows for the four vectors of a tile.

    Args:
        add: sums a vector, a word of a row in all lanes, and a vector of weights.
        starts: what each vector begins with.
        x: pointer, first element and elements from row to row, in words of 32 bits.
        packed: pointer and first element, in words of 32 bits.
        num_groups: words of a row.
    """
    builder = vectors.builder
    kind = starts[0].type
    x_data, x_at, x_step = x
    w_data, w_at = packed
    slots = [[cgutils.alloca_once(builder, kind) for _ in starts] for _ in range(num_rows)]
    for row in slots:
        for slot, start in zip(row, starts, strict=True):
            builder.store(start, slot)
    row_at = [builder.add(x_at, builder.mul(x_step, I64(i))) for i in range(num_rows)]
    with cgutils.for_range(builder, num_groups) as loop:
        place = builder.add(w_at, builder.mul(loop.index, I64(TILE)))
        weights = []
        for j in range(NUM_VECTORS):
            pointer = builder.gep(w_data, [builder.add(place, I64(LANES * j))])
            weights.append(vectors.load_words(pointer))
        for i in range(num_rows):
            word = builder.load(builder.gep(x_data, [builder.add(row_at[i], loop.index)]))
            several = vectors.broadcast(word, VECTOR_I)
            for j in range(NUM_VECTORS):
                builder.store(add(builder.load(slots[i][j]), several, weights[j]), slots[i][j])
    return [[builder.load(slot) for slot in row] for row in slots]


@intrinsic(prefer_literal=True)
def _bf16_rows(typingctx, num_rows, x, x_at, packed, packed_at, num_groups, num_valid, out, out_at, out_step):  # fmt: skip
    """out[i] = x[i] . packed for some rows and one tile, of which `num_valid` vectors are kept.

    `x` and `packed` are words of two bfloat16; offsets are in words.
    """

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        vectors = Vectors(context, builder)
        n = int(signature.args[0].literal_value)
        zero = ir.Constant(VECTOR, [0.0] * LANES)
        sums = _sums(
            vectors, n, vectors.add_products, [zero] * NUM_VECTORS,
            (vectors.data(signature.args[1], args[1]), args[2], args[5]),
            (vectors.data(signature.args[3], args[3]), args[4]), args[5],
        )  # fmt: skip
        out_data = vectors.data(signature.args[7], args[7])
        for j in range(NUM_VECTORS):
            with builder.if_then(builder.icmp_signed(">", args[6], I64(j))):
                for i in range(n):
                    place = builder.add(args[8], builder.mul(args[9], I64(i)))
                    vectors.store(sums[i][j], vectors.at(out_data, place, I64(LANES * j)))
        return context.get_dummy_value()

    return (
        types.void(num_rows, x, x_at, packed, packed_at, num_groups, num_valid, out, out_at,
                   out_step),
        build,
    )  # fmt: skip


@intrinsic(prefer_literal=True)
def _int8_rows(typingctx, num_rows, x, x_at, packed, packed_at, num_groups, num_valid, starts, scales, column, factors, row, out, out_at, out_step):  # fmt: skip
    """As `_bf16_rows` with words of four bytes: sums from `starts` on, times `scales` and `factors`.

    `starts` and `scales` are read from `column` on, `factors` from `row` on.
    """

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        vectors = Vectors(context, builder)
        n = int(signature.args[0].literal_value)
        start_data = vectors.data(signature.args[7], args[7])
        scale_data = vectors.data(signature.args[8], args[8])
        starts, scales = [], []
        for j in range(NUM_VECTORS):
            pointer = vectors.at(start_data, args[9], I64(LANES * j))
            starts.append(vectors.load_words(pointer))
            scales.append(vectors.load(vectors.at(scale_data, args[9], I64(LANES * j))))
        sums = _sums(
            vectors, n, vectors.add_byte_products, starts,
            (vectors.data(signature.args[1], args[1]), args[2], args[5]),
            (vectors.data(signature.args[3], args[3]), args[4]), args[5],
        )  # fmt: skip
        factor_data = vectors.data(signature.args[10], args[10])
        factors = [
            vectors.broadcast(builder.load(vectors.at(factor_data, args[11], I64(i))))
            for i in range(n)
        ]
        out_data = vectors.data(signature.args[12], args[12])
        for j in range(NUM_VECTORS):
            with builder.if_then(builder.icmp_signed(">", args[6], I64(j))):
                for i in range(n):
                    value = builder.fmul(builder.sitofp(sums[i][j], VECTOR), scales[j])
                    place = builder.add(args[13], builder.mul(args[14], I64(i)))
                    vectors.store(
                        builder.fmul(value, factors[i]), vectors.at(out_data, place, I64(LANES * j))
                    )
        return context.get_dummy_value()

    return (
        types.void(num_rows, x, x_at, packed, packed_at, num_groups, num_valid, starts, scales,
                   column, factors, row, out, out_at, out_step),
        build,
    )  # fmt: skip


@numba.njit(nogil=True, cache=True)
def _bf16_tile(tile, x, packed, out):
    num_rows, num_groups = x.shape
    num_out = out.shape[1]
    column = tile * TILE
    at, valid = column * num_groups, (num_out - column) // LANES
    m = 0
    while m + 6 <= num_rows:
        _bf16_rows(6, x, m * num_groups, packed, at, num_groups, valid, out, m * num_out + column, num_out)  # fmt: skip
        m += 6
    while m + 4 <= num_rows:
        _bf16_rows(4, x, m * num_groups, packed, at, num_groups, valid, out, m * num_out + column, num_out)  # fmt: skip
        m += 4
    while m + 2 <= num_rows:
        _bf16_rows(2, x, m * num_groups, packed, at, num_groups, valid, out, m * num_out + column, num_out)  # fmt: skip
        m += 2
    if m < num_rows:
        _bf16_rows(1, x, m * num_groups, packed, at, num_groups, valid, out, m * num_out + column, num_out)  # fmt: skip


@numba.njit(nogil=True, cache=True)
def bf16_product(x, packed, out):
    """out = x W^T.

    Args:
        x: (M, K / 2) uint32, words of two bfloat16.
        packed: (tiles, K / 2, TILE) uint32, of `pack`.
        out: (M, N) float32, N a multiple of 16, filled.
    """
    for tile in range(packed.shape[0]):
        _bf16_tile(tile, x, packed, out)


# A function of its own: numba keeps what it compiled by the function, not by how it was compiled.
@numba.njit(nogil=True, cache=True, parallel=True)
def bf16_product_in_parallel(x, packed, out):
    """The same on as many threads as `numba.set_num_threads` says; equal to the last bit."""
    for tile in numba.prange(packed.shape[0]):
        _bf16_tile(tile, x, packed, out)


@numba.njit(nogil=True, cache=True)
def _int8_tile(tile, x, packed, starts, scales, factors, out):
    num_rows, num_groups = x.shape
    num_out = out.shape[1]
    column = tile * TILE
    at, valid = column * num_groups, (num_out - column) // LANES
    m = 0
    while m + 6 <= num_rows:
        _int8_rows(6, x, m * num_groups, packed, at, num_groups, valid, starts, scales, column, factors, m, out, m * num_out + column, num_out)  # fmt: skip
        m += 6
    while m + 4 <= num_rows:
        _int8_rows(4, x, m * num_groups, packed, at, num_groups, valid, starts, scales, column, factors, m, out, m * num_out + column, num_out)  # fmt: skip
        m += 4
    while m + 2 <= num_rows:
        _int8_rows(2, x, m * num_groups, packed, at, num_groups, valid, starts, scales, column, factors, m, out, m * num_out + column, num_out)  # fmt: skip
        m += 2
    if m < num_rows:
        _int8_rows(1, x, m * num_groups, packed, at, num_groups, valid, starts, scales, column, factors, m, out, m * num_out + column, num_out)  # fmt: skip


@numba.njit(nogil=True, cache=True)
def int8_product(x, packed, starts, scales, factors, out):
    """out = (x - ZERO_BYTE) W^T * scales * factors.

    Args:
        x: (M, K / 4) int32, words of four bytes without sign, as `kernels.quantise_rows` makes them.
        packed: (tiles, K / 4, TILE) int32, of `pack`.
        starts: (tiles * TILE,) int32, -ZERO_BYTE times the sum of each column's weights.
        scales: (tiles * TILE,) float32, of the columns. factors: (M,) float32, of the rows.
        out: (M, N) float32, N a multiple of 16, filled.
    """
    for tile in range(packed.shape[0]):
        _int8_tile(tile, x, packed, starts, scales, factors, out)


@numba.njit(nogil=True, cache=True, parallel=True)
def int8_product_in_parallel(x, packed, starts, scales, factors, out):
    """The same on several threads."""
    for tile in numba.prange(packed.shape[0]):
        _int8_tile(tile, x, packed, starts, scales, factors, out)
