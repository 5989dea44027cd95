"""Keys and values of all layers, in blocks of tokens (blocks.py), and how many blocks there are.

Every layer has a K and a V of shape (num_blocks * block_tokens, kv heads, head size); token `p`
of a sequence lives in row `blocks[p // block_tokens] * block_tokens + p % block_tokens`, its
location.
"""

from __future__ import annotations

import logging
import math
import mmap
from dataclasses import dataclass

import torch
from torch import Tensor

from deployments.engine.config import EngineConfig

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
class PoolSize:
    num_blocks: int
    max_model_len: int


def fit_pool(
    config: EngineConfig,
    max_model_len: int,
    *,
    block_tokens: int,
    bytes_per_token: int,
    budget_bytes: int,
) -> PoolSize:
    """As many blocks as the longest sequences in all places need, or the budget holds.

    Where not even one sequence fits, its length is lowered.

    Raises:
        ValueError: the budget does not hold a block, or the blocks hold no two tokens.
    """
    wanted = config.max_num_seqs * -(-max_model_len // block_tokens)
    held = budget_bytes // (bytes_per_token * block_tokens)
    if held < 1:
        raise ValueError(
            f"KV memory of {budget_bytes} bytes holds no block of {block_tokens} tokens "
            f"of {bytes_per_token} bytes"
        )
    num_blocks = config.num_kv_blocks or min(held, wanted)
    size = PoolSize(num_blocks, min(max_model_len, num_blocks * block_tokens))
    if size.max_model_len < 2:
        raise ValueError(f"KV memory holds {size.max_model_len} tokens, the least is 2")
    if num_blocks < wanted:
        logger.warning(
            "KV memory for %d tokens, %d sequences of %d tokens would need %d; max_model_len is %d",
            num_blocks * block_tokens,
            config.max_num_seqs,
            max_model_len,
            wanted * block_tokens,
            size.max_model_len,
        )
    return size


class KVCache:
    """The tensors behind the blocks."""

    def __init__(
        self,
        layers: list[LayerShape],
        num_blocks: int,
        block_tokens: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        rows = num_blocks * block_tokens
        self.keys = [
            zeros((rows, layer.num_kv_heads, layer.key_size), dtype, device) for layer in layers
        ]
        self.values = [
            zeros((rows, layer.num_kv_heads, layer.value_size), dtype, device) for layer in layers
        ]

    def scrub(self, blocks: list[int]) -> None:
        """Zeroes blocks.

        Needed where attention reads a row's last block beyond its length under a mask: a NaN
        there would pass through the mask into the next owner's answer.
        """
        if not blocks:
            return
        for tensor in (*self.keys, *self.values):
            tensor.view(self.num_blocks, self.block_tokens, *tensor.shape[1:])[blocks] = 0


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # Pages that the kernel zeroes cost nothing until they are written; torch would write all of
    # them now. Huge pages, which numpy asks for, would make one token of a block cost 2 MiB
    # in every layer.
    pages = mmap.mmap(-1, math.prod(shape) * dtype.itemsize)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        pages.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype).view(shape)
