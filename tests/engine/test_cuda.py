"""The CUDA path: its parts on the CPU, and the whole where there is a device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from deployments.engine.cuda import (
    LEAST_NUMBERS,
    NUM_BUFFERS,
    DecodeBatch,
    DecodeGraphs,
    DecodeInputs,
    DecodeShape,
    PinnedStaging,
    Recording,
    batch_sizes,
    column_counts,
    compile_model,
    to_device,
    to_host,
)
from deployments.engine.engine import Engine
from deployments.engine.runner import ModelRunner
from deployments.engine.sampler import Sampler
from deployments.engine.scheduler import ScheduledRow, StepPlan
from tests.engine import tiny_models
from tests.engine.fakes import SMALL, TOKENIZER, run_to_end, sequence

CPU = torch.device("cpu")
CONFIG = replace(SMALL, speculative_tokens=0)
PROMPTS = [
    [(7 * i + n) % 250 + 3 for i in range(length)] for n, length in enumerate((1, 5, 17, 30))
]


def batch(*rows: tuple[int, int, list[int]]) -> DecodeBatch:
    """Of (token id, position, blocks) each; a block holds 4 tokens."""
    return DecodeBatch(
        token_ids=[token_id for token_id, _, _ in rows],
        positions=[position for _, position, _ in rows],
        locations=[blocks[at // 4] * 4 + at % 4 for _, at, blocks in rows],
        blocks=[blocks for _, _, blocks in rows],
        lens=[at + 1 for _, at, _ in rows],
    )


# Staging


def test_numbers_arrive_in_their_order_whatever_was_sent_before() -> None:
    staging = PinnedStaging(CPU)
    sent = [list(range(n, n + size)) for n, size in enumerate((3, 1, 9000, 0, 5, 2))]
    arrived = [staging.send(numbers) for numbers in sent]
    assert [tensor.tolist() for tensor in arrived] == sent


def test_numbers_arrive_where_they_are_wanted() -> None:
    place = torch.zeros(3, dtype=torch.long)
    assert PinnedStaging(CPU).send([4, 5, 6], place) is place
    assert place.tolist() == [4, 5, 6]


def test_memory_is_used_over_and_over_and_grows_only_for_more() -> None:
    staging = PinnedStaging(CPU)

    def places() -> set[int]:
        return {buffer.host.data_ptr() for buffer in staging._buffers}

    before = places()
    for _ in range(3 * NUM_BUFFERS):
        staging.send([1] * LEAST_NUMBERS)
    assert places() == before
    for _ in range(NUM_BUFFERS):
        staging.send([1] * (LEAST_NUMBERS + 1))
    grown = places()
    assert not grown & before
    for _ in range(3 * NUM_BUFFERS):
        staging.send([1] * (2 * LEAST_NUMBERS))
    assert places() == grown


# Shapes


@given(most=st.integers(1, 1024))
def test_every_batch_has_a_size_that_is_not_much_larger(most: int) -> None:
    sizes = batch_sizes(most)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == most
    assert len(sizes) <= 24
    for num_rows in range(1, most + 1):
        size = next(size for size in sizes if size >= num_rows)
        assert size <= 2 * num_rows
        assert num_rows <= 16 or size <= 1.5 * num_rows


@given(most=st.integers(1, 5000))
def test_every_length_has_a_number_of_blocks_under_twice_its_own(most: int) -> None:
    counts = column_counts(most)
    assert counts == sorted(set(counts))
    assert counts[-1] == most
    assert all(after <= 2 * before for before, after in pairwise(counts))


def test_a_batch_is_packed_with_its_first_row_in_the_places_of_missing_ones() -> None:
    shape = DecodeShape(num_columns=3, num_rows=4)
    packed = torch.tensor(shape.pack(batch((7, 1, [5]), (8, 6, [2, 9]))))
    assert packed.shape == (shape.num_numbers,)
    inputs = shape.views(packed)
    assert inputs.token_ids.tolist() == [[7, 8, 7, 7]]
    assert inputs.positions.tolist() == [[1, 6, 1, 1]]
    assert inputs.locations.tolist() == [21, 38, 21, 21]
    assert inputs.lens.tolist() == [2, 7, 2, 2]
    assert inputs.tables.tolist() == [[5, 5, 5], [2, 9, 2], [5, 5, 5], [5, 5, 5]]


# Recorded steps, with a recorder that computes again what it would play back


def forward(inputs: DecodeInputs) -> Tensor:
    """(rows, 3): what a model would read of each row."""
    assert inputs.tables.shape == (inputs.lens.shape[0], inputs.tables.shape[1])
    return torch.stack(
        [inputs.token_ids[0], inputs.positions[0], inputs.locations + 100 * inputs.lens], dim=1
    ).float()


class Recorder:
    """Plays back over the inputs that it was given, and counts."""

    def __init__(self, fault: Exception | None = None, most_rows: int = 10**6) -> None:
        self.recorded: list[tuple[int, int]] = []
        self.num_replays = 0
        self._fault = fault
        self._most_rows = most_rows

    def __call__(self, compute: Any, inputs: DecodeInputs) -> Recording:
        if self._fault is not None:
            raise self._fault
        if inputs.lens.shape[0] > self._most_rows:
            raise torch.OutOfMemoryError("no memory")
        self.recorded.append((inputs.tables.shape[1], inputs.lens.shape[0]))
        logits = compute(inputs)

        def replay() -> None:
            self.num_replays += 1
            logits.copy_(compute(inputs))

        return Recording(replay, logits)


def graphs(recorder: Recorder, max_rows: int = 8, max_columns: int = 4) -> DecodeGraphs:
    made = DecodeGraphs(
        forward,
        PinnedStaging(CPU),
        CPU,
        max_rows=max_rows,
        max_columns=max_columns,
        record=recorder,
    )
    made.record_all()
    return made


def test_shapes_are_recorded_from_the_largest_down() -> None:
    recorder = Recorder()
    made = graphs(recorder)
    assert recorder.recorded[0] == (4, 8)
    assert recorder.recorded == sorted(recorder.recorded, reverse=True)
    assert len(made.shapes) == len(batch_sizes(8)) * len(column_counts(4))


@given(
    rows=st.lists(
        st.tuples(st.integers(0, 99), st.integers(0, 15), st.permutations(range(4))),
        min_size=1,
        max_size=8,
    )
)
def test_a_step_played_back_gives_what_it_would_computed(
    rows: list[tuple[int, int, list[int]]],
) -> None:
    asked = batch(*((token, at, blocks[: at // 4 + 1]) for token, at, blocks in rows))
    exact = DecodeShape(asked.num_columns, asked.num_rows)
    expected = forward(exact.views(torch.tensor(exact.pack(asked))))
    logits = graphs(Recorder()).run(asked)
    assert logits is not None
    assert logits.tolist() == expected.tolist()


def test_a_step_takes_the_smallest_shape_that_holds_it() -> None:
    made = graphs(Recorder())
    three = batch(*[(1, 6, [0, 1])] * 3)
    assert made.find(three) == DecodeShape(num_columns=2, num_rows=4)


@pytest.mark.parametrize("rows", [9 * [(1, 0, [0])], [(1, 16, [0, 1, 2, 3, 4])]])
def test_a_step_that_no_shape_holds_is_not_played_back(rows: Any) -> None:
    assert graphs(Recorder()).run(batch(*rows)) is None


def test_a_model_that_cannot_be_recorded_is_launched(caplog: pytest.LogCaptureFixture) -> None:
    made = graphs(Recorder(RuntimeError("operation not permitted when stream is capturing")))
    assert made.shapes == []
    assert made.run(batch((1, 0, [0]))) is None
    assert "cannot be recorded" in caplog.text


def test_shapes_without_memory_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    made = graphs(Recorder(most_rows=2))
    assert {shape.num_rows for shape in made.shapes} == {1, 2}
    assert made.run(batch(*[(1, 0, [0])] * 3)) is None
    assert "no memory" in caplog.text


# Small things


def test_tensors_come_to_the_host_as_lists() -> None:
    assert to_host(torch.tensor([1, 2]), torch.tensor([[0.5], [1.5]])) == [[1, 2], [[0.5], [1.5]]]


def test_numbers_become_a_tensor_on_the_device() -> None:
    made = to_device([1.0, 2.0], torch.float32, CPU)
    assert (made.tolist(), made.dtype) == ([1.0, 2.0], torch.float32)


# In the runner


def answers(runner: ModelRunner, prompts: list[list[int]], **sampling: Any) -> list[list[int]]:
    """Greedy answers, all at once."""
    engine = Engine(runner, TOKENIZER, CONFIG)
    seqs = [sequence(prompt, max_tokens=12, **sampling) for prompt in prompts]
    run_to_end(engine, *seqs)
    return [seq.output_token_ids for seq in seqs]


@contextmanager
def running(family: str, device: str = "cpu", **config: Any) -> Iterator[ModelRunner]:
    runner = ModelRunner(
        tiny_models.build(family).to(device), replace(CONFIG, device=device, **config)
    )
    runner.warm_up()
    try:
        yield runner
    finally:
        runner.close()


@pytest.mark.parametrize(
    "family", ["llama", "gemma2", "gpt2", "mistral with a window", "mixtral", "gpt-oss"]
)
def test_decoding_steps_that_are_played_back_change_no_answer(family: str) -> None:
    with running(family) as plain:
        expected = answers(plain, PROMPTS)
    with running(family) as runner:
        recorder = Recorder()
        runner.attention.is_decode_batched = True
        runner.record_decodes(recorder)
        assert answers(runner, PROMPTS) == expected
        assert recorder.num_replays > 0


class NoValueAsked(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises where a number on the device decides what the host does next."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        assert func.overloadpacket.__name__ not in {"_local_scalar_dense", "nonzero", "is_nonzero"}
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gpt2", "mistral with a window"])
def test_a_step_asks_the_device_for_no_value(family: str) -> None:
    with running(family) as runner:
        runner.attention.is_decode_batched = True
        seqs = [sequence(prompt) for prompt in PROMPTS]
        for seq in seqs:
            runner.place(seq)
            assert runner.reserve(seq, seq.num_tokens + 1)
        prefill, *decodes = seqs
        runner.run(StepPlan(tuple(ScheduledRow(seq, 0, seq.num_tokens) for seq in decodes)))
        for seq in decodes:
            seq.output_token_ids.append(5)
        rows = [ScheduledRow(seq, seq.num_tokens - 1, seq.num_tokens) for seq in decodes]
        rows.append(ScheduledRow(prefill, 0, prefill.num_tokens))
        with NoValueAsked():  # type: ignore[no-untyped-call]
            runner.run(StepPlan(tuple(rows)))


def test_drafts_are_rows_of_a_step_that_is_played_back() -> None:
    prompts = [[5, 6, 7, 8] * 5, [9, 3] * 9]
    with running("llama") as plain:
        expected = answers(plain, prompts)
    with running("llama") as runner:
        recorder = Recorder()
        runner.attention.is_decode_batched = True
        runner.record_decodes(recorder)
        engine = Engine(runner, TOKENIZER, replace(CONFIG, speculative_tokens=3))
        seqs = [sequence(prompt, max_tokens=12) for prompt in prompts]
        run_to_end(engine, *seqs)
        assert [seq.output_token_ids for seq in seqs] == expected
        assert engine.stats().draft_tokens_total > 0
        assert recorder.num_replays > 0


def test_a_compiled_forward_gives_the_same_answers_and_is_compiled_once_for_all_steps() -> None:
    with running("llama") as plain:
        expected = answers(plain, PROMPTS)
    counters = torch._dynamo.utils.counters
    with running("llama", compile=True) as runner:
        runner._forward = compile_model(runner._model, backend="eager")
        assert answers(runner, PROMPTS) == expected
        before = counters["frames"]["ok"]
        assert answers(runner, [prompt[::-1] for prompt in PROMPTS])
        assert counters["frames"]["ok"] == before


# On a device


on_a_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@contextmanager
def no_waiting() -> Iterator[None]:
    """Makes torch raise where the host waits for the device."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


