"""Attention of one packed step over the KV cache, plugged into transformers' models.

A step is packed: one row of T tokens, which belong to many sequences at many positions.
`StepAttention` is told the step (`begin`), and is then called by every attention layer of
the model with that layer's queries, keys and values.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from deployments.engine.kv_cache import KVCache, LayerShape


@dataclass(frozen=True)
class Piece:
    """Tokens of one sequence that attend together: packed rows `first` to `last`.

    The last of them is the sequence's token number `kv_len - 1`.
    """

    first: int
    last: int
    kv_len: int

    @property
    def num_queries(self) -> int:
        return self.last - self.first


@dataclass(frozen=True)
class Row:
    """One sequence's pieces in a step, in order.

    `blocks`: its blocks up to the last piece's end; the number of the first where they are
    adjacent, so that they need no gathering.
    """

    blocks: int | Tensor
    pieces: list[Piece]

    @property
    def num_keys(self) -> int:
        return self.pieces[-1].kv_len

    def first_key(self, window: int | None) -> int:
        """The first token that any of the pieces attends to."""
        if window is None:
            return 0
        return max(0, self.pieces[0].kv_len - self.pieces[0].num_queries - window + 1)

    def read(self, tensor: Tensor, start: int, block_tokens: int) -> Tensor:
        """(1, kv heads, n, D) keys or values of the tokens from `start` on.

        Measured for 500 tokens of SmolLM2's shape on an EPYC core, attention included: 83 us with
        adjacent blocks, 119 with whole ones gathered, 215 with tokens gathered.
        """
        if isinstance(self.blocks, int):
            first = self.blocks * block_tokens
            held = tensor[first + start : first + self.num_keys]
        else:
            skipped = start // block_tokens
            held = tensor.view(-1, block_tokens, *tensor.shape[1:]).index_select(
                0, self.blocks[skipped:]
            )
            first = skipped * block_tokens
            held = held.flatten(0, 1)[start - first : self.num_keys - first]
        return held.transpose(0, 1).unsqueeze(0)


@dataclass
class StepLayout:
    """Where the tokens of one step come from and go to, the same for every layer.

    `locations`: (T,) rows of the KV cache; packed tokens beyond T are padding, which is
    computed and thrown away. The first packed tokens may be decodes that attend in one batch:
    `decode_lens`, (n,), is the length of each one's sequence so far, `decode_tables`, (n, most
    blocks), its blocks, and any of them behind the last. `rows` are the others.
    """

    rows: list[Row]
    locations: Tensor
    decode_tables: Tensor
    decode_lens: Tensor
    longest_decode: int = 0
    masks: dict[tuple[int, int, int | None], Tensor | None] = field(default_factory=dict)


class UnsupportedAttention(ValueError):
    """The model asks for a form of attention that the engine does not compute."""


class StepAttention:
    """The attention function that every layer of the model calls.

    On a CPU each row attends to its own blocks and reads nothing else: no padding, and a result
    that cannot depend on the neighbours; where the blocks are adjacent it reads a view. On CUDA
    the decode rows go in one masked call, because 16 small kernels a layer would cost more than
    the padding.
    """

    def __init__(self, *, is_decode_batched: bool) -> None:
        self.is_decode_batched = is_decode_batched
        self.cache: KVCache | None = None
        self.layer_shapes: dict[int, LayerShape] = {}
        self._layout: StepLayout | None = None

    def begin(self, layout: StepLayout) -> None:
        self._layout = layout

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        position_bias: Tensor | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """Computes one layer's attention.

        Args:
            query: (1, heads, T, D). key, value: (1, kv heads, T, D), of this step's tokens.

        Returns:
            (1, T, heads, D) in the queries' dtype, and no weights.
        """
        if position_bias is not None:
            raise UnsupportedAttention("attention with a position bias is not supported")
        layer = _layer_index(module)
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        if self.cache is None:
            # The probe, before there is a cache: learn the shapes, compute nothing.
            self.layer_shapes[layer] = LayerShape(key.shape[1], key.shape[3], value.shape[3])
            empty = query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])
            return empty, None
        assert self._layout is not None, "begin() comes before the forward"
        form = _Form(scale, sliding_window or _window_by_layer_type(module, layer), softcap, s_aux)
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        locations = self._layout.locations
        num_tokens = locations.shape[0]
        keys[locations] = key[0, :, :num_tokens].transpose(0, 1).to(keys.dtype)
        values[locations] = value[0, :, :num_tokens].transpose(0, 1).to(values.dtype)
        attended = self._attend_all(self._layout, query.to(keys.dtype), keys, values, form)
        return attended.to(query.dtype).unsqueeze(0), None

    def _attend_all(
        self, layout: StepLayout, query: Tensor, keys: Tensor, values: Tensor, form: _Form
    ) -> Tensor:
        # Zeros, because the rows of padding tokens stay as they are.
        out = query.new_zeros(query.shape[2], query.shape[1], values.shape[2])
        if layout.longest_decode:
            self._attend_decodes(layout, query, keys, values, form, out)
        for row in layout.rows:
            self._attend_row(layout, row, query, keys, values, form, out)
        return out

    def _attend_row(
        self,
        layout: StepLayout,
        row: Row,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        form: _Form,
        out: Tensor,
    ) -> None:
        assert self.cache is not None
        offset = row.first_key(form.window)
        row_keys = row.read(keys, offset, self.cache.block_tokens)
        row_values = row.read(values, offset, self.cache.block_tokens)
        for piece in row.pieces:
            end = piece.kv_len - offset
            # Keys before the window of the piece's first query are read by none of its queries.
            start = 0
            if form.window is not None:
                start = max(0, end - piece.num_queries - form.window + 1)
            mask = _causal_mask(layout, piece.num_queries, end - start, form.window, query.device)
            attended = form.attend(
                query[:, :, piece.first : piece.last],
                row_keys[:, :, start:end],
                row_values[:, :, start:end],
                mask,
            )
            out[piece.first : piece.last] = attended[0].transpose(0, 1)

    def _attend_decodes(
        self,
        layout: StepLayout,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        form: _Form,
        out: Tensor,
    ) -> None:
        assert self.cache is not None
        n, num_blocks = layout.decode_tables.shape
        longest = layout.longest_decode
        # (n, longest, kv heads, D)
        size = self.cache.block_tokens
        row_keys, row_values = (
            tensor.view(-1, size, *tensor.shape[1:])
            .index_select(0, layout.decode_tables.flatten())
            .view(n, num_blocks * size, *tensor.shape[1:])[:, :longest]
            for tensor in (keys, values)
        )
        position = torch.arange(longest, device=query.device)
        lens = layout.decode_lens.unsqueeze(1)
        mask = position < lens
        if form.window is not None:
            mask &= position >= lens - form.window
        num_heads, num_kv_heads = query.shape[1], keys.shape[1]
        # Heads that share their keys attend as queries of one head: grouped heads under a mask
        # have no fast kernel on CUDA.
        shared = num_heads // num_kv_heads if form.is_plain else 1
        attended = form.attend(
            query[0, :, :n].transpose(0, 1).reshape(n, num_heads // shared, shared, -1),
            row_keys.transpose(1, 2),
            row_values.transpose(1, 2),
            mask[:, None, None, :],
        )
        out[:n] = attended.flatten(1, 2)


@dataclass(frozen=True)
class _Form:
    """What a layer's attention adds to the plain kind."""

    scale: float
    window: int | None
    softcap: float | None
    sinks: Tensor | None

    @property
    def is_plain(self) -> bool:
        return self.softcap is None and self.sinks is None

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        """(B, heads, Q, D) queries over (B, kv heads, L, D); `mask` is True where attended."""
        if self.is_plain:
            shared = query.shape[1] // keys.shape[1]
            if query.is_cuda and mask is not None and shared > 1:
                keys = keys.repeat_interleave(shared, dim=1)
                values = values.repeat_interleave(shared, dim=1)
            return scaled_dot_product_attention(
                query,
                keys,
                values,
                attn_mask=mask,
                # Without a mask a piece of several queries starts at its sequence's first token.
                is_causal=mask is None and query.shape[2] > 1,
                scale=self.scale,
                enable_gqa=query.shape[1] != keys.shape[1],
            )
        return self._attend_by_hand(query, keys, values, mask)

    def _attend_by_hand(
        self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None
    ) -> Tensor:
        groups = query.shape[1] // keys.shape[1]
        keys = keys.repeat_interleave(groups, dim=1)
        values = values.repeat_interleave(groups, dim=1)
        scores = torch.matmul(query, keys.transpose(2, 3)).float() * self.scale
        if self.softcap is not None:
            scores = torch.tanh(scores / self.softcap) * self.softcap
        if mask is None and query.shape[2] > 1:
            mask = torch.ones(scores.shape[2:], dtype=torch.bool, device=query.device).tril()
        if mask is not None:
            scores = scores.masked_fill(~mask, float("-inf"))
        if self.sinks is None:
            return torch.matmul(scores.softmax(-1).to(values.dtype), values)
        sinks = self.sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        weights = torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :-1]
        return torch.matmul(weights.to(values.dtype), values)


