"""Packed products: near the exact ones, and each row the same whatever is computed with it."""

from __future__ import annotations

import pytest
import torch

from deployments.engine.linears import (
    BFloat16Linear,
    Float32Linear,
    Int8Linear,
    Linear,
    OneDnnBFloat16Linear,
    OneDnnInt8Linear,
    padded_rows,
    supports_int8,
    supports_own_bfloat16,
    supports_own_int8,
)

ROWS = (1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 31, 32, 33, 64, 100, 129)
own_bfloat16 = pytest.mark.skipif(not supports_own_bfloat16(), reason="no AVX512-BF16 here")
own_int8 = pytest.mark.skipif(not supports_own_int8(), reason="no AVX512-VNNI here")
int8 = pytest.mark.skipif(not supports_int8(), reason="no VNNI here")
KINDS = [
    pytest.param(BFloat16Linear, 0.01, id="bfloat16", marks=own_bfloat16),
    pytest.param(OneDnnBFloat16Linear, 0.01, id="oneDNN bfloat16"),
    pytest.param(Float32Linear, 1e-5, id="float32"),
    pytest.param(Int8Linear, 0.02, id="int8", marks=own_int8),
    pytest.param(OneDnnInt8Linear, 0.02, id="oneDNN int8", marks=int8),
]


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("kind", "tolerance"), KINDS)
def test_products_are_near_the_exact_ones(
    kind: type[Linear], tolerance: float, has_bias: bool
) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(96, 64), torch.randn(9, 64)
    bias = torch.randn(96) if has_bias else None
    linear = kind(weight, bias)  # type: ignore[call-arg]
    got = linear(x.to(linear.activation_dtype)).float()
    expected = torch.nn.functional.linear(x, weight, bias)
    assert ((got - expected).norm() / expected.norm()).item() < tolerance


@pytest.mark.parametrize(("kind", "tolerance"), KINDS)
@pytest.mark.parametrize(("columns", "rows"), [(576, 960), (1536, 576), (64, 320)])
def test_a_row_does_not_depend_on_its_company(
    kind: type[Linear], tolerance: float, columns: int, rows: int
) -> None:
    torch.manual_seed(1)
    linear = kind(torch.randn(rows, columns) * 0.03, None)  # type: ignore[call-arg]
    x = torch.randn(160, columns).to(linear.activation_dtype)
    # One that would spoil a scale that all rows share.
    x[150] *= 1e4
    together = linear(x)
    for n in ROWS:
        assert torch.equal(linear(x[:n]), together[:n]), n
        assert torch.equal(linear(x[11 : 11 + n]), together[11 : 11 + n]), n


@pytest.mark.parametrize(
    "kind",
    [pytest.param(Int8Linear, marks=own_int8), pytest.param(OneDnnInt8Linear, marks=int8)],
)
def test_rows_of_zeros_stay_zeros_in_8_bits(kind: type[Linear]) -> None:
    linear = kind(torch.randn(32, 16), None)  # type: ignore[call-arg]
    got = linear(torch.zeros(2, 16))
    assert got.abs().max() < 1e-15


@own_int8
def test_8_bits_are_summed_as_onednn_sums_them() -> None:
    weight, x, bias = torch.randn(208, 96), torch.randn(13, 96) * 5, torch.randn(208)
    assert torch.equal(Int8Linear(weight, bias)(x), OneDnnInt8Linear(weight, bias)(x))


@pytest.mark.parametrize(
    "kind",
    [pytest.param(BFloat16Linear, marks=own_bfloat16), pytest.param(Int8Linear, marks=own_int8)],
)
@pytest.mark.parametrize("num_out", [1, 15, 16, 50, 64, 65, 250])
def test_any_number_of_columns_on_any_number_of_threads_is_computed(
    kind: type[BFloat16Linear] | type[Int8Linear], num_out: int
) -> None:
    weight, bias = torch.randn(num_out, 80), torch.randn(num_out)
    x = torch.randn(11, 80).to(kind.activation_dtype)
    one = kind(weight, bias)(x)
    assert one.shape == (11, num_out)
    expected = torch.nn.functional.linear(x.float(), weight, bias)
    assert ((one - expected).norm() / expected.norm()).item() < 0.02
    assert torch.equal(kind(weight, bias, in_parallel=True)(x), one)


@pytest.mark.parametrize(
    "kind",
    [pytest.param(BFloat16Linear, marks=own_bfloat16), pytest.param(Int8Linear, marks=own_int8)],
)
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_poisoned_row_stays_alone(kind: type[Linear], poison: float) -> None:
    linear = kind(torch.randn(32, 64), None)  # type: ignore[call-arg]
    x = torch.randn(7, 64).to(linear.activation_dtype)
    expected = linear(x)
    x[3, 5] = poison
    got = linear(x)
    assert not got[3].isfinite().all()
    others = [0, 1, 2, 4, 5, 6]
    assert torch.equal(got[others], expected[others])


def test_few_numbers_of_rows_are_computed_and_hardly_more_rows_than_asked_for() -> None:
    asked = range(1, 1025)
    computed = [padded_rows(n) for n in asked]
    assert all(
        n <= padded and padded <= max(2, 9 * n / 8)
        for n, padded in zip(asked, computed, strict=True)
    )
    assert len(set(computed)) < 64
    assert [padded_rows(n) for n in computed] == computed
