"""Attention over KV blocks on a CPU, compiled at run time by numba.

Keys lie in blocks of `BLOCK_TOKENS` tokens as (blocks, kv heads, head size, BLOCK_TOKENS), values
as (blocks, kv heads, BLOCK_TOKENS, head size): a block's scores are then sums of whole vectors,
and nothing is ever added up across the lanes of one but for the softmax. Both are float32, or
bfloat16 as the bits of uint16.

Each query goes through the blocks of its sequence from the first to its own, with the running
maximum and sum of Milakov and Gimelshein (2018), as FlashAttention does. What it computes, and in
which order, depends on its own position alone: not on how a prompt was cut, on what else is in
the step, nor on whether the keys before it were computed now, in an earlier turn, or by a
neighbour. So an answer is equal to the last bit in any company, and with any prefix reused.

The inner loops are written as LLVM vectors of 16 numbers, which every target lowers to what it
has; the rest is plain numba. No compiler is needed at run time, and what was compiled is kept
beside this file, or where NUMBA_CACHE_DIR says.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, overload

BLOCK_TOKENS = 32
LANES = 16
SHARE = 96
"""Queries of one head that a thread takes at a time."""
ZERO_BYTE = 128
"""Stands for 0 in activations of 8 bits, which have no sign."""
MAX_QUERIES = 4
"""Queries that share each load of keys and values; 4 x 4 sums fit the registers of AVX-512."""

F32, I32, I16, I64 = ir.FloatType(), ir.IntType(32), ir.IntType(16), ir.IntType(64)
VECTOR, VECTOR_I = ir.VectorType(F32, LANES), ir.VectorType(I32, LANES)
LOG2_E = 1.4426950408889634
LN2_HIGH, LN2_LOW = 0.693359375, -2.12194440e-4
EXP_TERMS = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2,
             1.6666665459e-1, 5.0000001201e-1)  # fmt: skip
"""Of the polynomial for exp on [-ln 2 / 2, ln 2 / 2], from Moshier's Cephes library."""


class Vectors:
    """What the inner loops are made of, for one function that is being built."""

    def __init__(self, context: Any, builder: Any) -> None:
        self.context, self.builder = context, builder

    def data(self, array_type: Any, array: Any) -> Any:
        return self.context.make_array(array_type)(self.context, self.builder, value=array).data

    def at(self, data: Any, *offsets: Any) -> Any:
        place = offsets[0]
        for offset in offsets[1:]:
            place = self.builder.add(place, offset)
        return self.builder.gep(data, [place])

    def load(self, pointer: Any) -> Any:
        """16 numbers as float32, from float32 or bfloat16."""
        builder, kind = self.builder, pointer.type.pointee
        if kind == F32:
            return builder.load(builder.bitcast(pointer, VECTOR.as_pointer()), align=4)
        halves = ir.VectorType(I16, LANES)
        bits = builder.load(builder.bitcast(pointer, halves.as_pointer()), align=2)
        wide = builder.shl(builder.zext(bits, VECTOR_I), _splat(VECTOR_I, 16))
        return builder.bitcast(wide, VECTOR)

    def store(self, vector: Any, pointer: Any) -> None:
        """16 numbers to float32, or rounded to bfloat16, halves to even; a NaN stays one."""
        builder = self.builder
        if pointer.type.pointee == F32:
            builder.store(vector, builder.bitcast(pointer, VECTOR.as_pointer()), align=4)
            return
        bits, sixteen = builder.bitcast(vector, VECTOR_I), _splat(VECTOR_I, 16)
        odd = builder.and_(builder.lshr(bits, sixteen), _splat(VECTOR_I, 1))
        rounded = builder.add(builder.add(bits, _splat(VECTOR_I, 0x7FFF)), odd)
        is_nan = builder.fcmp_unordered("!=", vector, vector)
        rounded = builder.select(is_nan, _splat(VECTOR_I, 0x7FC00000), rounded)
        halves = ir.VectorType(I16, LANES)
        narrow = builder.trunc(builder.lshr(rounded, sixteen), halves)
        builder.store(narrow, builder.bitcast(pointer, halves.as_pointer()), align=2)

    def broadcast(self, number: Any, kind: Any = VECTOR) -> Any:
        one = self.builder.insert_element(ir.Constant(kind, ir.Undefined), number, I32(0))
        zeros = ir.Constant(VECTOR_I, [0] * LANES)
        return self.builder.shuffle_vector(one, ir.Constant(kind, ir.Undefined), zeros)

    def call(self, name: str, result: Any, *args: Any) -> Any:
        module = self.builder.module
        kind = ir.FunctionType(result, [arg.type for arg in args])
        return self.builder.call(cgutils.get_or_insert_function(module, kind, name), args)

    def fma(self, a: Any, b: Any, c: Any) -> Any:
        return self.call("llvm.fma.v16f32", VECTOR, a, b, c)

    def larger(self, a: Any, b: Any) -> Any:
        return self.builder.select(self.builder.fcmp_ordered(">", a, b), a, b)

    def exp(self, x: Any) -> Any:
        """e^x for x <= 0; below -87 it is that of -87, the least normal number or so."""
        builder = self.builder
        x = self.larger(x, _splat(VECTOR, -87.0))
        whole = self.call("llvm.rint.v16f32", VECTOR, builder.fmul(x, _splat(VECTOR, LOG2_E)))
        r = self.fma(whole, _splat(VECTOR, -LN2_HIGH), x)
        r = self.fma(whole, _splat(VECTOR, -LN2_LOW), r)
        total = _splat(VECTOR, EXP_TERMS[0])
        for term in EXP_TERMS[1:]:
            total = self.fma(total, r, _splat(VECTOR, term))
        total = self.fma(builder.fmul(total, r), r, builder.fadd(r, _splat(VECTOR, 1.0)))
        power = builder.add(builder.fptosi(whole, VECTOR_I), _splat(VECTOR_I, 127))
        return builder.fmul(
            total, builder.bitcast(builder.shl(power, _splat(VECTOR_I, 23)), VECTOR)
        )

    def across(self, vector: Any, combine: Any) -> Any:
        """The 16 numbers combined into one, by halves."""
        builder = self.builder
        width = LANES
        while width > 1:
            width //= 2
            lanes = [(i + width) % LANES for i in range(LANES)]
            moved = builder.shuffle_vector(
                vector, vector, ir.Constant(ir.VectorType(I32, LANES), lanes)
            )
            vector = combine(vector, moved)
        return builder.extract_element(vector, I32(0))


