"""Rows that are set from one launch, against tensor by tensor."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from hocket.kernels.rows import (
    RowTable,
    fill_rows_torch,
    fill_rows_triton,
    give_rows_torch,
    give_rows_triton,
    put_rows_torch,
    put_rows_triton,
    take_row_torch,
    take_row_triton,
)

HALF = torch.bfloat16
KINDS = [
    (torch.bool, ()), (torch.bool, (33,)), (torch.int32, ()), (torch.int32, (9001,)), (torch.int64, (3,)),
    (torch.float32, (2,)), (torch.float32, (5,)), (HALF, ()), (HALF, (7, 3)), (HALF, (64, 2)),
]  # fmt: skip


def tensors(device: torch.device) -> list[Tensor]:
    g = torch.Generator().manual_seed(1)
    return [
        torch.randint(0, 2 if dtype is torch.bool else 100, (7, *shape), generator=g).to(device, dtype)
        for dtype, shape in KINDS
    ]


@pytest.mark.parametrize("slots", [[3], [6, 1, 4]])
def test_fill_rows(slots: list[int], device: torch.device) -> None:
    at = torch.tensor(slots, device=device)
    kept, made, twin = tensors(device), tensors(device), tensors(device)
    fills = [float(i % 3 - 1) if t.dtype is not torch.bool else i % 2 for i, t in enumerate(made)]
    fill_rows_triton(RowTable(made, fills), at)
    fill_rows_torch(RowTable(twin, fills), at)
    others = [slot for slot in range(7) if slot not in slots]
    for a, b, before, fill in zip(made, twin, kept, fills, strict=True):
        assert a.equal(b)
        assert a[others].equal(before[others])
        assert (a[slots] == fill).all()


@pytest.mark.parametrize("slots", [[3], [6, 1, 4]])
def test_put_rows(slots: list[int], device: torch.device) -> None:
    """Values of every dtype, of whole rows and of their beginnings, and none at all."""
    rng, k = np.random.default_rng(2), len(slots)
    kept, made, twin = tensors(device), tensors(device), tensors(device)
    lengths = [1, 33, 1, 1500, 2, 0, 5, 1, 4, 128]
    values = [rng.integers(0, 2, (k, n)) for n in lengths]
    put_rows_triton(slots, list(zip(made, values, strict=True)))
    put_rows_torch(slots, list(zip(twin, values, strict=True)))
    others = [slot for slot in range(7) if slot not in slots]
    for a, b, before, given, n in zip(made, twin, kept, values, lengths, strict=True):
        assert a.equal(b)
        assert a[others].equal(before[others])
        assert a[slots].reshape(k, -1)[:, :n].equal(torch.from_numpy(given).to(a))
        assert a[slots].reshape(k, -1)[:, n:].equal(before[slots].reshape(k, -1)[:, n:])


def test_rows_taken_are_given_back_to_any_slot(device: torch.device) -> None:
    kept, made, twin = tensors(device), tensors(device), tensors(device)
    rows = {
        call: [call(RowTable(kept, [0] * len(kept)), slot) for slot in (5, 2)]
        for call in (take_row_torch, take_row_triton)
    }
    for a, b in zip(*rows.values(), strict=True):
        assert a.equal(b)
    give_rows_triton(RowTable(made, [0] * len(kept)), [1, 6], rows[take_row_triton])
    give_rows_torch(RowTable(twin, [0] * len(kept)), [1, 6], rows[take_row_torch])
    for a, b, before in zip(made, twin, kept, strict=True):
        assert a.equal(b)
        assert a[[1, 6]].equal(before[[5, 2]])
        assert a[[0, 2, 3, 4, 5]].equal(before[[0, 2, 3, 4, 5]])
