"""Rounding to eight bits and products of it, against their twins."""

from __future__ import annotations

import pytest
import torch

from hocket.kernels.float8 import (
    Rounded,
    multiply,
    round_rows,
    round_rows_torch,
    round_rows_triton,
    silu_mul_round_torch,
    silu_mul_round_triton,
)
from hocket.kernels.norm import rms_norm_torch
from tests.kernels.conftest import DEVICE

DTYPES = [torch.float32, torch.float16 if DEVICE.type == "cpu" else torch.bfloat16]

# A value in the middle of two may go either way; and Triton's interpreter loses a carry into the exponent.
ODD = 0.05 if DEVICE.type == "cpu" else 0.002


def differing(a: Rounded, b: Rounded) -> float:
    return (a.values.float() != b.values.float()).float().mean().item()


def rows(m: int, k: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    x = torch.randn(m, k, generator=torch.Generator().manual_seed(seed)) * torch.logspace(-2, 1, m)[:, None]
    x[m // 2] = 0
    return x.to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("eps", [None, 1e-5], ids=["plain", "normed"])
@pytest.mark.parametrize("add", [False, True], ids=["alone", "added"])
def test_round_rows(add: bool, eps: float | None, dtype: torch.dtype) -> None:
    x, more = rows(5, 300, dtype), rows(5, 300, dtype, 1) if add else None
    one, two = x.clone(), x.clone()
    got, twin = round_rows_triton(one, more, eps), round_rows_torch(two, more, eps)
    assert torch.equal(one, two)
    torch.testing.assert_close(got.scale, twin.scale, rtol=1e-5, atol=0)
    assert differing(got, twin) < ODD
    exact = rms_norm_torch(one.float(), torch.ones(300, device=DEVICE), eps) if eps else one.float()
    assert (twin.wide() - exact).norm() < 0.03 * exact.norm()


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_mul_round(dtype: torch.dtype) -> None:
    gate_up = rows(4, 600, dtype)
    got, twin = silu_mul_round_triton(gate_up), silu_mul_round_torch(gate_up)
    torch.testing.assert_close(got.scale, twin.scale, rtol=1e-5, atol=0)
    assert differing(got, twin) < ODD


def test_products_err_as_three_bits_do() -> None:
    dtype = torch.bfloat16
    a, w = rows(7, 512, dtype), rows(64, 512, dtype, 1)
    got = multiply(round_rows(a.clone()), round_rows(w.clone()), dtype).float()
    exact = a.double() @ w.double().t()
    error = (got - exact).norm(dim=1) / exact.norm(dim=1).clamp(min=1e-9)
    assert error.max() < 0.06
    assert error.max() > 0.005  # it is not bfloat16's