class TestOnADevice:
    pytestmark = on_a_gpu

    @pytest.mark.parametrize("cuda_graphs", [True, False])
    @pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "mistral with a window"])
    def test_greedy_answers_are_those_of_the_cpu(self, family: str, cuda_graphs: bool) -> None:
        with running(family) as plain:
            expected = answers(plain, PROMPTS)
        with running(family, "cuda", cuda_graphs=cuda_graphs) as runner:
            assert answers(runner, PROMPTS) == expected

    def test_decoding_steps_are_played_back(self) -> None:
        with running("llama", "cuda") as runner:
            graphs = runner._graphs
            assert graphs is not None
            assert graphs.shapes
            assert graphs.run(DecodeBatch([1], [0], [0], [[0]], [1])) is not None

    @pytest.mark.parametrize("cuda_graphs", [True, False])
    def test_the_host_waits_for_nothing_in_a_step(self, cuda_graphs: bool) -> None:
        with running("llama", "cuda", cuda_graphs=cuda_graphs) as runner:
            seqs = [sequence(prompt) for prompt in PROMPTS[:3]]
            for seq in seqs:
                runner.place(seq)
                assert runner.reserve(seq, seq.num_tokens + 4)
            runner.run(StepPlan(tuple(ScheduledRow(seq, 0, seq.num_tokens) for seq in seqs)))
            for seq in seqs:
                seq.num_computed_tokens = seq.num_tokens
                seq.output_token_ids.append(5)
            plan = StepPlan(
                tuple(ScheduledRow(seq, seq.num_tokens - 1, seq.num_tokens) for seq in seqs)
            )
            newcomer = sequence([7] * 9)
            runner.place(newcomer)
            assert runner.reserve(newcomer, 9)
            mixed = StepPlan((*plan.rows, ScheduledRow(newcomer, 0, 9)))
            with no_waiting():
                runner.run(plan)
                runner.run(mixed)

    def test_what_is_copied_from_is_pinned(self) -> None:
        staging = PinnedStaging(torch.device("cuda"))
        sent = staging.send([1, 2, 3])
        assert all(buffer.host.is_pinned() for buffer in staging._buffers)
        assert sent.tolist() == [1, 2, 3]

    def test_memory_is_not_filled_again_before_it_was_copied(self) -> None:
        staging = PinnedStaging(torch.device("cuda"))
        sent = [[n] * 4000 for n in range(50)]
        torch.cuda._sleep(50_000_000)  # type: ignore[no-untyped-call]
        arrived = [staging.send(numbers) for numbers in sent]
        assert [tensor.tolist() for tensor in arrived] == sent

    def test_results_come_back_in_one_wait_whatever_their_kind(self) -> None:
        ids = torch.arange(5, device="cuda")
        values = torch.linspace(0, 1, 6, device="cuda").view(2, 3)
        with no_waiting():
            got = to_host(ids, values, ids > 2)
        assert got == [ids.tolist(), values.tolist(), (ids > 2).tolist()]

    def test_sampled_answers_are_those_of_the_cpu(self) -> None:
        logits = torch.randn(len(PROMPTS), TOKENIZER.vocab_size, generator=torch.manual_seed(3)) * 4
        kinds: list[dict[str, Any]] = [{}, {"top_k": 20}, {"top_p": 0.8}, {"min_p": 0.05}]
        seqs = [sequence(seed=n, temperature=0.8, **kind) for n, kind in enumerate(kinds)]
        expected = [token.token_id for token in Sampler().sample(logits, seqs) if token]
        drawn = [token.token_id for token in Sampler().sample(logits.cuda(), seqs) if token]
        assert drawn == expected

    @pytest.mark.parametrize(
        "sampling",
        [
            {},
            {"logprobs": 3},
            {"temperature": 0.9, "top_p": 0.9, "min_p": 0.01},
            {"repetition_penalty": 1.2, "frequency_penalty": 0.4, "logit_bias": {4: 2.0}},
            {"min_tokens": 3},
        ],
        ids=str,
    )
    def test_the_host_waits_for_a_steps_tokens_only(self, sampling: dict[str, Any]) -> None:
        logits = torch.randn(3, TOKENIZER.vocab_size, device="cuda")
        seqs = [sequence(**sampling) for _ in range(3)]
        Sampler().sample(logits, seqs)
        with no_waiting():
            Sampler().sample(logits, seqs)

    def test_a_compiled_forward_gives_the_same_answers(self) -> None:
        with running("llama", "cuda") as plain:
            expected = answers(plain, PROMPTS)
        with running("llama", "cuda", compile=True) as runner:
            assert answers(runner, PROMPTS) == expected
