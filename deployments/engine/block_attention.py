"""Attention over KV blocks on a CPU, compiled at run time by numba.

Keys lie in blocks of `BLOCK_TOKENS` tokens as (blocks, kv heads, head size / g, BLOCK_TOKENS) words
of 32 bits, values as (blocks, kv heads, BLOCK_TOKENS / g, head size): a word is a float32, g = 1,
or two neighbours in bfloat16, g = 2, of a token's key, or of two tokens' values, which one
instruction multiplies and adds. A block's scores are then sums of whole vectors, and nothing is
ever added up across the lanes of one but for the softmax.

Each query goes through the blocks of its sequence from the first to its own, with the running
maximum and sum of Milakov and Gimelshein (2018), as FlashAttention does. What it computes, and in
which order, depends on its own position alone: not on how a prompt was cut, on what else is in
the step, nor on whether the keys before it were computed now, in an earlier turn, or by a
neighbour. So an answer is equal to the last bit in any company, and with any prefix reused.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, overload

from deployments.engine.vectors import (
    F32,
    I32,
    I64,
    LANES,
    VECTOR,
    VECTOR_I,
    Vectors,
    as_kept,
    load_number,
    splat,
)

ZERO = np.float32(0.0)
BLOCK_TOKENS = 32
SHARE = 96
"""Queries of one head that a thread takes at a time."""
MAX_QUERIES = 4
"""Queries that share each load of keys and values; 4 x 4 sums fit the registers of AVX-512."""


def block_shapes(
    num_blocks: int, num_kv_heads: int, head_size: int, group: int
) -> list[tuple[int, ...]]:
    """Of keys and of values, in words; `group` numbers to a word."""
    return [
        (num_blocks, num_kv_heads, head_size // group, BLOCK_TOKENS),
        (num_blocks, num_kv_heads, BLOCK_TOKENS // group, head_size),
    ]


def _queries(kind: Any) -> int:
    return int(kind.literal_value)


def _load(vectors: Vectors, pointer: Any) -> Any:
    """16 words as what they are: numbers, or pairs of them."""
    return vectors.load(pointer) if pointer.type.pointee == F32 else vectors.load_words(pointer)


def _add(vectors: Vectors, total: Any, a: Any, b: Any) -> Any:
    return vectors.fma(a, b, total) if a.type == VECTOR else vectors.add_products(total, a, b)


@intrinsic(prefer_literal=True)
def _scores(typingctx, num_queries, q, q_at, q_step, keys, keys_at, num_words, out):  # fmt: skip
    """out[i, j] = q[i] . keys[:, j] for one block, by words; q[i] begins at q_at + i * q_step."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        vectors = Vectors(context, builder)
        n = _queries(signature.args[0])
        q_data = vectors.data(signature.args[1], args[1])
        key_data = vectors.data(signature.args[4], args[4])
        out_data = vectors.data(signature.args[7], args[7])
        q_at, q_step, keys_at, num_words = args[2], args[3], args[5], args[6]
        sums = [
            [cgutils.alloca_once_value(builder, splat(VECTOR, 0.0)) for _ in range(2)]
            for _ in range(n)
        ]
        for row in sums:
            for place in row:
                builder.store(splat(VECTOR, 0.0), place)
        with cgutils.for_range(builder, num_words) as loop:
            at = builder.add(keys_at, builder.mul(loop.index, I64(BLOCK_TOKENS)))
            halves = [_load(vectors, vectors.at(key_data, at, I64(LANES * j))) for j in range(2)]
            for i in range(n):
                place = builder.add(q_at, builder.mul(q_step, I64(i)))
                number = builder.load(vectors.at(q_data, place, loop.index))
                several = vectors.broadcast(number, halves[0].type)
                for j in range(2):
                    total = _add(vectors, builder.load(sums[i][j]), several, halves[j])
                    builder.store(total, sums[i][j])
        for i in range(n):
            for j in range(2):
                place = vectors.at(out_data, I64(i * BLOCK_TOKENS + j * LANES))
                vectors.store(builder.load(sums[i][j]), place)
        return context.get_dummy_value()

    return types.void(num_queries, q, q_at, q_step, keys, keys_at, num_words, out), build


