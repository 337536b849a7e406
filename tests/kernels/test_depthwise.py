"""The depthwise kernel against its twin: chunks shorter than the past and longer, short walks and long."""

from __future__ import annotations

import pytest
import torch

from hocket.kernels import depthwise
from hocket.kernels.depthwise import depthwise_torch, depthwise_triton
from tests.kernels.conftest import close
from tests.kernels.test_kernels import DTYPES, draw


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("active", [(False, False), (True, False), (False, True), (True, True)], ids=str)
@pytest.mark.parametrize(
    ("t", "b", "c", "dilation", "enough"),
    [(1, 3, 33, 1, 264), (20, 2, 96, 3, 264), (4, 1, 1, 9, 264), (70, 2, 17, 1, 1), (100, 1, 40, 3, 1)],
)
def test_depthwise(
    t: int,
    b: int,
    c: int,
    dilation: int,
    enough: int,
    active: tuple[bool, bool],
    dtype: torch.dtype,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(depthwise, "_ENOUGH", enough)
    slots = torch.tensor([3, 1, 4][:b], device=device)
    x = draw(t, b, c, device=device, dtype=dtype)
    past = draw(5, 6 * dilation, c, device=device, dtype=dtype, seed=1)
    taps, bias = draw(7, c, device=device, seed=2) / 7**0.5, draw(c, device=device, seed=3)
    before, after = (
        (draw(c, device=device, seed=s).exp(), draw(c, device=device, seed=s + 1).exp()) if on else None
        for s, on in zip((4, 6), active, strict=True)
    )
    pasts = past.clone(), past.clone(), past.float()
    rest = slots, taps, bias, dilation, before, after
    close(
        depthwise_triton(x, pasts[0], *rest),
        depthwise_torch(x, pasts[1], *rest),
        depthwise_torch(x.float(), pasts[2], *rest),
    )
    close(*pasts)
