"""What compiled loops are made of: LLVM vectors of 16 numbers, and the bits of bfloat16.

Every target lowers the vectors to what it has, so that no compiler is needed at run time but
numba's, and what was compiled is kept beside its file, or where NUMBA_CACHE_DIR says. A few
instructions that multiply several numbers at once are given by name.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba import types
from numba.core import cgutils, codegen, config
from numba.extending import intrinsic, overload

LANES = 16
F32, I32, I16, I64 = ir.FloatType(), ir.IntType(32), ir.IntType(16), ir.IntType(64)
VECTOR, VECTOR_I = ir.VectorType(F32, LANES), ir.VectorType(I32, LANES)
LOG2_E = 1.4426950408889634
LN2_HIGH, LN2_LOW = 0.693359375, -2.12194440e-4
EXP_TERMS = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2,
             1.6666665459e-1, 5.0000001201e-1)  # fmt: skip
"""Of the polynomial for exp on [-ln 2 / 2, ln 2 / 2], from Moshier's Cephes library."""
# For the instructions that are given by name, since LLVM's own names of them change.
binding.initialize_native_asmparser()
_FEATURES = (config.CPU_FEATURES or codegen.get_host_cpu_features()).split(",")
HAS_BFLOAT16_DOTS = {"+avx512f", "+avx512bf16"} <= {*_FEATURES}


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
        wide = builder.shl(builder.zext(bits, VECTOR_I), splat(VECTOR_I, 16))
        return builder.bitcast(wide, VECTOR)

    def store(self, vector: Any, pointer: Any) -> None:
        """16 numbers to float32, or rounded to bfloat16, halves to even; a NaN stays one."""
        builder = self.builder
        if pointer.type.pointee == F32:
            builder.store(vector, builder.bitcast(pointer, VECTOR.as_pointer()), align=4)
            return
        bits, sixteen = builder.bitcast(vector, VECTOR_I), splat(VECTOR_I, 16)
        odd = builder.and_(builder.lshr(bits, sixteen), splat(VECTOR_I, 1))
        rounded = builder.add(builder.add(bits, splat(VECTOR_I, 0x7FFF)), odd)
        is_nan = builder.fcmp_unordered("!=", vector, vector)
        rounded = builder.select(is_nan, splat(VECTOR_I, 0x7FC00000), rounded)
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

    def add_products(self, total: Any, a: Any, b: Any) -> Any:
        """`total` plus the products of 16 pairs of bfloat16, which are words of 32 bits."""
        builder = self.builder
        if HAS_BFLOAT16_DOTS:
            kind = ir.FunctionType(VECTOR, [VECTOR_I, VECTOR_I, VECTOR])
            return builder.asm(kind, "vdpbf16ps $2, $1, $0", "=v,v,v,0", [a, b, total], False)
        for half in (self._low, self._high):
            total = self.fma(half(a), half(b), total)
        return total

    def add_byte_products(self, total: Any, a: Any, b: Any) -> Any:
        """`total` plus the products of 16 times four bytes: those of `a` without a sign."""
        kind = ir.FunctionType(VECTOR_I, [VECTOR_I, VECTOR_I, VECTOR_I])
        return self.builder.asm(kind, "vpdpbusd $2, $1, $0", "=v,v,v,0", [a, b, total], False)

    def load_words(self, pointer: Any) -> Any:
        """16 words of 32 bits, whatever they hold."""
        builder = self.builder
        return builder.load(builder.bitcast(pointer, VECTOR_I.as_pointer()), align=4)

    def _low(self, words: Any) -> Any:
        return self.builder.bitcast(self.builder.shl(words, splat(VECTOR_I, 16)), VECTOR)

    def _high(self, words: Any) -> Any:
        mask = splat(VECTOR_I, 0xFFFF0000)
        return self.builder.bitcast(self.builder.and_(words, mask), VECTOR)

    def fma(self, a: Any, b: Any, c: Any) -> Any:
        return self.call("llvm.fma.v16f32", VECTOR, a, b, c)

    def larger(self, a: Any, b: Any) -> Any:
        return self.builder.select(self.builder.fcmp_ordered(">", a, b), a, b)

    def exp(self, x: Any) -> Any:
        """e^x for x <= 0; below -87 it is that of -87, the least normal number or so."""
        builder = self.builder
        x = self.larger(x, splat(VECTOR, -87.0))
        whole = self.call("llvm.rint.v16f32", VECTOR, builder.fmul(x, splat(VECTOR, LOG2_E)))
        r = self.fma(whole, splat(VECTOR, -LN2_HIGH), x)
        r = self.fma(whole, splat(VECTOR, -LN2_LOW), r)
        total = splat(VECTOR, EXP_TERMS[0])
        for term in EXP_TERMS[1:]:
            total = self.fma(total, r, splat(VECTOR, term))
        total = self.fma(builder.fmul(total, r), r, builder.fadd(r, splat(VECTOR, 1.0)))
        power = builder.add(builder.fptosi(whole, VECTOR_I), splat(VECTOR_I, 127))
        return builder.fmul(total, builder.bitcast(builder.shl(power, splat(VECTOR_I, 23)), VECTOR))

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


def splat(kind: Any, number: float) -> Any:
    return ir.Constant(kind, [number] * LANES)


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


def load_number(array: Any, at: int) -> float:
    """A number of an array of float32, or of bfloat16 as bits."""
    raise NotImplementedError


@overload(load_number, inline="never")
def _load_compiled(array, at):
    if array.dtype == types.uint16:
        return lambda array, at: as_float(np.uint32(array[at]) << np.uint32(16))
    return lambda array, at: array[at]


def as_kept(array: Any, number: Any) -> Any:
    """A float32 as an array keeps it: rounded to the nearest, halves to even."""
    raise NotImplementedError


@overload(as_kept, inline="never")
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
