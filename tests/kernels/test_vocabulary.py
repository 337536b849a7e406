from __future__ import annotations

import pytest
import torch

from hocket.kernels.draw import NUCLEUS, WIDE, DrawOptions, draw
from hocket.kernels.vocabulary import draw_any_torch, draw_any_triton


@pytest.mark.parametrize("noisy", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("v", [1, 33, 4096, 9000])
def test_draw_any(v: int, dtype: torch.dtype, noisy: bool, device: torch.device) -> None:
    g = torch.Generator().manual_seed(v)
    logits = (torch.randn(5, v, generator=g) * 3).to(device, dtype)
    temperature = torch.tensor([0.0, 0.7, 0.0, 1.0, 10.0], device=device) * noisy
    key = torch.randint(1 << 32, (5,), generator=g).to(device)
    got = draw_any_triton(logits, temperature, key, noisy)
    assert torch.equal(got, draw_any_torch(logits, temperature, key, noisy))
    o = DrawOptions(
        temperature, torch.zeros(5, dtype=torch.int32, device=device), torch.ones(5, device=device)
    )
    if dtype is torch.float32:  # without ties, sorting first finds the same
        assert torch.equal(got, draw(logits, o, key, WIDE | NUCLEUS))


def test_of_equal_logits_the_first_wins(device: torch.device) -> None:
    logits = torch.zeros(2, 9000, device=device)
    logits[0, 5000] = logits[0, 8999] = 1
    nothing = torch.zeros(2, device=device)
    for draw_any in (draw_any_torch, draw_any_triton):
        assert draw_any(logits, nothing, nothing.long(), False).tolist() == [5000, 0]
