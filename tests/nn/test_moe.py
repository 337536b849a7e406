"""Mixtures of experts as published checkpoints have them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hocket.nn.checkpoint import Reader
from hocket.nn.moe import moe, read_experts
from hocket.nn.parallel import Shard


def published(e: int, d: int, f: int, shared: int, seed: int = 0) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g) / shape[-1] ** 0.5

    tensors = {"mlp.gate.weight": draw(e, d)}
    for i in range(e):
        tensors |= expert(f"mlp.experts.{i}", draw, d, f)
    if shared:
        tensors |= expert("mlp.shared_expert", draw, d, shared)
        tensors["mlp.shared_expert_gate.weight"] = draw(1, d)
    return tensors


def expert(name: str, draw: object, d: int, f: int) -> dict[str, Tensor]:
    assert callable(draw)
    return {
        f"{name}.gate_proj.weight": draw(f, d),
        f"{name}.up_proj.weight": draw(f, d),
        f"{name}.down_proj.weight": draw(d, f),
    }


def plainly(t: dict[str, Tensor], x: Tensor, e: int, top_k: int) -> Tensor:
    """The published rule, one row and one expert after the other."""

    def run(name: str, row: Tensor) -> Tensor:
        inner = F.silu(t[f"{name}.gate_proj.weight"] @ row) * (t[f"{name}.up_proj.weight"] @ row)
        return t[f"{name}.down_proj.weight"] @ inner

    out = []
    for row in x:
        chance = torch.softmax(t["mlp.gate.weight"] @ row, 0)
        best = chance.argsort(descending=True)[:top_k]
        y = sum(chance[i] / chance[best].sum() * run(f"mlp.experts.{i}", row) for i in best.tolist())
        if "mlp.shared_expert_gate.weight" in t:
            y = y + torch.sigmoid(t["mlp.shared_expert_gate.weight"][0] @ row) * run("mlp.shared_expert", row)
        out.append(y)
    return torch.stack(out)  # type: ignore[arg-type]


@pytest.mark.parametrize("shared", [0, 16, 32, 40], ids=["none", "as-wide", "twice", "not-whole"])
@pytest.mark.parametrize("rows", [1, 2, 9])
def test_a_mixture_is_the_weighted_sum_of_its_experts(rows: int, shared: int) -> None:
    e, d, f, top_k = 6, 32, 16, 3
    tensors = published(e, d, f, shared)
    w = read_experts(Reader(tensors, "mlp.", torch.float32), e, top_k)
    x = torch.randn(rows, d, generator=torch.Generator().manual_seed(1))
    norm = torch.ones(d)
    normal = x * torch.rsqrt(x.square().mean(1, keepdim=True))
    torch.testing.assert_close(moe(w, x.clone(), norm, 0.0), x + plainly(tensors, normal, e, top_k))


@pytest.mark.parametrize("shared", [0, 40])
def test_parts_add_up_to_the_whole(shared: int) -> None:
    e, d, f, top_k = 6, 32, 16, 3
    r = Reader(published(e, d, f, shared), "mlp.", torch.float32)
    x, norm = torch.randn(5, d, generator=torch.Generator().manual_seed(1)), torch.ones(d)
    whole = moe(read_experts(r, e, top_k), x, norm, 0.0)
    parts = [read_experts(r, e, top_k, Shard(i, 2)) for i in range(2)]
    apart = [replace(Shard(i, 2), size=1) for i in range(2)]  # nothing is exchanged
    made = [moe(w, x, norm, 0.0, s) for w, s in zip(parts, apart, strict=True)]
    torch.testing.assert_close(made[0] + made[1], whole)
    assert parts[0].gate_up.shape[1] == f  # gate and up rows of half the channels


def test_experts_can_be_planned_without_content() -> None:
    tensors = {name: tensor.to("meta") for name, tensor in published(4, 32, 16, 40).items()}
    w = read_experts(Reader(tensors, "mlp.", torch.bfloat16), 4, 2)
    assert w.gate_up.shape == (4 + 3, 32, 32)
    assert w.down.shape == (4 + 3, 32, 16)
    assert w.router.shape == (5, 32)
