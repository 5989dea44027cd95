"""Keys and values of the running sequences: one contiguous slot for each.

Every layer has a K and a V of shape (max_num_seqs * max_model_len, kv heads, head size);
token `p` of the sequence in slot `s` lives in row `s * max_model_len + p`, its location.
"""

from __future__ import annotations

import logging
import math
import mmap
from dataclasses import dataclass

import torch
from torch import Tensor

from deployments.engine.sequence import Sequence

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LayerShape:
    """Sizes of one layer's keys and values; layers of one model may differ."""

    num_kv_heads: int
    key_size: int
    value_size: int

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        return self.num_kv_heads * (self.key_size + self.value_size) * dtype.itemsize


@dataclass(frozen=True)
class KVLimits:
    max_num_seqs: int
    max_model_len: int


def fit_limits(wanted: KVLimits, bytes_per_token: int, budget_bytes: int) -> KVLimits:
    """The most slots of the wanted length that the budget holds when all are full.

    Where not even one fits, the length is lowered instead.

    Raises:
        ValueError: the budget does not hold two tokens.
    """
    max_model_len = min(wanted.max_model_len, budget_bytes // bytes_per_token)
    if max_model_len < 2:
        raise ValueError(
            f"KV memory of {budget_bytes} bytes holds {max_model_len} tokens "
            f"of {bytes_per_token} bytes, the least is 2"
        )
    slots = budget_bytes // (bytes_per_token * max_model_len)
    fitted = KVLimits(min(wanted.max_num_seqs, slots), max_model_len)
    if fitted != wanted:
        logger.warning(
            "KV memory of %.2f GiB: max_num_seqs %d instead of %d, max_model_len %d instead of %d",
            budget_bytes / 2**30,
            fitted.max_num_seqs,
            wanted.max_num_seqs,
            fitted.max_model_len,
            wanted.max_model_len,
        )
    return fitted


class KVCache:
    """Slots, and the tensors behind them. A slot belongs to a sequence until it is freed."""

    def __init__(
        self,
        layers: list[LayerShape],
        limits: KVLimits,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.max_num_seqs = limits.max_num_seqs
        self.max_model_len = limits.max_model_len
        rows = limits.max_num_seqs * limits.max_model_len
        self.keys = [
            _zeros((rows, layer.num_kv_heads, layer.key_size), dtype, device) for layer in layers
        ]
        self.values = [
            _zeros((rows, layer.num_kv_heads, layer.value_size), dtype, device) for layer in layers
        ]
        # A heap would do too; with a list sorted downwards the lowest free slot is at the end,
        # so that used slots stay together at the front.
        self._free = list(range(limits.max_num_seqs - 1, -1, -1))
        self._slot_of: dict[Sequence, int] = {}

    @property
    def num_used_slots(self) -> int:
        return len(self._slot_of)

    def slot(self, seq: Sequence) -> int:
        """The sequence's slot; takes the lowest free one at its first call."""
        slot = self._slot_of.get(seq)
        if slot is None:
            assert self._free, "the scheduler runs at most max_num_seqs sequences"
            slot = self._slot_of[seq] = self._free.pop()
        return slot

    def free(self, seq: Sequence) -> None:
        """Gives the slot back; harmless when the sequence has none."""
        slot = self._slot_of.pop(seq, None)
        if slot is None:
            return
        self._free.append(slot)
        self._free.sort(reverse=True)

    def scrub(self, seq: Sequence) -> None:
        """Zeroes what the sequence wrote.

        Needed where attention reads a row's slot beyond its length under a mask: a NaN there
        would pass through the mask into the next owner's answer.
        """
        slot = self._slot_of.get(seq)
        if slot is None:
            return
        written = slice(slot * self.max_model_len, slot * self.max_model_len + seq.num_tokens)
        for tensor in (*self.keys, *self.values):
            tensor[written] = 0


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # Pages that the kernel zeroes cost nothing until they are written; torch would write all of
    # them now. Huge pages, which numpy asks for, would make one token of a slot cost 2 MiB in
    # every layer.
    pages = mmap.mmap(-1, math.prod(shape) * dtype.itemsize)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        pages.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype).view(shape)