def _splat(kind: Any, number: float) -> Any:
    return ir.Constant(kind, [number] * LANES)


def _queries(kind: Any) -> int:
    return int(kind.literal_value)


@intrinsic(prefer_literal=True)
def _scores(typingctx, num_queries, q, q_at, q_step, keys, keys_at, head_size, out):  # fmt: skip
    """out[i, j] = q[i] . keys[:, j] for one block; q[i] begins at q_at + i * q_step."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        vectors = Vectors(context, builder)
        n = _queries(signature.args[0])
        q_data = vectors.data(signature.args[1], args[1])
        key_data = vectors.data(signature.args[4], args[4])
        out_data = vectors.data(signature.args[7], args[7])
        q_at, q_step, keys_at, head_size = args[2], args[3], args[5], args[6]
        sums = [
            [cgutils.alloca_once_value(builder, _splat(VECTOR, 0.0)) for _ in range(2)]
            for _ in range(n)
        ]
        for row in sums:
            for place in row:
                builder.store(_splat(VECTOR, 0.0), place)
        with cgutils.for_range(builder, head_size) as loop:
            at = builder.add(keys_at, builder.mul(loop.index, I64(BLOCK_TOKENS)))
            halves = [vectors.load(vectors.at(key_data, at, I64(LANES * j))) for j in range(2)]
            for i in range(n):
                place = builder.add(q_at, builder.mul(q_step, I64(i)))
                number = vectors.broadcast(builder.load(vectors.at(q_data, place, loop.index)))
                for j in range(2):
                    total = vectors.fma(number, halves[j], builder.load(sums[i][j]))
                    builder.store(total, sums[i][j])
        for i in range(n):
            for j in range(2):
                place = vectors.at(out_data, I64(i * BLOCK_TOKENS + j * LANES))
                vectors.store(builder.load(sums[i][j]), place)
        return context.get_dummy_value()

    return types.void(num_queries, q, q_at, q_step, keys, keys_at, head_size, out), build


@intrinsic(prefer_literal=True)
def _soften(typingctx, scores, at, num_valid, scale, running, index):  # fmt: skip
    """Turns a row of scores into weights, under the running maximum and sum of its query.

    `running` holds (maximum, sum, factor) by query; the factor is what has to be applied to what
    was summed before. Scores from `num_valid` on are left out.
    """

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        vectors = Vectors(context, builder)
        data = vectors.data(signature.args[0], args[0])
        state = vectors.data(signature.args[4], args[4])
        at, num_valid, index = args[1], args[2], args[5]
        scale = vectors.broadcast(args[3])
        count = builder.trunc(num_valid, I32)
        lanes = builder.insert_element(ir.Constant(VECTOR_I, ir.Undefined), count, I32(0))
        limit = builder.shuffle_vector(
            lanes, lanes, ir.Constant(ir.VectorType(I32, LANES), [0] * LANES)
        )
        least = _splat(VECTOR, float("-inf"))
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
            weights.append(builder.select(masks[j], weight, _splat(VECTOR, 0.0)))
            vectors.store(weights[j], vectors.at(data, at, I64(LANES * j)))
        total = vectors.across(builder.fadd(weights[0], weights[1]), builder.fadd)
        before_sum = builder.load(vectors.at(state, base, I64(1)))
        builder.store(most, vectors.at(state, base))
        builder.store(
            builder.fadd(builder.fmul(before_sum, factor), total), vectors.at(state, base, I64(1))
        )
        builder.store(factor, vectors.at(state, base, I64(2)))
        return context.get_dummy_value()

    return types.void(scores, at, num_valid, scale, running, index), build


@intrinsic(prefer_literal=True)
def _gather(typingctx, num_queries, num_vectors, weights, num_valid, values, values_at, head_size, running, out, out_at):  # fmt: skip
    """out[i] = out[i] * factor[i] + weights[i] @ values for 16 * num_vectors columns of a block."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        vectors = Vectors(context, builder)
        n, width = _queries(signature.args[0]), _queries(signature.args[1])
        weight_data = vectors.data(signature.args[2], args[2])
        value_data = vectors.data(signature.args[4], args[4])
        state = vectors.data(signature.args[7], args[7])
        out_data = vectors.data(signature.args[8], args[8])
        num_valid, values_at, head_size, out_at = args[3], args[5], args[6], args[9]

        def place(i: int, c: int) -> Any:
            row = builder.add(out_at, builder.mul(head_size, I64(i)))
            return vectors.at(out_data, row, I64(LANES * c))

        sums = []
        for i in range(n):
            factor = vectors.broadcast(builder.load(vectors.at(state, I64(3 * i + 2))))
            row = []
            for c in range(width):
                start = builder.fmul(vectors.load(place(i, c)), factor)
                slot = cgutils.alloca_once(builder, VECTOR)
                builder.store(start, slot)
                row.append(slot)
            sums.append(row)
        with cgutils.for_range(builder, num_valid) as loop:
            at = builder.add(values_at, builder.mul(loop.index, head_size))
            row = [vectors.load(vectors.at(value_data, at, I64(LANES * c))) for c in range(width)]
            for i in range(n):
                spot = vectors.at(weight_data, loop.index, I64(i * BLOCK_TOKENS))
                number = vectors.broadcast(builder.load(spot))
                for c in range(width):
                    total = vectors.fma(number, row[c], builder.load(sums[i][c]))
                    builder.store(total, sums[i][c])
        for i in range(n):
            for c in range(width):
                vectors.store(builder.load(sums[i][c]), place(i, c))
        return context.get_dummy_value()

    return (
        types.void(num_queries, num_vectors, weights, num_valid, values, values_at, head_size,
                   running, out, out_at),
        build,
    )  # fmt: skip


