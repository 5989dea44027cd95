"""Draws of tokens on a CPU, a row at a time in the processor's cache, compiled by numba.

The same choices as `sampler.py` makes with tensors, with work only for the tokens that may be
chosen: a row's best tokens are gathered above a threshold that is lowered until they hold all
that `top_k` and `top_p` keep, and the logarithms of the noise are taken only where it could win.
"""

from __future__ import annotations

import math

import numba
import numpy as np

from deployments.engine.vectors import EXP_TERMS, LN2_HIGH, LN2_LOW, LOG2_E, as_bits, as_float

CUTS = (6.0, 12.0, 24.0, math.inf)
"""How far below the best one, in scaled logits, the tokens that are looked at may lie."""
NUM_BINS = 512
PIECE = 128
"""Tokens whose noise is bounded at once."""
SLACK = 1e-3
"""More than the bounds on scores, which are in float32, can be wrong by."""
LN2 = 0.6931471805599454
FACTORS = tuple(np.uint32(x) for x in (0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35))
LEAST_POWER = -87.0
T0, T1, T2, T3, T4, T5 = (np.float32(term) for term in EXP_TERMS)
HALF, ONE, ZERO = np.float32(0.5), np.float32(1.0), np.float32(0.0)


@numba.njit(nogil=True, cache=True, inline="always")
def _power(x):
    """e^x for x <= 0 in float32, by the polynomial of `kernels`; never 0."""
    x = max(x, np.float32(LEAST_POWER))
    whole = np.float32(np.floor(x * np.float32(LOG2_E) + HALF))
    r = x - whole * np.float32(LN2_HIGH) - whole * np.float32(LN2_LOW)
    total = ((((T0 * r + T1) * r + T2) * r + T3) * r + T4) * r + T5
    total = total * r * r + r + ONE
    return total * as_float(np.uint32(np.int32(whole) + np.int32(127)) << np.uint32(23))


@numba.njit(nogil=True, cache=True, fastmath={"reassoc", "contract", "nsz"})
def sum_of_powers(row, best, factor):
    """The sum of e^((row - best) * factor) over a row (V,), float32."""
    total = ZERO
    for i in range(row.shape[0]):
        total += _power((row[i] - best) * factor)
    return total


@numba.njit(nogil=True, cache=True, inline="always")
def _mixed(token_id, low, high):
    """24 bits for a token of a row, as `sampler._noise` has them."""
    state = np.uint32(np.uint32(token_id) * FACTORS[0])
    state = np.uint32(state ^ low)
    state = np.uint32(state ^ (state >> np.uint32(16)))
    state = np.uint32(state * FACTORS[1])
    state = np.uint32(state ^ (state >> np.uint32(13)))
    state = np.uint32(state * FACTORS[2])
    state = np.uint32(state ^ (state >> np.uint32(16)))
    state = np.uint32(state ^ high)
    state = np.uint32(state ^ (state >> np.uint32(16)))
    state = np.uint32(state * FACTORS[1])
    state = np.uint32(state ^ (state >> np.uint32(13)))
    state = np.uint32(state * FACTORS[2])
    state = np.uint32(state ^ (state >> np.uint32(16)))
    return np.uint32(state & np.uint32(0xFFFFFF))


@numba.njit(nogil=True, cache=True, inline="always")
def _most_noise(bits):
    """A bound on the noise of 24 bits that takes no logarithm: -log(-log(u)) <= -log(1 - u)."""
    left = np.float32(np.uint32(np.uint32(0xFFFFFF) - bits)) + HALF
    exponent = np.int32(as_bits(left) >> np.uint32(23)) - np.int32(127)
    # `left` may have been rounded up to the next power of two.
    return np.float32(25 - exponent) * np.float32(LN2)


@numba.njit(nogil=True, cache=True)
def _noise(bits):
    return -math.log(-math.log((bits + 0.5) * 2.0**-24))


@numba.njit(nogil=True, cache=True, fastmath={"reassoc", "contract", "nsz", "nnan"})
def _bound(row, start, best, factor, low, high, least, bits, bounds):
    """The noise and a bound on the score of PIECE tokens; returns how many reach `least`."""
    size = min(PIECE, row.shape[0] - start)
    for j in range(size):
        mixed = _mixed(start + j, low, high)
        bits[j] = mixed
        bounds[j] = (row[start + j] - best) * factor + _most_noise(mixed)
    num_able = np.int32(0)
    for j in range(size):
        num_able += np.int32(bounds[j] >= least)
    return num_able


@numba.njit(nogil=True, cache=True)
def _draw_from_all(row, best, temperature, floor, low, high):
    """Among all tokens of a row from `floor` on: the one whose logit with noise is the largest."""
    bits, bounds = np.empty(PIECE, np.uint32), np.empty(PIECE, np.float32)
    most, choice = -math.inf, 0
    single, factor = np.float32(best), np.float32(1.0 / temperature)
    for start in range(0, row.shape[0], PIECE):
        least = np.float32(most - SLACK)
        if not _bound(row, start, single, factor, low, high, least, bits, bounds):
            continue
        for j in range(min(PIECE, row.shape[0] - start)):
            if bounds[j] >= most - SLACK:
                scaled = (row[start + j] - best) / temperature
                if scaled >= floor:
                    score = scaled + _noise(bits[j])
                    if score > most:
                        most, choice = score, start + j
    return choice


@numba.njit(nogil=True, cache=True)
def _gather(row, best, temperature, cut, ids, scaled):
    """The tokens of a row no further than `cut` below the best; returns how many."""
    least = best - temperature * cut
    count = 0
    for i in range(row.shape[0]):
        if row[i] >= least:
            ids[count] = i
            scaled[count] = (row[i] - best) / temperature
            count += 1
    return count


