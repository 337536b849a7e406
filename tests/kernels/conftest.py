"""Kernels against their twins: on the device where there is one, else under Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from hocket.kernels import choice

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def _needs_triton() -> None:
    if not choice._AVAILABLE:
        pytest.skip("Triton is not installed")


@pytest.fixture
def device() -> torch.device:
    return DEVICE


def close(got: torch.Tensor, twin: torch.Tensor, exact: torch.Tensor | None = None) -> None:
    """fp32: equal to rounding. Half precision: the kernel errs no more than its twin does against fp32, times
    two, and an ulp of the largest value."""
    assert got.dtype == twin.dtype
    assert not got.isnan().any()
    if exact is None or got.dtype == torch.float32:
        torch.testing.assert_close(got, twin, rtol=2e-5, atol=2e-5)
        return
    allowed = 2 * (twin.float() - exact).abs().max() + exact.abs().max() * torch.finfo(got.dtype).eps
    assert (got.float() - exact).abs().max() <= allowed