@intrinsic
def as_float(typingctx, bits):
    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], F32)

    return types.float32(types.uint32), build


@intrinsic
def as_bits(typingctx, number):
    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], I32)

    return types.uint32(types.float32), build


def _load(array: Any, at: int) -> float:
    """A number of an array of float32, or of bfloat16 as bits."""
    raise NotImplementedError


@overload(_load, inline="never")
def _load_compiled(array, at):
    if array.dtype == types.uint16:
        return lambda array, at: as_float(np.uint32(array[at]) << np.uint32(16))
    return lambda array, at: array[at]


def _kept(array: Any, number: float) -> Any:
    """A float32 as an array keeps it: rounded to the nearest, halves to even."""
    raise NotImplementedError


@overload(_kept, inline="never")
def _kept_compiled(array, number):
    if array.dtype == types.uint16:

        def rounded(array, number):
            bits = as_bits(number)
            if number != number:
                return np.uint16(0x7FC0)
            odd = (bits >> np.uint32(16)) & np.uint32(1)
            return np.uint16((bits + np.uint32(0x7FFF) + odd) >> np.uint32(16))

        return rounded
    return lambda array, number: number


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
    for t in range(locations.shape[0]):
        position, block = positions[t], locations[t] // BLOCK_TOKENS
        offset = locations[t] % BLOCK_TOKENS
        line = qkv[t]
        for h in range(num_heads + num_kv_heads):
            for d in range(head_size):
                row[d] = _load(line, h * head_size + d)
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
                    keys[block, h - num_heads, d, offset] = _kept(keys, row[d])
        start = (num_heads + num_kv_heads) * head_size
        for h in range(num_kv_heads):
            for d in range(head_size):
                number = _load(line, start + h * head_size + d)
                values[block, h, offset, d] = _kept(values, number)


