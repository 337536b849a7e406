from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hocket.core import TILE
from hocket.kernels.prefill import paged_prefill_torch, paged_prefill_triton
from tests.kernels.conftest import close

DTYPES = [torch.float32, torch.bfloat16 if torch.cuda.is_available() else torch.float16]
BLOCK_TOKENS = 4


def draw(*shape: int, device: torch.device, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    g = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=g).to(device, dtype)


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "d", "counts", "positions"),
    [
        (4, 2, 16, [1], [0]),
        (4, 4, 16, [5, 3], [0, 70]),
        (8, 1, 32, [33, 7], [2, 61]),
        (6, 2, 16, [90, 17, 64], [0, 9, 0]),
        (16, 1, 16, [40], [30]),
    ],
)
def test_paged_prefill(
    heads: int, kv_heads: int, d: int, counts: list[int], positions: list[int],
    dtype: torch.dtype, normed: bool, device: torch.device,
) -> None:  # fmt: skip
    """Rows of every length, from every position, over blocks in no order; padding does nothing."""
    n, padding = 30, 3
    m = sum(counts) + padding
    owner = torch.cat([torch.full((c,), 2 * i + 1) for i, c in enumerate(counts)])
    slot = torch.cat([owner, torch.zeros(padding)]).int().to(device)
    place = torch.cat([torch.arange(p, p + c) for p, c in zip(positions, counts, strict=True)])
    position = torch.cat([place, torch.zeros(padding)]).int().to(device)
    tiles, first = [], 0
    for count in counts:
        tiles += [(first + at, min(TILE, count - at)) for at in range(0, count, TILE)]
        first += count
    tile = torch.tensor([*tiles, (0, 0), (0, 0)], dtype=torch.int32, device=device)

    qkv = draw(m, (heads + 2 * kv_heads) * d, device=device, dtype=dtype)
    norms = [draw(d, device=device, dtype=dtype, seed=i) if normed else None for i in (1, 2)]
    angle = draw(m, 1, d, device=device, seed=3)
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    g = torch.Generator().manual_seed(4)
    slots = 2 * len(counts)
    table = (torch.randperm(slots * n, generator=g).view(slots, n) + 1).int()
    blocks = torch.cat([torch.zeros(1, n).int(), table]).to(device)
    kv = draw(2, slots * n + 1, BLOCK_TOKENS, kv_heads, d, device=device, dtype=dtype, seed=5)
    at = (slot.long(), (position // BLOCK_TOKENS).long())
    index = blocks[at].long() * BLOCK_TOKENS + position % BLOCK_TOKENS

    def run(call: object, kind: torch.dtype) -> tuple[Tensor, Tensor]:
        assert callable(call)
        own = kv.to(kind, copy=True)
        wide = [None if t is None else t.to(kind) for t in (qkv, *norms)]
        out = call(
            *wide, 1e-6, cos.to(kind), sin.to(kind), own, blocks, slot, position, tile, index
        )  # fmt: skip
        return out, own

    made, cache = run(paged_prefill_triton, dtype)
    twin, twin_cache = run(paged_prefill_torch, dtype)
    exact, _ = run(paged_prefill_torch, torch.float32)
    valid = slice(0, m - padding)
    close(made[valid], twin[valid], exact[valid])
    assert made.isfinite().all()
    close(cache[:, 1:], twin_cache[:, 1:], twin_cache[:, 1:].float())
