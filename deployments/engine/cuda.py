"""What CUDA asks of the host: memory to copy from, steps recorded once, results brought back.

A step costs one copy to the device (`PinnedStaging`), one launch where it only decodes
(`DecodeGraphs`) and one copy back (`to_host`); the host waits for nothing but the last of them.
All but the recording itself also works on a CPU, where the tests look at it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

logger = logging.getLogger(__name__)

NUM_BUFFERS = 2
"""The host fills one while the device may still read the other."""
LEAST_NUMBERS = 4096
NUM_REHEARSALS = 2
"""Runs before a recording: libraries take their working memory in the first."""


@dataclass
class _Buffer:
    """`copied`: recorded behind the last copy out of `host`; None before the first."""

    host: Tensor
    copied: torch.cuda.Event | None = None


class PinnedStaging:
    """Host memory that a device copies integers from without the host waiting, used over and over.

    Args:
        device: without CUDA the memory is ordinary, and copies are done when `send` returns.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_cuda = device.type == "cuda"
        self._buffers = [_Buffer(self._allocate(LEAST_NUMBERS)) for _ in range(NUM_BUFFERS)]
        self._turn = 0

    def send(self, numbers: list[int], into: Tensor | None = None) -> Tensor:
        """Copies numbers to the device, in the order of its stream.

        Args:
            into: (n,) int64 there; None takes new memory.
        """
        if into is None:
            into = torch.empty(len(numbers), dtype=torch.long, device=self._device)
        buffer = self._next(len(numbers))
        staged = buffer.host[: len(numbers)]
        staged.numpy()[:] = numbers
        into.copy_(staged, non_blocking=self._is_cuda)
        if self._is_cuda:
            buffer.copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            buffer.copied.record(torch.cuda.current_stream(self._device))
        return into

    def _next(self, num_numbers: int) -> _Buffer:
        buffer = self._buffers[self._turn]
        self._turn = (self._turn + 1) % len(self._buffers)
        if buffer.copied is not None:
            buffer.copied.synchronize()
        if buffer.host.shape[0] < num_numbers:
            buffer.host = self._allocate(max(num_numbers, 2 * buffer.host.shape[0]))
        return buffer

    def _allocate(self, num_numbers: int) -> Tensor:
        return torch.empty(num_numbers, dtype=torch.long, pin_memory=self._is_cuda)


@dataclass(frozen=True)
class DecodeBatch:
    """One token each of some rows; a row is a sequence, or a draft behind one.

    `blocks`: that hold a row's sequence, in order; `lens`: its tokens so far, this one included.
    """

    token_ids: list[int]
    positions: list[int]
    locations: list[int]
    blocks: list[list[int]]
    lens: list[int]

    @property
    def num_rows(self) -> int:
        return len(self.token_ids)

    @property
    def num_columns(self) -> int:
        return max(map(len, self.blocks))


@dataclass(frozen=True)
class DecodeInputs:
    """A batch on the device: (1, rows) token ids and positions, (rows,) locations and lengths,
    (rows, columns) blocks."""

    token_ids: Tensor
    positions: Tensor
    locations: Tensor
    tables: Tensor
    lens: Tensor


@dataclass(frozen=True, order=True)
class DecodeShape:
    """How many rows, of how many blocks at the most, a recorded step takes."""

    num_columns: int
    num_rows: int

    @property
    def num_numbers(self) -> int:
        return self.num_rows * (4 + self.num_columns)

    def pack(self, batch: DecodeBatch) -> list[int]:
        """A batch as the numbers of this shape.

        Missing rows repeat the first one, so that they write what is written anyway; missing
        blocks repeat a row's first, and its length keeps them from being read.
        """
        num_missing = self.num_rows - batch.num_rows
        columns = (batch.token_ids, batch.positions, batch.locations, batch.lens)
        tables = [[*row, *row[:1] * (self.num_columns - len(row))] for row in batch.blocks]
        packed = [number for column in columns for number in (*column, *column[:1] * num_missing)]
        for row in (*tables, *tables[:1] * num_missing):
            packed += row
        return packed

    def views(self, packed: Tensor) -> DecodeInputs:
        """The inputs in (num_numbers,) of what `pack` gives."""
        rows = self.num_rows
        token_ids, positions, locations, lens = packed[: 4 * rows].view(4, rows)
        tables = packed[4 * rows :].view(rows, self.num_columns)
        return DecodeInputs(token_ids[None], positions[None], locations, tables, lens)