@numba.njit(nogil=True, cache=True)
def _step(n, q, keys, keys_at, values, values_at, head_size, limits, start, scale, weights, running, sums):  # fmt: skip
    """One block for up to four queries."""
    if n == 4:
        _scores(4, q, 0, head_size, keys, keys_at, head_size, weights)
    elif n == 3:
        _scores(3, q, 0, head_size, keys, keys_at, head_size, weights)
    elif n == 2:
        _scores(2, q, 0, head_size, keys, keys_at, head_size, weights)
    else:
        _scores(1, q, 0, head_size, keys, keys_at, head_size, weights)
    most = 0
    for i in range(n):
        num_valid = min(max(limits[i] - start, 0), BLOCK_TOKENS)
        most = max(most, num_valid)
        _soften(weights, i * BLOCK_TOKENS, num_valid, scale, running, i)
    column = 0
    while column + 64 <= head_size:
        if n == 4:
            _gather(
                4, 4, weights, most, values, values_at + column, head_size, running, sums, column
            )
        elif n == 3:
            _gather(
                3, 4, weights, most, values, values_at + column, head_size, running, sums, column
            )
        elif n == 2:
            _gather(
                2, 4, weights, most, values, values_at + column, head_size, running, sums, column
            )
        else:
            _gather(
                1, 4, weights, most, values, values_at + column, head_size, running, sums, column
            )
        column += 64
    while column < head_size:
        if n == 4:
            _gather(
                4, 1, weights, most, values, values_at + column, head_size, running, sums, column
            )
        elif n == 3:
            _gather(
                3, 1, weights, most, values, values_at + column, head_size, running, sums, column
            )
        elif n == 2:
            _gather(
                2, 1, weights, most, values, values_at + column, head_size, running, sums, column
            )
        else:
            _gather(
                1, 1, weights, most, values, values_at + column, head_size, running, sums, column
            )
        column += 16


