"""Runners: what turns a step's plan into logits.

`Runner` is the contract; `ModelRunner` runs any Hugging Face decoder through transformers'
attention interface, `ScriptedRunner` (scripted.py) a script. A runner knows nothing of
text, sampling or queues.
"""

from __future__ import annotations

import inspect
import logging
import os
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from deployments.engine.attention import Piece, Row, StepAttention, StepLayout
from deployments.engine.blocks import BlockPool
from deployments.engine.config import EngineConfig
from deployments.engine.cuda import (
    DecodeBatch,
    DecodeGraphs,
    DecodeInputs,
    PinnedStaging,
    Record,
    compile_model,
    uncompiled,
)
from deployments.engine.kv_cache import KVCache, fit_pool
from deployments.engine.scheduler import ScheduledRow, StepPlan
from deployments.engine.sequence import Sequence
from protocol.request import SamplingParams

logger = logging.getLogger(__name__)

SUPPORTED_LAYER_TYPES = {"full_attention", "sliding_attention"}
LENGTH_DEPENDENT_ROPE = {"dynamic", "longrope"}

LEAST_ROWS = {torch.bfloat16: 2, torch.float32: 4}
"""Rows from which on the CPU's matrix products round each row alike, whatever is packed with it.
Measured with SmolLM2's shapes on an EPYC with AVX512-BF16: from 2 on in bfloat16, from 4 on in
float32, where 4 rows also take less time than 2 or 3 (60 ms against 72 and 92)."""

EXTENT = 16
"""Blocks that a sequence finds to grow into: attention reads adjacent ones without gathering them."""

CPU_BLOCK_TOKENS = 32
"""Queries that attend together on a CPU. Always the same ones, so that a block's result depends
on what comes before it alone; 32 were the fastest of 1 to 256 (19 ms a layer for 1,024 tokens,
24 with 16)."""


class Runner(Protocol):
    """Computes steps. Used by one thread only, the one that called `warm_up`."""

    @property
    def max_num_seqs(self) -> int:
        """Most sequences it can hold at a time."""
        ...

    @property
    def max_model_len(self) -> int:
        """Most tokens of one sequence."""
        ...

    @property
    def prefix_block_tokens(self) -> int:
        """Prompts share what was computed in multiples of this."""
        ...

    @property
    def pool(self) -> BlockPool:
        """The blocks of its KV memory; only to be looked at."""
        ...

    @property
    def piece_tokens(self) -> int:
        """Beside streams a prompt may be cut at multiples of this; the least piece of one."""
        ...

    def warm_up(self) -> None:
        """Makes the first real step as fast as any other. Called once, before `run`.

        Raises:
            ValueError: the model cannot be run right.
        """
        ...

    def run(self, plan: StepPlan) -> Tensor:
        """Computes the plan's tokens.

        Returns:
            (R, V) float32 logits, one row behind each of the tokens at `plan.sampled_at`, in
            that order. A draft is computed as if it were its sequence's next token, and computed
            over when it was not.
        """
        ...

    def place(self, seq: Sequence) -> int:
        """Takes a sequence in, before it first runs.

        Returns:
            How many of its first tokens need not be computed, because an earlier sequence of
            the same tenant began with them; always fewer than it has.
        """
        ...

    def reserve(self, seq: Sequence, num_tokens: int) -> bool:
        """Finds memory for the first `num_tokens` tokens of a sequence that was placed, which
        comes before they are in a plan; false, and nothing changed, where there is none.

        There is for any one sequence of `max_model_len` tokens where no other is placed.
        """
        ...

    def holds(self, seq: Sequence) -> bool:
        """Whether all whole blocks of a prompt are computed already."""
        ...

    def release(self, seq: Sequence, *, is_sound: bool = False) -> None:
        """Forgets a sequence, whether it ran or not; its memory is free at once, and it may be
        placed anew.

        Args:
            is_sound: what was computed of it may serve others.
        """
        ...

    def close(self) -> None:
        """Frees the weights and the KV memory."""
        ...


class UnsupportedModel(ValueError):
    """The model folder cannot be served by `ModelRunner`; the message says why."""


