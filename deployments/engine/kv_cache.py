"""Keys and values of the sequences: one contiguous slot for each.

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
from deployments.engine.slots import Slots

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
    """Slots, and the tensors behind them. A slot belongs to a sequence until it is freed.

    A prompt that was computed soundly stays in its slot after that, for the next prompt that
    begins alike, until the slot is needed.
    """

    def __init__(
        self,
        layers: list[LayerShape],
        limits: KVLimits,
        *,
        dtype: torch.dtype,
        device: torch.device,
        block_tokens: int,
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
        self._slots = Slots(limits.max_num_seqs, block_tokens)

    def place(self, seq: Sequence) -> int:
        """Gives a sequence its slot; returns how many of its first tokens are computed there."""
        placement = self._slots.place(seq)
        if placement.source != placement.slot and placement.num_tokens:
            held = self._rows(placement.source, placement.num_tokens)
            into = self._rows(placement.slot, placement.num_tokens)
            for tensor in (*self.keys, *self.values):
                tensor[into] = tensor[held]
        return placement.num_tokens

    def holds(self, seq: Sequence) -> bool:
        """Whether all whole blocks of a prompt are computed in some slot."""
        return self._slots.holds(seq)

    def slot(self, seq: Sequence) -> int:
        """The slot of a sequence that was placed."""
        slot = self._slots.find(seq)
        assert slot is not None, "place() comes first"
        return slot

    def free(self, seq: Sequence, *, keep: bool) -> None:
        """Gives the slot back; harmless when the sequence has none.

        Args:
            keep: its prompt's keys and values may be used again.
        """
        self._slots.free(seq, keep=keep)

    def scrub(self, seq: Sequence) -> None:
        """Zeroes what the sequence wrote.

        Needed where attention reads a row's slot beyond its length under a mask: a NaN there
        would pass through the mask into the next owner's answer.
        """
        slot = self._slots.find(seq)
        if slot is None:
            return
        written = self._rows(slot, seq.num_tokens)
        for tensor in (*self.keys, *self.values):
            tensor[written] = 0

    def _rows(self, slot: int, num_tokens: int) -> slice:
        return slice(slot * self.max_model_len, slot * self.max_model_len + num_tokens)


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