def _attend(queries, keys, values, tables, pieces, scale, out):
    """Causal attention of each piece's queries to their own sequence.

    Args:
        queries: (T, heads, D) float32.
        tables: (rows, most blocks) int32, the blocks of each sequence in order.
        pieces: (P, 4) int64: row of `tables`, first packed token, number of tokens, and the
            position of the first in its sequence.
        scale: float32, of the scores.
        out: (T, heads * D), float32 or bfloat16 bits, filled for the pieces' tokens.
    """
    num_heads, head_size = queries.shape[1], queries.shape[2]
    num_kv_heads = keys.shape[1]
    group = num_heads // num_kv_heads
    stride = head_size * BLOCK_TOKENS
    num_pieces = pieces.shape[0]
    total = 0
    for piece in range(num_pieces):
        total += (pieces[piece, 2] * group + SHARE - 1) // SHARE * num_kv_heads
    # What is computed by itself: piece, KV head, and the first of its queries.
    shares = np.empty((total, 3), np.int64)
    at_share = 0
    for piece in range(num_pieces):
        for start in range(0, pieces[piece, 2] * group, SHARE):
            for head in range(num_kv_heads):
                shares[at_share] = piece, head, start
                at_share += 1
    for share in numba.prange(total):
        piece, head, start = shares[share]
        row, first = pieces[piece, 0], pieces[piece, 1]
        num_rows, position = pieces[piece, 2] * group, pieces[piece, 3]
        q = np.empty(MAX_QUERIES * head_size, np.float32)
        weights = np.empty(MAX_QUERIES * BLOCK_TOKENS, np.float32)
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
                    q[i * head_size + d] = queries[first + t, h, d]
                    sums[i * head_size + d] = 0.0
            for b in range((limits[n - 1] + BLOCK_TOKENS - 1) // BLOCK_TOKENS):
                at = (tables[row, b] * num_kv_heads + head) * stride
                _step(
                    n,
                    q,
                    keys,
                    at,
                    values,
                    at,
                    head_size,
                    limits,
                    b * BLOCK_TOKENS,
                    scale,
                    weights,
                    running,
                    sums,
                )
            for i in range(n):
                t, h = (begin + i) // group, head * group + (begin + i) % group
                factor = np.float32(1.0) / running[3 * i + 1]
                for d in range(head_size):
                    number = sums[i * head_size + d] * factor
                    out[first + t, h * head_size + d] = _kept(out, number)


attend = numba.njit(nogil=True, cache=True)(_attend)
attend_in_parallel = numba.njit(nogil=True, cache=True, parallel=True)(_attend)
"""The same on as many threads as `numba.set_num_threads` says; equal to the last bit."""


@numba.njit(nogil=True, cache=True, fastmath={"reassoc", "contract", "nsz"})
def add_and_norm(hidden, change, weight, eps, out):
    """hidden += change, and out = the RMS norm of it (Zhang, Sennrich 2019) times weight.

    Args:
        hidden: (T, H) float32, changed. change: (T, H), or (0, H) for nothing.
        weight: (H,) float32. out: (T, H), float32 or bfloat16 bits.
    """
    size = hidden.shape[1]
    for t in range(hidden.shape[0]):
        line = hidden[t]
        if change.shape[0] > 0:
            more = change[t]
            for d in range(size):
                line[d] += _load(more, d)
        total = np.float32(0.0)
        for d in range(size):
            total += line[d] * line[d]
        factor = np.float32(1.0) / np.sqrt(total / np.float32(size) + eps)
        for d in range(size):
            out[t, d] = _kept(out, line[d] * factor * weight[d])


@intrinsic(prefer_literal=True)
def _gate(typingctx, both, at, size, out, out_at):
    """out[i] = silu(both[i]) * both[size + i], for 16 numbers."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        vectors = Vectors(context, builder)
        data = vectors.data(signature.args[0], args[0])
        gate = vectors.load(vectors.at(data, args[1]))
        up = vectors.load(vectors.at(data, args[1], args[2]))
        one = _splat(VECTOR, 1.0)
        positive = builder.fcmp_ordered(">", gate, _splat(VECTOR, 0.0))
        negative = builder.fsub(_splat(VECTOR, -0.0), gate)
        power = vectors.exp(builder.select(positive, negative, gate))
        top = builder.select(positive, one, power)
        sigmoid = builder.fdiv(top, builder.fadd(one, power))
        result = builder.fmul(builder.fmul(gate, sigmoid), up)
        vectors.store(result, vectors.at(vectors.data(signature.args[3], args[3]), args[4]))
        return context.get_dummy_value()

    return types.void(both, at, size, out, out_at), build


@numba.njit(nogil=True, cache=True)
def gate(both, out):
    """out = silu(first half) * second half of each row: (T, 2 F) to (T, F), F in whole vectors."""
    size = out.shape[1]
    for t in range(out.shape[0]):
        for d in range(0, size, LANES):
            _gate(both, t * 2 * size + d, size, out, t * size + d)


@numba.njit(nogil=True, cache=True, fastmath={"reassoc", "contract", "nsz"})
def quantise_rows(x, quantised, factors):
    """Rows in 8 bits: x = (quantised - ZERO_BYTE) * factor, the largest of a row 127 factors.

    Args:
        x: (M, K) float32. A row with a NaN gets one as its factor.
        quantised: (M, K) uint8, filled. factors: (M,) float32, filled.
    """
    for t in range(x.shape[0]):
        line, numbers = x[t], quantised[t]
        # The bits of positive floats are in the order of the floats; a NaN is above all others.
        most = np.uint32(0)
        for d in range(line.shape[0]):
            most = max(most, as_bits(line[d]) & np.uint32(0x7FFFFFFF))
        largest = as_float(most)
        factors[t] = largest / np.float32(127.0)
        factor = np.float32(127.0) / max(largest, np.float32(1e-20))
        for d in range(line.shape[0]):
            numbers[d] = np.uint8(np.int32(np.rint(line[d] * factor)) + np.int32(ZERO_BYTE))


@numba.njit(nogil=True, cache=True)
def scale_rows(x, factors):
    """x *= factors: (M, N) by (M,)."""
    for t in range(x.shape[0]):
        for d in range(x.shape[1]):
            x[t, d] *= factors[t]