@intrinsic(prefer_literal=True)
def _soften(typingctx, scores, at, num_valid, scale, running, index, kept):  # fmt: skip
    """Turns a row of scores into weights, put into `kept`, under its query's running maximum and sum.

    `running` holds (maximum, sum, factor) by query; the factor is what has to be applied to what
    was summed before. Scores from `num_valid` on are left out.
    """

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        vectors = Vectors(context, builder)
        data = vectors.data(signature.args[0], args[0])
        state = vectors.data(signature.args[4], args[4])
        kept = vectors.data(signature.args[6], args[6])
        at, num_valid, index = args[1], args[2], args[5]
        scale = vectors.broadcast(args[3])
        count = builder.trunc(num_valid, I32)
        lanes = builder.insert_element(ir.Constant(VECTOR_I, ir.Undefined), count, I32(0))
        limit = builder.shuffle_vector(
            lanes, lanes, ir.Constant(ir.VectorType(I32, LANES), [0] * LANES)
        )
        least = splat(VECTOR, float("-inf"))
        rows, masks = [], []
        for j in range(2):
            numbers = ir.Constant(VECTOR_I, [LANES * j + lane for lane in range(LANES)])
            mask = builder.icmp_signed("<", numbers, limit)
            value = builder.fmul(vectors.load(vectors.at(data, at, I64(LANES * j))), scale)
            rows.append(builder.select(mask, value, least))
            masks.append(mask)
        base = builder.mul(index, I64(3))
        before = builder.load(vectors.at(state, base))
        block = vectors.across(vectors.larger(rows[0], rows[1]), vectors.larger)
        most = vectors.larger(before, block)
        best = vectors.broadcast(most)
        factor = vectors.exp(builder.fsub(vectors.broadcast(before), best))
        factor = builder.extract_element(factor, I32(0))
        weights = []
        for j in range(2):
            weight = vectors.exp(builder.fsub(rows[j], best))
            weights.append(builder.select(masks[j], weight, splat(VECTOR, 0.0)))
            vectors.store(weights[j], vectors.at(kept, at, I64(LANES * j)))
        total = vectors.across(builder.fadd(weights[0], weights[1]), builder.fadd)
        before_sum = builder.load(vectors.at(state, base, I64(1)))
        builder.store(most, vectors.at(state, base))
        builder.store(
            builder.fadd(builder.fmul(before_sum, factor), total), vectors.at(state, base, I64(1))
        )
        builder.store(factor, vectors.at(state, base, I64(2)))
        return context.get_dummy_value()

    return types.void(scores, at, num_valid, scale, running, index, kept), build