def batch_sizes(most: int) -> list[int]:
    """Numbers of rows to record for: all powers of two up to 16, then no more than a half, and
    later a quarter, above the next smaller one."""
    sizes = [1]
    while sizes[-1] < most:
        last = sizes[-1]
        sizes.append(last + (last if last < 16 else last // 2 if last < 64 else last // 4))
    return [*sizes[:-1], most]


def column_counts(most: int) -> list[int]:
    """Numbers of blocks to record for: powers of two."""
    counts = [1]
    while counts[-1] < most:
        counts.append(2 * counts[-1])
    return [*counts[:-1], most]


@dataclass(frozen=True)
class Recording:
    """A step to play back: `replay` reads the inputs it was recorded with, and fills `logits`."""

    replay: Callable[[], None]
    logits: Tensor


Compute = Callable[[DecodeInputs], Tensor]
"""The forward: (rows, V) logits."""
Record = Callable[[Compute, DecodeInputs], Recording]


class DecodeGraphs:
    """Steps that only decode, recorded for some shapes. A step takes the smallest that holds it.

    Args:
        compute: run to be recorded; must not depend on anything but its inputs and the KV memory.
        max_rows, max_columns: of the largest step.
    """

    def __init__(
        self,
        compute: Compute,
        staging: PinnedStaging,
        device: torch.device,
        *,
        max_rows: int,
        max_columns: int,
        record: Record | None = None,
    ) -> None:
        self._compute = compute
        self._staging = staging
        self._device = device
        self._record = record or CudaRecorder(device)
        self._shapes = [
            DecodeShape(num_columns, num_rows)
            for num_columns in column_counts(max_columns)
            for num_rows in batch_sizes(max_rows)
        ]
        self._recorded: dict[DecodeShape, tuple[Tensor, Recording]] = {}

    @property
    def shapes(self) -> list[DecodeShape]:
        """What is recorded, the smallest first."""
        return sorted(self._recorded)

    def record_all(self) -> None:
        """Records all shapes, the largest first, so that the others find memory that it needed.

        A shape for which there is no memory is left out; a model that cannot be recorded is not.
        Its steps then run as any other. The KV memory's first block is written to.
        """
        for shape in sorted(self._shapes, reverse=True):
            try:
                self._recorded[shape] = self._record_one(shape)
            except torch.OutOfMemoryError:
                logger.warning("no memory to record steps of %s", shape)
            except Exception:
                logger.warning("steps cannot be recorded, all will be launched", exc_info=True)
                self._recorded.clear()
                return
        logger.info("recorded decoding steps for %d shapes", len(self._recorded))

    def find(self, batch: DecodeBatch) -> DecodeShape | None:
        """Of the recorded shapes that hold a batch the one with the least to read."""
        rows, columns = batch.num_rows, batch.num_columns
        fitting = (
            shape
            for shape in self._recorded
            if shape.num_rows >= rows and shape.num_columns >= columns
        )
        return min(fitting, key=lambda shape: shape.num_numbers, default=None)

    def run(self, batch: DecodeBatch) -> Tensor | None:
        """Plays a batch's step back.

        Returns:
            (rows, V) logits, good until the next call; None where no shape holds the batch.
        """
        shape = self.find(batch)
        if shape is None:
            return None
        inputs, recording = self._recorded[shape]
        self._staging.send(shape.pack(batch), inputs)
        recording.replay()
        return recording.logits[: batch.num_rows]

    def _record_one(self, shape: DecodeShape) -> tuple[Tensor, Recording]:
        nothing = DecodeBatch([0], [0], [0], [[0]], [1])
        inputs = self._staging.send(shape.pack(nothing))
        return inputs, self._record(self._compute, shape.views(inputs))


class CudaRecorder:
    """Records as CUDA graphs, which share their memory because only one plays at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self._pool: Any = None

    def __call__(self, compute: Compute, inputs: DecodeInputs) -> Recording:
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            self._pool = torch.cuda.graph_pool_handle()
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for _ in range(NUM_REHEARSALS):
                compute(inputs)
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the device meanwhile: only this one's calls count.
        with torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        ):
            logits = compute(inputs)
        return Recording(graph.replay, logits)


class ResultCopy:
    """Copies to the host on a stream of its own, into memory that is used over and over.

    For one thread, and one copy at a time.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # One that sleeps: a spinning thread would take a core from the rest of the process.
        self._arrived = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        self._host = torch.empty(0, dtype=torch.uint8, pin_memory=True)

    def fetch(self, tensors: Iterable[Tensor]) -> list[Any]:
        """The tensors as nested lists; waits once, and for what they are computed from only."""
        tensors = [tensor.contiguous() for tensor in tensors]
        num_bytes = sum(map(_aligned_bytes, tensors))
        if self._host.shape[0] < num_bytes:
            self._host = torch.empty(2 * num_bytes, dtype=torch.uint8, pin_memory=True)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        copies = []
        at = 0
        with torch.cuda.stream(self._stream):
            for tensor in tensors:
                end = at + tensor.nbytes
                copy = self._host[at:end].view(tensor.dtype).view(tensor.shape)
                copy.copy_(tensor, non_blocking=True)
                # Its memory is not given to others before this stream has read it.
                tensor.record_stream(self._stream)
                copies.append(copy)
                at += _aligned_bytes(tensor)
            self._arrived.record(self._stream)
        self._arrived.synchronize()
        return [copy.tolist() for copy in copies]


def _aligned_bytes(tensor: Tensor) -> int:
    return -(-tensor.nbytes // 8) * 8


_result_copy = cache(ResultCopy)


def to_host(*tensors: Tensor) -> list[Any]:
    """Tensors of one device as nested lists. On CUDA for one thread of a process."""
    device = tensors[0].device
    if device.type != "cuda":
        return [tensor.tolist() for tensor in tensors]
    return _result_copy(device).fetch(tensors)


def to_device(numbers: list[Any] | np.ndarray, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A small tensor on a device, without waiting for it."""
    tensor = torch.as_tensor(numbers, dtype=dtype)
    if device.type != "cuda":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def compile_model(model: Any, backend: str = "inductor") -> Any:
    """The model with its forward compiled, for any number of tokens.

    Attention is to be left out of that (`uncompiled`): its shapes are those of the step.
    """
    return torch.compile(model, dynamic=True, backend=backend)


def uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that compiled code calls as it is."""
    disabled: Callable[..., Any] = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    return disabled
