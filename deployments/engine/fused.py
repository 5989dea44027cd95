"""The fast runner for CPUs: models of the Llama family over KV blocks, with our own attention."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path

import numba
import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig

from deployments.engine import block_attention
from deployments.engine.block_attention import BLOCK_TOKENS, block_shapes
from deployments.engine.blocks import BlockPool
from deployments.engine.config import EngineConfig
from deployments.engine.fused_model import Checkpoint, FusedModel, Step, find_obstacle, words
from deployments.engine.kv_cache import LayerShape, fit_pool, zeros
from deployments.engine.linears import supports_int8
from deployments.engine.quantization import CALIBRATION_TOKENS, Quantiser
from deployments.engine.runner import (
    UnsupportedModel,
    check_supported,
    choose_device,
    choose_dtype,
    context_length,
    cpu_threads,
    kept_bytes,
    kv_budget_bytes,
)
from deployments.engine.scheduler import ScheduledRow, StepPlan
from deployments.engine.sequence import Sequence
from protocol.request import SamplingParams

logger = logging.getLogger(__name__)

PIECE_TOKENS = 4
"""No cut changes what is computed; with fewer tokens a step has more overhead than work on them."""


class FusedRunner:
    """`Runner` over a FusedModel. Build it with `load`."""

    def __init__(
        self, model: FusedModel, config: EngineConfig, *, max_model_len: int, num_weight_bytes: int
    ) -> None:
        self._model = model
        self._num_threads = cpu_threads(config)
        cpu = torch.device("cpu")
        shape = LayerShape(model.num_kv_heads, model.head_size, model.head_size)
        dtype = model.kv_dtype
        bytes_per_token = model.num_layers * shape.bytes_per_token(dtype)
        size = fit_pool(
            config,
            max_model_len,
            block_tokens=BLOCK_TOKENS,
            bytes_per_token=bytes_per_token,
            budget_bytes=kv_budget_bytes(config, cpu),
        )
        num_blocks, self._max_model_len = size.num_blocks, size.max_model_len
        self._max_num_seqs = config.max_num_seqs
        block_bytes = BLOCK_TOKENS * bytes_per_token
        self.pool = BlockPool(
            num_blocks,
            BLOCK_TOKENS,
            keeps_answers=True,
            max_kept=kept_bytes(config, num_weight_bytes) // block_bytes,
        )
        group = 4 // dtype.itemsize
        shapes = block_shapes(num_blocks, model.num_kv_heads, model.head_size, group)
        self._blocks = [
            (
                words(zeros((*shapes[0], group), dtype, cpu)),
                words(zeros((*shapes[1], group), dtype, cpu)),
            )
            for _ in range(model.num_layers)
        ]
        self._attend = (
            block_attention.attend if self._num_threads == 1 else block_attention.attend_in_parallel
        )

    @classmethod
    def load(cls, folder: Path, config: EngineConfig) -> FusedRunner:
        """Loads a local model folder (safetensors only).

        Raises:
            UnsupportedModel: the folder holds no model that this runner computes.
        """
        model_config = AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
        check_supported(model_config)
        max_model_len = min(config.max_model_len, context_length(model_config))
        if obstacle := find_obstacle(model_config, max_model_len):
            raise UnsupportedModel(f"the fused runner does not compute {obstacle}")
        dtype = choose_dtype(config, choose_device(config))
        if dtype not in (torch.bfloat16, torch.float32):
            raise UnsupportedModel(f"the fused runner does not compute in {dtype}")
        is_int8 = config.quantization == "int8"
        if is_int8 and not supports_int8():
            raise UnsupportedModel("quantization int8 needs an x86 CPU with VNNI")
        num_threads = cpu_threads(config)
        torch.set_num_threads(num_threads)
        checkpoint = Checkpoint(folder)
        model = FusedModel(
            model_config,
            checkpoint,
            max_model_len=max(max_model_len, CALIBRATION_TOKENS),
            dtype=dtype,
            num_threads=num_threads,
            quantise=partial(Quantiser, num_threads=num_threads) if is_int8 else None,
        )
        logger.info("loaded %s on the CPU in %s", folder, "int8" if is_int8 else dtype)
        return cls(
            model,
            config,
            max_model_len=max_model_len,
            num_weight_bytes=checkpoint.num_bytes // (2 if is_int8 else 1),
        )

    @property
    def max_num_seqs(self) -> int:
        return self._max_num_seqs

    @property
    def max_model_len(self) -> int:
        return self._max_model_len

    @property
    def prefix_block_tokens(self) -> int:
        return BLOCK_TOKENS

    @property
    def piece_tokens(self) -> int:
        return PIECE_TOKENS

    @property
    def num_threads(self) -> int:
        return self._num_threads

    def warm_up(self) -> None:
        # The number of threads belongs to the calling thread.
        torch.set_num_threads(self._num_threads)
        if self._num_threads > 1:
            numba.set_num_threads(min(self._num_threads, numba.config.NUMBA_NUM_THREADS))
        probe = Sequence(
            request_id="probe",
            prompt_token_ids=[i % self._model.vocab_size for i in range(2)],
            sampling=SamplingParams(max_tokens=1),
        )
        # Compiles what is not compiled yet, or reads it from the disk.
        self.place(probe)
        if not self.reserve(probe, 2):
            raise ValueError("the KV memory does not hold two tokens")
        self.run(StepPlan((ScheduledRow(probe, 0, 2),)))
        self.release(probe)

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> Tensor:
        return self._model.forward(self._stage(plan), self._blocks, self._attend)

    def place(self, seq: Sequence) -> int:
        return self.pool.place(seq)

    def reserve(self, seq: Sequence, num_tokens: int) -> bool:
        return self.pool.reserve(seq, num_tokens)

    def holds(self, seq: Sequence) -> bool:
        return self.pool.holds(seq)

    def release(self, seq: Sequence, *, is_sound: bool = False) -> None:
        self.pool.free(seq, keep=is_sound)

    def close(self) -> None:
        del self._model, self._blocks

    def _stage(self, plan: StepPlan) -> Step:
        tables = [self.pool.blocks(row.seq) for row in plan.rows]
        table = np.zeros((len(tables), max(map(len, tables))), np.int32)
        token_ids: list[int] = []
        positions, locations, pieces = [], [], []
        for number, (row, blocks) in enumerate(zip(plan.rows, tables, strict=True)):
            table[number, : len(blocks)] = blocks
            first = len(token_ids)
            token_ids += row.token_ids
            at = np.arange(row.start, row.end)
            positions.append(at)
            locations.append(table[number, at // BLOCK_TOKENS] * BLOCK_TOKENS + at % BLOCK_TOKENS)
            pieces.append((number, first, row.end - row.start, row.start))
        return Step(
            np.array(token_ids, np.int64),
            np.concatenate(positions),
            np.concatenate(locations, dtype=np.int64),
            table,
            np.array(pieces, np.int64),
            np.array(plan.sampled_at, np.int64),
        )