@intrinsic(prefer_literal=True)
def _gather(typingctx, num_queries, num_vectors, weights, weight_step, num_words, values, values_at, head_size, running, out, out_at):  # fmt: skip
    """out[i] = out[i] * factor[i] + weights[i] @ values for 16 * num_vectors columns of a block, by words."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        vectors = Vectors(context, builder)
        n, width = _queries(signature.args[0]), _queries(signature.args[1])
        weight_data = vectors.data(signature.args[2], args[2])
        value_data = vectors.data(signature.args[5], args[5])
        state = vectors.data(signature.args[8], args[8])
        out_data = vectors.data(signature.args[9], args[9])
        weight_step, num_words, values_at = args[3], args[4], args[6]
        head_size, out_at = args[7], args[10]

        def spot(i: int, c: int) -> Any:
            row = builder.add(out_at, builder.mul(head_size, I64(i)))
            return vectors.at(out_data, row, I64(LANES * c))

        sums = []
        for i in range(n):
            factor = vectors.broadcast(builder.load(vectors.at(state, I64(3 * i + 2))))
            row = []
            for c in range(width):
                start = builder.fmul(vectors.load(spot(i, c)), factor)
                slot = cgutils.alloca_once(builder, VECTOR)
                builder.store(start, slot)
                row.append(slot)
            sums.append(row)
        with cgutils.for_range(builder, num_words) as loop:
            at = builder.add(values_at, builder.mul(loop.index, head_size))
            row = [_load(vectors, vectors.at(value_data, at, I64(LANES * c))) for c in range(width)]
            for i in range(n):
                place = builder.add(builder.mul(weight_step, I64(i)), loop.index)
                several = vectors.broadcast(
                    builder.load(vectors.at(weight_data, place)), row[0].type
                )
                for c in range(width):
                    total = _add(vectors, builder.load(sums[i][c]), several, row[c])
                    builder.store(total, sums[i][c])
        for i in range(n):
            for c in range(width):
                vectors.store(builder.load(sums[i][c]), spot(i, c))
        return context.get_dummy_value()

    return (
        types.void(num_queries, num_vectors, weights, weight_step, num_words, values, values_at, head_size,
                   running, out, out_at),
        build,
    )  # fmt: skip


def _numbers(words: Any) -> Any:
    """The numbers in words, as they are kept: float32, or bfloat16 as bits."""
    raise NotImplementedError


@overload(_numbers)
def _numbers_compiled(words):
    if words.dtype == types.uint32:
        return lambda words: words.view(np.uint16)
    return lambda words: words


@numba.njit(nogil=True, cache=True)
def place_qkv(qkv, rotation, positions, locations, q_norm, k_norm, eps, queries, keys, values):
    """Splits merged projections, turns queries and keys by position, and puts keys and values.

    Args:
        qkv: (T, (heads + 2 kv heads) * D), float32 or bfloat16 bits.
        rotation: (positions, 2, D / 2) float32, cosines and sines.
        positions, locations: (T',) int64, T' <= T; the rest is padding.
        q_norm, k_norm: (D,) float32 weights of an RMS norm over each head, or empty.
        queries: (T, heads, D) float32, filled here.
        keys, values: blocks, see the module.
    """
    num_heads, head_size = queries.shape[1], queries.shape[2]
    num_kv_heads, half = keys.shape[1], queries.shape[2] // 2
    row = np.empty(head_size, np.float32)
    key_numbers, value_numbers = _numbers(keys), _numbers(values)
    # Numbers to a word, and so values of a token that lie beside those of the next one.
    group = key_numbers.shape[3] // BLOCK_TOKENS
    for t in range(locations.shape[0]):
        position, block = positions[t], locations[t] // BLOCK_TOKENS
        offset = locations[t] % BLOCK_TOKENS
        line = qkv[t]
        for h in range(num_heads + num_kv_heads):
            for d in range(head_size):
                row[d] = load_number(line, h * head_size + d)
            norm = q_norm if h < num_heads else k_norm
            if norm.shape[0] > 0:
                total = np.float32(0.0)
                for d in range(head_size):
                    total += row[d] * row[d]
                factor = np.float32(1.0) / np.sqrt(total / np.float32(head_size) + eps)
                for d in range(head_size):
                    row[d] = row[d] * factor * norm[d]
            for d in range(half):
                cos, sin = rotation[position, 0, d], rotation[position, 1, d]
                first, second = row[d], row[d + half]
                row[d] = first * cos - second * sin
                row[d + half] = second * cos + first * sin
            if h < num_heads:
                for d in range(head_size):
                    queries[t, h, d] = row[d]
            else:
                for d in range(head_size):
                    key_numbers[block, h - num_heads, d // group, offset * group + d % group] = (
                        as_kept(key_numbers, row[d])
                    )
        start = (num_heads + num_kv_heads) * head_size
        for h in range(num_kv_heads):
            for d in range(head_size):
                number = as_kept(value_numbers, load_number(line, start + h * head_size + d))
                value_numbers[block, h, offset // group, d * group + offset % group] = number
                if group == 2 and offset % 2 == 0:
                    # Its neighbour may be read with it before it is there, weighted with 0.
                    value_numbers[block, h, offset // 2, d * 2 + 1] = as_kept(value_numbers, ZERO)


@numba.njit(nogil=True, cache=True)
def _score(n, q, num_words, keys, keys_at, scores):
    """As `_scores` for up to four queries: their number must be a constant there."""
    if n == 4:
        _scores(4, q, 0, num_words, keys, keys_at, num_words, scores)
    elif n == 3:
        _scores(3, q, 0, num_words, keys, keys_at, num_words, scores)
    elif n == 2:
        _scores(2, q, 0, num_words, keys, keys_at, num_words, scores)
    else:
        _scores(1, q, 0, num_words, keys, keys_at, num_words, scores)


@numba.njit(nogil=True, cache=True)
def _collect(n, weights, step, num_words, values, values_at, head_size, running, sums):
    """As `_gather` for up to four queries and all columns."""
    column = 0
    while column + 64 <= head_size:
        at = values_at + column
        if n == 4:
            _gather(4, 4, weights, step, num_words, values, at, head_size, running, sums, column)
        elif n == 3:
            _gather(3, 4, weights, step, num_words, values, at, head_size, running, sums, column)
        elif n == 2:
            _gather(2, 4, weights, step, num_words, values, at, head_size, running, sums, column)
        else:
            _gather(1, 4, weights, step, num_words, values, at, head_size, running, sums, column)
        column += 64
    while column < head_size:
        at = values_at + column
        if n == 4:
            _gather(4, 1, weights, step, num_words, values, at, head_size, running, sums, column)
        elif n == 3:
            _gather(3, 1, weights, step, num_words, values, at, head_size, running, sums, column)
        elif n == 2:
            _gather(2, 1, weights, step, num_words, values, at, head_size, running, sums, column)
        else:
            _gather(1, 1, weights, step, num_words, values, at, head_size, running, sums, column)
        column += 16


@numba.njit(nogil=True, cache=True)
def _shares(pieces, group, num_kv_heads):
    """(shares, 3): piece, KV head and first query of what is computed by itself."""
    num_pieces = pieces.shape[0]
    total = 0
    for piece in range(num_pieces):
        total += (pieces[piece, 2] * group + SHARE - 1) // SHARE * num_kv_heads
    shares = np.empty((total, 3), np.int64)
    at_share = 0
    for piece in range(num_pieces):
        for start in range(0, pieces[piece, 2] * group, SHARE):
            for head in range(num_kv_heads):
                shares[at_share] = piece, head, start
                at_share += 1
    return shares


@numba.njit(nogil=True, cache=True)
def _attend_share(share, queries, keys, values, tables, pieces, scale, out):
    num_heads, head_size = queries.shape[1], queries.shape[2]
    num_kv_heads, num_words = keys.shape[1], keys.shape[2]
    group = num_heads // num_kv_heads
    group_size = head_size // num_words
    stride = num_words * BLOCK_TOKENS
    piece, head, start = share
    row, first = pieces[piece, 0], pieces[piece, 1]
    num_rows, position = pieces[piece, 2] * group, pieces[piece, 3]
    q_words = np.empty(MAX_QUERIES * num_words, keys.dtype)
    weight_words = np.empty(MAX_QUERIES * BLOCK_TOKENS // group_size, keys.dtype)
    q, weights = _numbers(q_words), _numbers(weight_words)
    scores = np.empty(MAX_QUERIES * BLOCK_TOKENS, np.float32)
    running = np.empty(MAX_QUERIES * 3, np.float32)
    sums = np.empty(MAX_QUERIES * head_size, np.float32)
    limits = np.empty(MAX_QUERIES, np.int64)
    for begin in range(start, min(start + SHARE, num_rows), MAX_QUERIES):
        n = min(MAX_QUERIES, num_rows - begin)
        for i in range(n):
            t, h = (begin + i) // group, head * group + (begin + i) % group
            limits[i] = position + t + 1
            running[3 * i] = -np.inf
            running[3 * i + 1] = 0.0
            for d in range(head_size):
                q[i * head_size + d] = as_kept(q, queries[first + t, h, d])
                sums[i * head_size + d] = 0.0
        for b in range((limits[n - 1] + BLOCK_TOKENS - 1) // BLOCK_TOKENS):
            at = (tables[row, b] * num_kv_heads + head) * stride
            _score(n, q_words, num_words, keys, at, scores)
            most = 0
            for i in range(n):
                num_valid = min(max(limits[i] - b * BLOCK_TOKENS, 0), BLOCK_TOKENS)
                most = max(most, num_valid)
                _soften(scores, i * BLOCK_TOKENS, num_valid, scale, running, i, weights)
            step = BLOCK_TOKENS // group_size
            num_read = (most + group_size - 1) // group_size
            _collect(n, weight_words, step, num_read, values, at, head_size, running, sums)
        for i in range(n):
            t, h = (begin + i) // group, head * group + (begin + i) % group
            factor = np.float32(1.0) / running[3 * i + 1]
            for d in range(head_size):
                number = sums[i * head_size + d] * factor
                out[first + t, h * head_size + d] = as_kept(out, number)


@numba.njit(nogil=True, cache=True)
def attend(queries, keys, values, tables, pieces, scale, out):
    """Causal attention of each piece's queries to their own sequence.

    Args:
        queries: (T, heads, D) float32.
        tables: (rows, most blocks) int32, the blocks of each sequence in order.
        pieces: (P, 4) int64: row of `tables`, first packed token, number of tokens, and the
            position of the first in its sequence.
        scale: float32, of the scores.
        out: (T, heads * D), float32 or bfloat16 bits, filled for the pieces' tokens.
    """
    shares = _shares(pieces, queries.shape[1] // keys.shape[1], keys.shape[1])
    for i in range(len(shares)):
        _attend_share(shares[i], queries, keys, values, tables, pieces, scale, out)


# A function of its own: numba keeps what it compiled by the function, not by how it was compiled.
@numba.njit(nogil=True, cache=True, parallel=True)
def attend_in_parallel(queries, keys, values, tables, pieces, scale, out):
    """The same on as many threads as `numba.set_num_threads` says; equal to the last bit."""
    shares = _shares(pieces, queries.shape[1] // keys.shape[1], keys.shape[1])
    for i in numba.prange(len(shares)):
        _attend_share(shares[i], queries, keys, values, tables, pieces, scale, out)