def _causal_mask(
    layout: StepLayout, num_queries: int, num_keys: int, window: int | None, device: torch.device
) -> Tensor | None:
    """(num_queries, num_keys) mask of a piece whose last query is at the last key.

    None where plain attention is right: one query, or a whole prompt from its start.
    """
    if num_queries == 1:
        return None
    is_windowed = window is not None and num_keys > window
    if num_queries == num_keys and not is_windowed:
        return None
    cache_key = (num_queries, num_keys, window if is_windowed else None)
    if cache_key not in layout.masks:
        key_at = torch.arange(num_keys, device=device)
        query_at = torch.arange(num_keys - num_queries, num_keys, device=device).unsqueeze(1)
        mask = key_at <= query_at
        if window is not None:
            mask &= key_at > query_at - window
        layout.masks[cache_key] = mask
    return layout.masks[cache_key]


def _layer_index(module: nn.Module) -> int:
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int):
        raise UnsupportedAttention(f"{type(module).__name__} does not know its layer's number")
    return layer


def _window_by_layer_type(module: nn.Module, layer: int) -> int | None:
    """The layer's window where the model puts it into the mask only, which we do not build."""
    config = getattr(module, "config", None)
    layer_types = getattr(config, "layer_types", None)
    if layer_types and layer_types[layer] == "sliding_attention":
        window = getattr(config, "sliding_window", None)
        return window if isinstance(window, int) else None
    return None
