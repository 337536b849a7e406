from __future__ import annotations

import pytest
import torch
from torch import Tensor

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
        (4, 4, 16, [5, 0, 3], [0, 0, 70]),
        (8, 1, 32, [33, 7], [2, 61]),
        (6, 2, 16, [90, 17, 64], [0, 9, 0]),
    ],
)
def test_paged_prefill(
    heads: int, kv_heads: int, d: int, counts: list[int], positions: list[int],
    dtype: torch.dtype, normed: bool, device: torch.device,
) -> None:  # fmt: skip
    """Rows of every length, from every position, over blocks in no order; what is not valid does nothing."""
    b, n, m = len(counts), max(counts) + 2, 30
    qkv = draw(b, n, (heads + 2 * kv_heads) * d, device=device, dtype=dtype)
    norms = [draw(d, device=device, dtype=dtype, seed=i) if normed else None for i in (1, 2)]
    angle = draw(b, n, 1, d, device=device, seed=3)
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    g = torch.Generator().manual_seed(4)
    table = (torch.randperm(b * m, generator=g).view(b, m) + 1).int().to(device)
    kv = draw(2, b * m + 1, BLOCK_TOKENS, kv_heads, d, device=device, dtype=dtype, seed=5)
    position = torch.tensor(positions, dtype=torch.int32, device=device)
    count = torch.tensor(counts, device=device)
    step = torch.arange(n, device=device)
    valid = step < count[:, None]
    place = torch.where(valid, position[:, None] + step, 0)
    index = table.gather(1, place // BLOCK_TOKENS).long() * BLOCK_TOKENS + place % BLOCK_TOKENS
    index = torch.where(valid, index, 0)

    def run(call: object, kind: torch.dtype) -> tuple[Tensor, Tensor]:
        assert callable(call)
        own = kv.to(kind, copy=True)
        wide = [None if t is None else t.to(kind) for t in (qkv, *norms)]
        out = call(*wide, 1e-6, cos.to(kind), sin.to(kind), own, table, position, count, index)
        return out, own

    made, cache = run(paged_prefill_triton, dtype)
    twin, twin_cache = run(paged_prefill_torch, dtype)
    exact, _ = run(paged_prefill_torch, torch.float32)
    close(made[valid], twin[valid], exact[valid])
    assert made.isfinite().all()
    close(cache[:, 1:], twin_cache[:, 1:], twin_cache[:, 1:].float())
