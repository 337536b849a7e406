"""Kernels that apply what is left of a norm, a factor a row, after the product that its weight is part of."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from hocket.kernels.attention import whole_attention_torch, whole_attention_triton
from hocket.kernels.linear import silu_mul_torch, silu_mul_triton
from hocket.kernels.norm import rms_norm_torch
from tests.kernels.conftest import DEVICE, close

DTYPES = [torch.float32, torch.float16 if DEVICE.type == "cpu" else torch.bfloat16]
EPS = 1e-5


def rows(n: int, d: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Of very different lengths, one of them nearly nothing."""
    g = torch.Generator().manual_seed(d)
    x = torch.randn(n, d, generator=g) * torch.logspace(-3, 2, n)[:, None]
    return x.to(device, dtype)


def matrix(n: int, d: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    g = torch.Generator().manual_seed(n)
    return (torch.randn(n, d, generator=g) / d**0.5).to(device, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("d", [16, 32])
@pytest.mark.parametrize(("n", "first", "m"), [(11, 0, 11), (11, 7, 4), (5, 0, 1)])
def test_whole_attention(
    n: int, first: int, m: int, d: int, dtype: torch.dtype, device: torch.device
) -> None:
    s, heads, kv_heads, width = 3, 16, 2, 300
    x = rows(s * n, width, dtype, device)
    w = matrix((heads + 2 * kv_heads) * d, width, dtype, device)
    angle = torch.rand(n, d // 2, generator=torch.Generator().manual_seed(n)).repeat(1, 2).to(device) * 6

    def attend(call, x, w, *norm):  # type: ignore[no-untyped-def]
        qkv = F.linear(x, w).unflatten(0, (s, n))
        parts = qkv[:, first : first + m, : heads * d], qkv[..., heads * d :]
        return call(*parts, angle.cos(), angle.sin(), first, *norm)

    got, twin = (
        attend(call, x, w, x.unflatten(0, (s, n)), EPS)
        for call in (whole_attention_triton, whole_attention_torch)
    )
    normed = rms_norm_torch(x.double(), torch.ones(width, device=device).double(), EPS)
    close(got, twin, attend(whole_attention_torch, normed, w.double()).float())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("m", "d", "f"), [(1, 16, 33), (22, 48, 80), (3, 300, 2500)])
def test_silu_mul(m: int, d: int, f: int, dtype: torch.dtype, device: torch.device) -> None:
    x, w = rows(m, d, dtype, device), matrix(2 * f, d, dtype, device)
    gate_up = F.linear(x, w)
    normed = rms_norm_torch(x.double(), torch.ones(d, device=device).double(), EPS)
    exact = silu_mul_torch(F.linear(normed, w.double())).float()
    close(silu_mul_triton(gate_up, x, EPS), silu_mul_torch(gate_up, x, EPS), exact)