@numba.njit(nogil=True, cache=True, fastmath={"reassoc", "contract", "nsz"})
def _weigh(scaled, weights, count):
    """Fills in e^scaled; returns the sum."""
    mass = 0.0
    for j in range(count):
        weights[j] = _power(np.float32(scaled[j]))
        mass += weights[j]
    return mass


@numba.njit(nogil=True, cache=True)
def _narrow(scaled, weights, count, num_wanted, mass_wanted):
    """How far down to go for so many tokens, or so much mass, whichever comes first.

    By bins, so that what lies further down need not be sorted.
    """
    lowest = 0.0
    for j in range(count):
        if scaled[j] > LEAST_POWER:
            lowest = min(lowest, scaled[j])
    scale = (NUM_BINS - 1) / max(-lowest, 1e-9)
    numbers, masses = np.zeros(NUM_BINS, np.int64), np.zeros(NUM_BINS, np.float64)
    for j in range(count):
        if scaled[j] >= lowest:
            b = int(-scaled[j] * scale)
            numbers[b] += 1
            masses[b] += weights[j]
    number, mass = 0, 0.0
    for b in range(NUM_BINS - 1):
        number += numbers[b]
        mass += masses[b]
        if number >= num_wanted or mass >= mass_wanted:
            # A little further, for what is rounded into its neighbour.
            return -(b + 1) / scale - 1e-9 * (1.0 - lowest)
    return -math.inf


@numba.njit(nogil=True, cache=True)
def _sort(ids, scaled, weights, count):
    """Best first, of equals the lower id: by Shell's method: numba's own is slow to compile."""
    gap = 1
    while gap < count // 9:
        gap = 3 * gap + 1
    while gap > 0:
        for start in range(gap, count):
            token_id, value, weight = ids[start], scaled[start], weights[start]
            j = start
            while j >= gap and (
                scaled[j - gap] < value or (scaled[j - gap] == value and ids[j - gap] > token_id)
            ):
                ids[j], scaled[j], weights[j] = ids[j - gap], scaled[j - gap], weights[j - gap]
                j -= gap
            ids[j], scaled[j], weights[j] = token_id, value, weight
        gap //= 3


@numba.njit(nogil=True, cache=True)
def _draw_truncated(row, best, temperature, top_k, top_p, floor, low, high, ids, scaled, weights):
    """Among those that `top_k`, then `top_p`, then `min_p` keep."""
    size = row.shape[0]
    num_wanted = min(top_k, size) if top_k > 0 else size
    # With top_k the candidates renormalise; without, the whole vocabulary is the total.
    total = 0.0
    if top_k <= 0:
        total = float(sum_of_powers(row, np.float32(best), np.float32(1.0 / temperature)))
    mass_wanted = math.inf if top_k > 0 or top_p >= 1.0 else top_p * total
    count = 0
    for cut in CUTS:
        count = _gather(row, best, temperature, cut, ids, scaled)
        mass = _weigh(scaled, weights, count)
        if count >= num_wanted or mass >= mass_wanted:
            break
    if count > NUM_BINS // 2:
        least = _narrow(scaled, weights, count, num_wanted, mass_wanted)
        num_kept = 0
        for j in range(count):
            if scaled[j] >= least:
                ids[num_kept], scaled[num_kept], weights[num_kept] = ids[j], scaled[j], weights[j]
                num_kept += 1
        count = num_kept
    _sort(ids, scaled, weights, count)
    count = min(count, num_wanted)
    if top_k > 0:
        for j in range(count):
            total += weights[j]
    most, choice, before = -math.inf, ids[0], 0.0
    for j in range(count):
        # The best token is always kept: nothing comes before it.
        if j > 0 and (scaled[j] < floor or (top_p < 1.0 and before >= top_p * total)):
            break
        before += weights[j]
        bits = _mixed(ids[j], low, high)
        if scaled[j] + _most_noise(bits) >= most:
            score = scaled[j] + _noise(bits)
            if score > most:
                most, choice = score, ids[j]
    return choice


@numba.njit(nogil=True, cache=True)
def draw(logits, best, rows, parameters, keys, token_ids):
    """Draws one token for some rows, in place of the best one.

    A row in which a NaN or an infinity is the best gives any id.

    Args:
        logits: (R, V) float32.
        best: (R,) float32, the largest of each row.
        rows: (D,) int64, which rows.
        parameters: (D, 4) float64: temperature, top_k (0 for all), top_p, min_p.
        keys: (D, 2) uint32, the low and the high word of each row's noise.
        token_ids: (R,) int64, filled for those rows.
    """
    ids = np.empty(logits.shape[1], np.int64)
    scaled = np.empty(logits.shape[1], np.float64)
    weights = np.empty(logits.shape[1], np.float64)
    for d in range(rows.shape[0]):
        r = rows[d]
        if not math.isfinite(best[r]):
            continue
        temperature, top_p, min_p = parameters[d, 0], parameters[d, 2], parameters[d, 3]
        top_k = np.int64(parameters[d, 1])
        floor = math.log(min_p) if min_p > 0 else -math.inf
        most, low, high = np.float64(best[r]), keys[d, 0], keys[d, 1]
        if top_k > 0 or top_p < 1.0:
            token_ids[r] = _draw_truncated(
                logits[r], most, temperature, top_k, top_p, floor, low, high, ids, scaled, weights
            )
        else:
            token_ids[r] = _draw_from_all(logits[r], most, temperature, floor, low, high)
