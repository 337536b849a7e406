from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hocket.kernels.moe import experts_torch, experts_triton, route_torch, route_triton
from hocket.nn.moe import MoeWeights, in_float8
from tests.kernels.conftest import close

# Triton's interpreter multiplies bfloat16 matrices wrongly, so half precision is float16 there.
DTYPES = [torch.float32, torch.bfloat16 if torch.cuda.is_available() else torch.float16]


def draw(*shape: int, device: torch.device, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    g = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=g).to(device, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shared", [0, 1, 2])
@pytest.mark.parametrize(("m", "e", "top_k"), [(1, 8, 2), (5, 6, 6), (33, 12, 3), (64, 128, 8)])
def test_route(m: int, e: int, top_k: int, shared: int, dtype: torch.dtype, device: torch.device) -> None:
    x, norm = draw(m, 48, device=device, dtype=dtype), draw(48, device=device, dtype=dtype, seed=1)
    router = draw(e + (shared > 0), 48, device=device, dtype=dtype, seed=2) / 4
    y, weight, expert = route_triton(x, norm, 1e-6, router, top_k, shared)
    twin_y, twin_weight, twin_expert = route_torch(x, norm, 1e-6, router, top_k, shared)
    exact_y, exact, _ = route_torch(x.float(), norm.float(), 1e-6, router.float(), top_k, shared)
    close(weight, twin_weight, exact)
    close(y, twin_y, exact_y)
    if dtype is torch.float32:  # half precision may round two logits to one: then either is right
        assert torch.equal(expert, twin_expert)
    assert (expert.sort(1).values.diff(dim=1) > 0).all(), "nobody is chosen twice"


def test_equal_chances_go_to_the_first(device: torch.device) -> None:
    x, router = torch.ones(2, 16, device=device), torch.zeros(6, 16, device=device)
    _, weight, expert = route_triton(x, x[0], 1e-6, router, 4, 0)
    assert expert.tolist() == [[0, 1, 2, 3]] * 2
    torch.testing.assert_close(weight, torch.full_like(weight, 0.25))


def layer(m: int, e: int, k: int, d: int, f: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    g = torch.Generator().manual_seed(m + e)
    expert = torch.stack([torch.randperm(e, generator=g)[:k] for _ in range(m)]).int().to(device)
    return [
        draw(m, d, device=device, dtype=dtype),
        torch.rand(m, k, generator=g).to(device, dtype),
        expert,
        draw(e, 2 * f, d, device=device, dtype=dtype, seed=1) / d**0.5,
        draw(e, d, f, device=device, dtype=dtype, seed=2) / f**0.5,
        draw(m, d, device=device, dtype=dtype, seed=3),
    ]


CASES = [
    (1, 8, 2, 48, 24),  # fewer pairs than experts
    (3, 4, 2, 64, 32),  # pairs that share an expert, and more pairs than experts
    (4, 8, 2, 32, 16),  # as many pairs as experts
    (33, 6, 3, 136, 40),  # more rows an expert than a tile has, no whole tiles
    (70, 3, 3, 32, 72),  # every row visits every expert
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("m", "e", "k", "d", "f"), CASES)
def test_experts(m: int, e: int, k: int, d: int, f: int, dtype: torch.dtype, device: torch.device) -> None:
    x, weight, expert, gate_up, down, residual = arguments = layer(m, e, k, d, f, dtype, device)
    exact = experts_torch(*(a.float() if a.is_floating_point() else a for a in arguments))
    got = experts_triton(x, weight, expert, gate_up, down, residual.clone())
    close(got, experts_torch(*arguments), exact)


@pytest.mark.parametrize(("m", "e", "k", "d", "f"), CASES[:4])
def test_experts_in_float8(m: int, e: int, k: int, d: int, f: int, device: torch.device) -> None:
    x, weight, expert, gate_up, down, residual = layer(m, e, k, d, f, torch.float32, device)
    small = in_float8(MoeWeights(x, gate_up, down, k, 0))
    rest = (small.gate_up, small.down, residual, small.gate_up_scale, small.down_scale)
    twin = experts_torch(x, weight, expert, *rest)
    torch.testing.assert_close(experts_triton(x, weight, expert, *rest), twin, rtol=2e-5, atol=2e-5)
    exact = experts_torch(x, weight, expert, gate_up, down, residual)
    wrong = (twin - exact).square().mean() / (exact - residual).square().mean()
    assert 1e-6 < wrong < 0.08**2, "three bits of mantissa: about 3 % of each weight, three times"


@pytest.mark.parametrize("tile", [(16, 32, 16, 4, 2), (64, 128, 64, 4, 3), (128, 64, 32, 8, 3)])
def test_experts_whatever_the_tile(
    tile: tuple[int, ...], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = layer(70, 3, 3, 32, 72, torch.float32, device)
    usual = experts_triton(*arguments)
    monkeypatch.setattr("hocket.kernels.moe.tile", lambda *_, gated: tile)
    torch.testing.assert_close(experts_triton(*arguments), usual, rtol=1e-6, atol=1e-6)


def test_a_rows_mates_do_not_change_it(device: torch.device) -> None:
    x, weight, expert, gate_up, down, residual = layer(40, 6, 3, 64, 32, torch.float32, device)
    whole = experts_triton(x, weight, expert, gate_up, down, residual)
    for i in (0, 17, 39):
        one = slice(i, i + 1)
        alone = experts_triton(x[one], weight[one], expert[one], gate_up, down, residual[one])
        torch.testing.assert_close(alone, whole[one], rtol=1e-6, atol=1e-6)
