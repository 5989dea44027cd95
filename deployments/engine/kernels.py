"""What lies between two products, compiled by numba: norms, gates, rows in 8 bits.

Arrays are float32, or bfloat16 as the bits of uint16.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numba import types
from numba.extending import intrinsic

from deployments.engine.vectors import (
    LANES,
    VECTOR,
    Vectors,
    as_bits,
    as_float,
    as_kept,
    load_number,
    splat,
)

ZERO_BYTE = 128
"""Stands for 0 in activations of 8 bits, which have no sign."""


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
                line[d] += load_number(more, d)
        total = np.float32(0.0)
        for d in range(size):
            total += line[d] * line[d]
        factor = np.float32(1.0) / np.sqrt(total / np.float32(size) + eps)
        for d in range(size):
            out[t, d] = as_kept(out, line[d] * factor * weight[d])


@intrinsic(prefer_literal=True)
def _gate(typingctx, both, at, size, out, out_at):
    """out[i] = silu(both[i]) * both[size + i], for 16 numbers."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        vectors = Vectors(context, builder)
        data = vectors.data(signature.args[0], args[0])
        gate = vectors.load(vectors.at(data, args[1]))
        up = vectors.load(vectors.at(data, args[1], args[2]))
        one = splat(VECTOR, 1.0)
        positive = builder.fcmp_ordered(">", gate, splat(VECTOR, 0.0))
        negative = builder.fsub(splat(VECTOR, -0.0), gate)
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
