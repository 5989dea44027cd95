"""How an engine is sized and where it runs. Plain data, validated when it is built."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Device = str
"""`auto`, `cpu`, `cuda` or `cuda:N`."""
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Quantization = Literal["none", "int8"]

DEFAULT_QUEUED_PROMPTS = 16
"""Longest prompts that may be queued: some minutes of work for a CPU core, seconds for a GPU."""


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Limits of one engine, and the hardware its runner uses.

    Args:
        max_model_len: most tokens of a prompt and its answer together; the runner lowers
            it to what the model's positions and the KV memory hold.
        max_num_seqs: most sequences computed at the same time; where the KV memory does not
            hold them all, some wait again.
        max_num_batched_tokens: token budget of one step, decodes and prefill together. It
            bounds how long a running stream waits for its next token.
        prefill_slowdown: longest step with running streams and prompts, as a multiple of one
            of the streams alone; prompts get less of it then, but never under a block. 0
            leaves them the whole budget.
        prefill_chunk_tokens: a prompt is cut only at multiples of this, so that the
            arithmetic of a prompt never depends on who else is in the batch.
        prefix_block_tokens: a prompt that begins as an earlier one did is computed from the
            last multiple of this that they share; None is 32 on a CPU, where attention is cut
            in the same places, and `prefill_chunk_tokens` on CUDA.
        speculative_tokens: longest draft of a sequence's next tokens, which a step checks while
            it computes the next one; 0 makes none.
        max_speculative_rows: most tokens of the decoding sequences in a step, drafts included;
            where more sequences than that decode, there are no drafts. 0 makes none.
        max_waiting: most sequences queued beyond the `max_num_seqs` running ones.
        max_waiting_tokens: most prompt tokens of the queued sequences together; 0 is
            `DEFAULT_QUEUED_PROMPTS` of the longest prompts.
        device: "auto" is CUDA when present, else the CPU.
        dtype: of the weights; "auto" is bfloat16 on CUDA and on CPUs that compute it
            natively, else float32.
        quantization: "int8" keeps the weights in 8 bits a number on a CPU, and computes with
            activations of 8 bits: about twice as fast, and nearly the same answers.
        num_threads: CPU threads of one forward; None leaves one core to the rest of the
            process, because a spinning thread without a core of its own stalls all others.
        kv_cache_gib: upper bound of the KV memory; None is half of the machine's memory,
            8 GiB at most, on a CPU (pages are taken as they are used), and 80 % of what the
            weights leave free on CUDA.
        num_kv_blocks: blocks of the KV memory; None is what the longest sequences in all places
            need, or what the KV memory holds.
        prefix_cache_gib: memory that earlier prompts and answers may take on a CPU where running
            sequences never needed it; None is 0.25, or what the weights take if that is more.
        cuda_graphs: on CUDA, steps that only decode are recorded once for each of some batch
            sizes, and played back; their hundreds of kernels then cost one launch.
        compile: on CUDA, the model's forward goes through torch.compile, which takes a minute
            and a C compiler at start.
        stall_after_s: age of the heartbeat at which the loop no longer counts as healthy.

    Raises:
        ValueError: a value is out of range; the message names it and the limit.
    """

    max_model_len: int = 8192
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 512
    prefill_slowdown: float = 2.0
    prefill_chunk_tokens: int = 256
    prefix_block_tokens: int | None = None
    speculative_tokens: int = 7
    max_speculative_rows: int = 8
    max_waiting: int = 256
    max_waiting_tokens: int = 0
    device: Device = "auto"
    dtype: Dtype = "auto"
    quantization: Quantization = "none"
    num_threads: int | None = None
    kv_cache_gib: float | None = None
    num_kv_blocks: int | None = None
    prefix_cache_gib: float | None = None
    cuda_graphs: bool = True
    compile: bool = False
    stall_after_s: float = 60.0

    def __post_init__(self) -> None:
        for name, least in (
            ("max_model_len", 2),
            ("max_num_seqs", 1),
            ("prefill_chunk_tokens", 1),
            ("speculative_tokens", 0),
            ("max_speculative_rows", 0),
            ("max_waiting", 0),
            ("max_waiting_tokens", 0),
        ):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}, the least is {least}")
        if self.prefix_block_tokens is not None and self.prefix_block_tokens < 1:
            raise ValueError(f"prefix_block_tokens is {self.prefix_block_tokens}, the least is 1")
        if self.num_threads is not None and self.num_threads < 1:
            raise ValueError(f"num_threads is {self.num_threads}, the least is 1")
        if self.kv_cache_gib is not None and not self.kv_cache_gib > 0:
            raise ValueError(f"kv_cache_gib is {self.kv_cache_gib}, it must be above 0")
        if self.num_kv_blocks is not None and self.num_kv_blocks < 1:
            raise ValueError(f"num_kv_blocks is {self.num_kv_blocks}, the least is 1")
        if self.prefix_cache_gib is not None and not self.prefix_cache_gib >= 0:
            raise ValueError(f"prefix_cache_gib is {self.prefix_cache_gib}, the least is 0")
        if not (self.prefill_slowdown == 0 or 1 <= self.prefill_slowdown < math.inf):
            raise ValueError(
                f"prefill_slowdown is {self.prefill_slowdown}, allowed are 0 and from 1 up"
            )
        if not self.stall_after_s > 0:
            raise ValueError(f"stall_after_s is {self.stall_after_s}, it must be above 0")
        # Every running sequence decodes in every step, and one piece of a prompt still fits:
        # otherwise a full batch would hold a prompt back for ever.
        least = self.max_num_seqs + self.prefill_chunk_tokens
        if self.max_num_batched_tokens < least:
            raise ValueError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}, the least is "
                f"max_num_seqs + prefill_chunk_tokens = {least}"
            )

    @property
    def capacity(self) -> int:
        """Most sequences accepted at a time, running and waiting."""
        return self.max_num_seqs + self.max_waiting

    @property
    def queue_tokens(self) -> int:
        """Most prompt tokens queued at a time."""
        return self.max_waiting_tokens or DEFAULT_QUEUED_PROMPTS * self.max_model_len
