from __future__ import annotations

from dataclasses import fields

import pytest
import torch

from hocket.kernels.token import begin_token_torch, begin_token_triton, end_token_torch, end_token_triton
from tests.kernels.conftest import close

SLOTS = torch.tensor([3, 1, 0, 4, 0])  # padding twice, at the end and between


def state(device: torch.device) -> dict[str, torch.Tensor]:
    """Slots: padding, live, finished, at its limit, about to draw an id that ends it."""
    rows = {
        "token": torch.tensor([0, 7, 3, 300, 5], dtype=torch.int32),
        "live": torch.tensor([False, True, False, True, True]),
        "made": torch.tensor([0, 0, 4, 9, 70000], dtype=torch.int32),
        "position": torch.tensor([0, 17, 3, 40, 5], dtype=torch.int32),
    }
    return {name: row.to(device) for name, row in rows.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("d", [33, 64])
def test_begin_token(d: int, dtype: torch.dtype, device: torch.device) -> None:
    s = state(device)
    g = torch.Generator().manual_seed(d)
    embed = torch.randn(301, d, generator=g).to(device, dtype)
    rest = (
        torch.tensor([0, 0.5, 0, -18, 1e4], device=device),
        torch.randint(20, (5, 12), generator=g).int().to(device),
        torch.randint(-(1 << 62), 1 << 62, (5,), generator=g).to(device),
        embed,
        SLOTS.to(device),
        torch.rand(8, generator=g).to(device),
        4,
    )
    got, twin = (call(*s.values(), *rest) for call in (begin_token_triton, begin_token_torch))
    for f in fields(got):
        one, two = getattr(got, f.name), getattr(twin, f.name)
        if f.name in ("cos", "sin"):
            close(one, two, two.float())
        else:
            assert torch.equal(one, two), f.name


def test_end_token(device: torch.device) -> None:
    made = []
    for begin, end in ((begin_token_triton, end_token_triton), (begin_token_torch, end_token_torch)):
        s = state(device)
        i = begin(
            *s.values(),
            torch.zeros(5, device=device),
            torch.zeros(5, 12, dtype=torch.int32, device=device),
            torch.zeros(5, dtype=torch.int64, device=device),
            torch.zeros(301, 16, device=device),
            SLOTS.to(device),
            torch.ones(8, device=device),
            4,
        )
        stops = torch.full((5, 3), -1, dtype=torch.int32, device=device)
        stops[4, 1] = 99
        stops[1, 0] = 98
        limit = torch.tensor([0, 100, 100, 10, 100000], dtype=torch.int32, device=device)
        drawn = torch.tensor([200, 99, 1, 99, 2], device=device)
        out = end(drawn, i, stops, limit, *s.values(), SLOTS.to(device))
        made.append([t.tolist() for t in (*out, *s.values())])
    assert made[0] == made[1]
    tokens, emit, stop, token, live, count, position = made[0]
    assert tokens == [[200], [99], [1], [99], [2]]
    assert emit == [True, True, False, False, False]
    assert stop == [True, False, False, True, False]
    assert token == [0, 99, 3, 200, 99]
    assert live == [False, True, False, False, False]
    assert count == [0, 1, 4, 10, 70001]
    assert position == [0, 18, 3, 41, 6]