class ModelRunner:
    """Runs any decoder-only transformers model, one packed forward a step.

    Build it with `load`. Rows of different lengths are packed into one (1, T) input with
    their own positions, so there is no padding anywhere; attention is ours (attention.py),
    the rest of the forward is the model's own code.
    """

    def __init__(self, model: Any, config: EngineConfig) -> None:
        self._model = model.eval()
        self._device: torch.device = next(model.parameters()).device
        self._num_threads = cpu_threads(config)
        self._chunk = config.prefill_chunk_tokens
        self._takes_logits_to_keep = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._is_cuda = self._device.type == "cuda"
        self._block = prefix_block(config, self._device)
        self._least_rows = 1 if self._is_cuda else LEAST_ROWS.get(model.dtype, 1)
        self.attention = StepAttention(is_decode_batched=self._is_cuda)
        self._attention_name = f"seedance_{id(self.attention):x}"
        # A name without a registered mask function makes transformers build no mask at all.
        # Item assignment, not `register`, because only an item can be taken out again.
        ALL_ATTENTION_FUNCTIONS[self._attention_name] = (
            uncompiled(self.attention) if config.compile else self.attention
        )
        self._model.set_attn_implementation(self._attention_name)
        self._max_num_seqs = config.max_num_seqs
        self._max_decodes = max(config.max_num_seqs, config.max_speculative_rows)
        self._staging = PinnedStaging(self._device)
        self._records_decodes = self._is_cuda and config.cuda_graphs
        self._graphs: DecodeGraphs | None = None
        self._build_cache(config)
        self.attention.cache = self.cache
        self._forward = compile_model(model) if self._is_cuda and config.compile else model

    @classmethod
    def load(cls, folder: Path, config: EngineConfig) -> ModelRunner:
        """Loads a local model folder (safetensors only, no code from the folder).

        Raises:
            UnsupportedModel: the folder holds no decoder that can be run right.
        """
        device = choose_device(config)
        dtype = choose_dtype(config, device)
        model_config = AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
        check_supported(model_config)
        model = AutoModelForCausalLM.from_pretrained(
            folder,
            config=model_config,
            dtype=dtype,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
        ).to(device)
        logger.info("loaded %s on %s in %s", folder, device, dtype)
        return cls(model, config)

    @property
    def max_num_seqs(self) -> int:
        return self._max_num_seqs

    @property
    def max_model_len(self) -> int:
        return self._max_model_len

    @property
    def prefix_block_tokens(self) -> int:
        return self._block

    @property
    def piece_tokens(self) -> int:
        return self._block

    @property
    def num_threads(self) -> int:
        return self._num_threads

    def warm_up(self) -> None:
        # The number of OpenMP threads belongs to the calling thread.
        torch.set_num_threads(self._num_threads)
        self._check_packing()
        if self._records_decodes:
            self.record_decodes()

    @torch.inference_mode()
    def record_decodes(self, record: Record | None = None) -> None:
        """Records the steps that only decode; before any sequence is placed.

        Args:
            record: None makes CUDA graphs.
        """
        graphs = DecodeGraphs(
            self._decode,
            self._staging,
            self._device,
            max_rows=self._max_decodes,
            max_columns=-(-self.max_model_len // self._block),
            record=record,
        )
        graphs.record_all()
        self.cache.scrub([0])
        self._graphs = graphs

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> Tensor:
        if self._graphs is not None and (batch := self._decode_batch(plan)) is not None:
            played = self._graphs.run(batch)
            if played is not None:
                return played.float()
        layout, token_ids, positions, sampled_at = self._stage(plan)
        self.attention.begin(layout)
        kwargs: dict[str, Any] = {"input_ids": token_ids, "position_ids": positions}
        if self._takes_logits_to_keep:
            kwargs["logits_to_keep"] = sampled_at
        logits: Tensor = self._forward(**kwargs, use_cache=False).logits[0]
        if not self._takes_logits_to_keep:
            logits = logits[sampled_at]
        return logits[: len(plan.sampled_at)].float()

    def place(self, seq: Sequence) -> int:
        return self.pool.place(seq)

    def reserve(self, seq: Sequence, num_tokens: int) -> bool:
        return self.pool.reserve(seq, num_tokens)

    def holds(self, seq: Sequence) -> bool:
        return self.pool.holds(seq)

    def release(self, seq: Sequence, *, is_sound: bool = False) -> None:
        emptied = self.pool.free(seq, keep=is_sound)
        if self.attention.is_decode_batched and not is_sound:
            self.cache.scrub(emptied)

    def close(self) -> None:
        ALL_ATTENTION_FUNCTIONS.pop(self._attention_name, None)
        self.attention.cache = None
        self._graphs = None
        del self._model, self._forward, self.cache

    def _decode_batch(self, plan: StepPlan) -> DecodeBatch | None:
        """A plan of nothing but single tokens, each with logits; None for any other."""
        if not all(row.is_decode and row.is_sampled for row in plan.rows):
            return None
        batch = DecodeBatch([], [], [], [], [])
        for row in plan.rows:
            blocks = self.pool.blocks(row.seq)[: -(-row.end // self._block)]
            for token_id, at in zip(row.token_ids, range(row.start, row.end), strict=True):
                batch.token_ids.append(token_id)
                batch.positions.append(at)
                batch.locations.append(blocks[at // self._block] * self._block + at % self._block)
                batch.blocks.append(blocks)
                batch.lens.append(at + 1)
        return batch

    def _decode(self, inputs: DecodeInputs) -> Tensor:
        """The forward of a step that only decodes: (rows, V) logits."""
        longest = inputs.tables.shape[1] * self._block
        self.attention.begin(StepLayout([], inputs.locations, inputs.tables, inputs.lens, longest))
        found: Tensor = self._forward(
            input_ids=inputs.token_ids, position_ids=inputs.positions, use_cache=False
        ).logits[0]
        return found

    def _stage(self, plan: StepPlan) -> tuple[StepLayout, Tensor, Tensor, Tensor]:
        """Packs a plan; one host-to-device copy for all of its numbers.

        Returns:
            The layout; token ids and positions, (1, T) int64; packed rows to sample, (R,),
            in both cases no fewer than `_least_rows`.
        """
        token_ids: list[int] = []
        positions: list[int] = []
        locations: list[int] = []
        sampled_at = list(plan.sampled_at)
        alone: list[tuple[list[int], list[Piece]]] = []
        batched: list[tuple[list[int], Piece]] = []
        for row in plan.rows:
            blocks = self.pool.blocks(row.seq)[: -(-row.end // self._block)]
            # Decodes are packed first; a one-token end of a prompt among the prompts stays there.
            is_batched = (
                self.attention.is_decode_batched
                and row.is_decode
                and len(batched) == len(token_ids)
            )
            pieces = self._cut(row, len(token_ids))
            if is_batched:
                batched += ((blocks, piece) for piece in pieces)
            else:
                alone.append((blocks, pieces))
            token_ids += row.token_ids
            positions += range(row.start, row.end)
            locations += (
                blocks[at // self._block] * self._block + at % self._block
                for at in range(row.start, row.end)
            )
        num_columns = max((len(blocks) for blocks, _ in batched), default=0)
        tables = [
            block
            for blocks, _ in batched
            # Any block of its own does behind the last.
            for block in (*blocks, *blocks[:1] * (num_columns - len(blocks)))
        ]
        scattered_blocks = [blocks for blocks, _ in alone if not _is_run(blocks)]
        # Too few rows get company, which is thrown away: see LEAST_ROWS.
        padding = [0] * (self._least_rows - len(token_ids))
        sampled_at += sampled_at[:1] * (self._least_rows - len(sampled_at))
        staged = self._to_device(
            [
                token_ids + padding,
                positions + padding,
                locations,
                sampled_at,
                tables,
                [piece.kv_len for _, piece in batched],
                *scattered_blocks,
            ]
        )
        scattered = iter(staged[6:])
        layout = StepLayout(
            [
                Row(blocks[0] if _is_run(blocks) else next(scattered), pieces)
                for blocks, pieces in alone
            ],
            staged[2],
            staged[4].view(len(batched), num_columns),
            staged[5],
            max((piece.kv_len for _, piece in batched), default=0),
        )
        return layout, staged[0].unsqueeze(0), staged[1].unsqueeze(0), staged[3]

    def _cut(self, row: ScheduledRow, first: int) -> list[Piece]:
        """Cuts a row into the pieces that attend together, the same ones however the scheduler
        cut it into steps.

        On a CPU tokens of the answer attend one by one, as they did when they were first
        computed: an answer that is recomputed on another replica goes on bit for bit. So do
        drafts everywhere.
        """
        num_prompt = len(row.seq.prompt_token_ids)
        pieces = []
        start = row.start
        while start < row.end:
            if row.drafts or (start >= num_prompt and not self._is_cuda):
                end = start + 1
            else:
                ends = (_next_multiple(start, self._block), _next_multiple(start, self._chunk))
                end = min(*ends, row.end, row.end if self._is_cuda else num_prompt)
            at = first + start - row.start
            pieces.append(Piece(at, at + end - start, end))
            start = end
        return pieces

    def _to_device(self, columns: list[list[int]]) -> list[Tensor]:
        packed = self._staging.send([number for column in columns for number in column])
        ends = accumulate(len(column) for column in columns)
        return [packed[end - len(column) : end] for column, end in zip(columns, ends, strict=True)]

    def _build_cache(self, config: EngineConfig) -> None:
        self._probe()
        shapes = [self.attention.layer_shapes[i] for i in sorted(self.attention.layer_shapes)]
        # On CPUs float32 attention is as fast as bfloat16 or faster, and exact: measured 1.2 ms
        # against 8.8 ms a layer at 16 rows of 500 tokens (EPYC with avx512_bf16, 1 thread).
        dtype = self._model.dtype if self._is_cuda else torch.float32
        bytes_per_token = sum(shape.bytes_per_token(dtype) for shape in shapes)
        size = fit_pool(
            config,
            min(config.max_model_len, context_length(self._model.config)),
            block_tokens=self._block,
            bytes_per_token=bytes_per_token,
            budget_bytes=kv_budget_bytes(config, self._device),
        )
        self._max_model_len = size.max_model_len
        self.pool = BlockPool(
            size.num_blocks,
            self._block,
            extent=0 if self._is_cuda else EXTENT,
            # On a CPU tokens of an answer attend alone and round differently.
            keeps_answers=self._is_cuda,
            # On CUDA all of the memory is taken at once.
            max_kept=None
            if self._is_cuda
            else kept_bytes(config, self._model.get_memory_footprint())
            // (bytes_per_token * self._block),
        )
        self.cache = KVCache(shapes, size.num_blocks, self._block, dtype=dtype, device=self._device)

    @torch.inference_mode()
    def _probe(self) -> None:
        """Runs one token to learn each layer's shapes, and that each layer asks us for attention."""
        token = torch.zeros((1, 1), dtype=torch.long, device=self._device)
        try:
            self._model(input_ids=token, position_ids=token, use_cache=False)
        except Exception as exc:
            raise UnsupportedModel(
                f"{type(self._model).__name__} cannot be run without its own cache: {exc}"
            ) from exc
        num_layers = self._model.config.get_text_config().num_hidden_layers
        if sorted(self.attention.layer_shapes) != list(range(num_layers)):
            raise UnsupportedModel(
                f"{type(self._model).__name__} has {num_layers} layers, "
                f"{len(self.attention.layer_shapes)} of them use the attention interface"
            )

    def _check_packing(self) -> None:
        """Compares a prompt run alone in one piece with the same prompt packed and in two pieces.

        Catches models that keep state outside attention or make up their own positions, which
        would answer wrongly without any error.
        """
        length = min(12, self.max_model_len)
        vocab_size = self._model.config.get_text_config().vocab_size
        probe, neighbour = (
            Sequence(
                request_id=name,
                prompt_token_ids=[(step * i + 7) % vocab_size for i in range(length)],
                sampling=SamplingParams(max_tokens=1),
            )
            for name, step in (("probe", 31), ("neighbour", 17))
        )
        half = length // 2
        self._begin(probe)
        alone = self.run(StepPlan((ScheduledRow(probe, 0, length),)))
        self.release(probe)
        both = [probe] if self.max_num_seqs == 1 else [neighbour, probe]
        for seq in both:
            self._begin(seq)
        for start, end in ((0, half), (half, length)):
            packed = self.run(StepPlan(tuple(ScheduledRow(seq, start, end) for seq in both)))
        for seq in both:
            self.release(seq)
        difference = (packed[-1] - alone[-1]).abs().mean() / alone[-1].std().clamp_min(1e-6)
        if not difference < 0.2:
            raise UnsupportedModel(
                f"{type(self._model).__name__} answers differently when its prompt is cut or "
                f"packed (by {difference:.2f} standard deviations, the limit is 0.2)"
            )

    def _begin(self, seq: Sequence) -> None:
        self.place(seq)
        if not self.reserve(seq, seq.num_tokens):
            raise ValueError(f"the KV memory does not hold {seq.num_tokens} tokens")


def _is_run(blocks: list[int]) -> bool:
    """Whether blocks are adjacent and in order."""
    return blocks == list(range(blocks[0], blocks[0] + len(blocks)))


def prefix_block(config: EngineConfig, device: torch.device) -> int:
    """Tokens in whose multiples a prompt's prefix is used again."""
    if config.prefix_block_tokens is not None:
        return config.prefix_block_tokens
    return config.prefill_chunk_tokens if device.type == "cuda" else CPU_BLOCK_TOKENS


def _next_multiple(position: int, of: int) -> int:
    return (position // of + 1) * of


def check_supported(model_config: Any) -> None:
    """Refuses what the engine would run wrongly or not at all.

    Raises:
        UnsupportedModel: with what is missing.
    """
    if getattr(model_config, "is_encoder_decoder", False):
        raise UnsupportedModel(f"{model_config.model_type} is not decoder-only")
    layer_types = set(getattr(model_config.get_text_config(), "layer_types", None) or ())
    if unknown := layer_types - SUPPORTED_LAYER_TYPES:
        raise UnsupportedModel(
            f"{model_config.model_type} has layers of type {', '.join(sorted(unknown))}, "
            f"supported are {', '.join(sorted(SUPPORTED_LAYER_TYPES))}"
        )


def context_length(model_config: Any) -> int:
    """Most positions the model was made for.

    Rotary embeddings that change with the longest position of the *batch* are held to the
    range in which they do not, so that a neighbour cannot change a row.
    """
    config = model_config.get_text_config()
    length = next(
        (
            value
            for name in ("max_position_embeddings", "n_positions")
            if isinstance(value := getattr(config, name, None), int)
        ),
        2**31,
    )
    rope = getattr(config, "rope_parameters", None) or {}
    # Models with several kinds of layers have one set of parameters a kind.
    kinds = [rope, *(kind for kind in rope.values() if isinstance(kind, dict))]
    for kind in kinds:
        if kind.get("rope_type") in LENGTH_DEPENDENT_ROPE:
            original = kind.get("original_max_position_embeddings") or getattr(
                config, "original_max_position_embeddings", None
            )
            length = min(length, original or length)
    return length


def choose_device(config: EngineConfig) -> torch.device:
    if config.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(config.device)


def choose_dtype(config: EngineConfig, device: torch.device) -> torch.dtype:
    if config.dtype != "auto":
        dtype = getattr(torch, config.dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype
    if device.type == "cuda":
        return torch.bfloat16
    features = torch.cpu.get_capabilities()
    has_bf16 = features.get("avx512_bf16") or features.get("amx_bf16")
    return torch.bfloat16 if has_bf16 else torch.float32


def available_cores() -> int:
    """Cores this process may use: its affinity, and its control group's quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, min(cores or 1, int(quota) // int(period)))
    except (OSError, ValueError):  # no control groups, or "max"
        return cores or 1


def cpu_threads(config: EngineConfig) -> int:
    """Threads of one forward on a CPU: one core is left to the rest of the process."""
    return config.num_threads or max(1, available_cores() - 1)


def kv_budget_bytes(config: EngineConfig, device: torch.device) -> int:
    if config.kv_cache_gib is not None:
        return int(config.kv_cache_gib * 2**30)
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free * 0.8)
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(8 * 2**30, memory // 2)


def kept_bytes(config: EngineConfig, num_weight_bytes: int) -> int:
    """Memory that earlier prompts and answers may take on a CPU where sequences never needed it."""
    if config.prefix_cache_gib is not None:
        return int(config.prefix_cache_gib * 2**30)
    return max(2**28, num_weight_bytes)
