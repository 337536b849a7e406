"""A language model's layers in one kernel against the layers one by one: on the device, else thread by thread
(tests/kernels/host.h)."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hocket.kernels import choice, cuda
from hocket.kernels.attention import paged_decode_torch
from hocket.kernels.language import Geometry, Language
from hocket.models.voxcpm.stacks import Layer
from hocket.nn.transformer import BlockWeights, Shape
from tests.kernels.conftest import DEVICE
from tests.kernels.host import build

EPS = 1e-5


@pytest.fixture(autouse=True)
def _twins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "_WANTED", "torch")


@pytest.mark.parametrize(
    ("b", "heads", "kv_heads", "head_dim", "cluster"),
    [(1, 8, 2, 64, 2), (13, 4, 1, 128, 2), (16, 8, 8, 64, 2)],
    ids=["one", "one-key-head", "no-groups"],
)
def test_layers_in_one_kernel(
    b: int, heads: int, kv_heads: int, head_dim: int, cluster: int, tmp_path: Path
) -> None:
    """Rows of every length over blocks in no order; what lies beyond a row's past is NaN. Twice in a row. The
    error against fp64 is no larger than twice the twin's."""
    d, f, layers, block_tokens, per_row = 128, 1024, 2, 4, 40
    g = torch.Generator().manual_seed(b)

    def normal(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=g) / shape[-1] ** 0.5).to(DEVICE).bfloat16()

    one = torch.ones(d, device=DEVICE).bfloat16()
    blocks = [
        BlockWeights(
            norm_in=one + normal(d), qkv=normal((heads + 2 * kv_heads) * head_dim, d),
            out=normal(d, heads * head_dim), norm_mlp=None, gate_up=normal(2 * f, d), down=normal(d, f),
        )
        for _ in range(layers)
    ]  # fmt: skip
    position = torch.tensor([7 * i * i % 150 for i in range(b)], dtype=torch.int32, device=DEVICE)
    slots = (torch.randperm(b, generator=g) + 1).to(DEVICE)
    table = torch.randperm((b + 1) * per_row, generator=g).int().view(b + 1, per_row).to(DEVICE)
    shape = (layers, 2, (b + 1) * per_row, block_tokens, kv_heads, head_dim)
    kv = torch.full(shape, float("nan"), device=DEVICE).bfloat16()
    for row, past in zip(slots.tolist(), position.tolist(), strict=True):
        at = torch.arange(past, device=DEVICE)
        place = table[row, at // block_tokens].long() * block_tokens + at % block_tokens
        kv.flatten(2, 3)[:, :, place] = torch.randn(layers, 2, past, kv_heads, head_dim, generator=g).to(kv)
    at = position.long()
    block = table[slots].gather(1, (at // block_tokens)[:, None])[:, 0].long()
    index = block * block_tokens + at % block_tokens
    angle = (torch.rand(b, head_dim // 2, generator=g) * 6).repeat(1, 2).to(DEVICE)
    x, cos, sin = normal(b, d) * 8, angle.cos(), angle.sin()

    def twin(type: torch.dtype) -> tuple[Tensor, Tensor]:
        store, h = kv.to(type, copy=True).nan_to_num(), x.to(type, copy=True)
        wide = torch.promote_types(type, torch.float32)
        for weights, cache in zip(blocks, store, strict=True):
            parts: list[Any] = [getattr(weights, field.name) for field in fields(weights)]
            w = BlockWeights(*(None if x is None else x.to(type) for x in parts))  # type: ignore[arg-type]

            def attend(qkv: Tensor, cache: Tensor = cache) -> Tensor:
                tables = cos.to(wide), sin.to(wide)
                return paged_decode_torch(
                    qkv, None, None, EPS, *tables, cache, table, slots, position, index
                )  # fmt: skip

            h = Layer(w)(Shape(heads, kv_heads, head_dim, EPS), h, attend, None)
        return h, store

    sizes: dict[str, Any] = {}
    if DEVICE.type == "cpu":

        def make(g: Geometry, name: str) -> cuda.Launch:
            return build(tmp_path, f"{name}.cu", g.defines, b, "clusters.cuh")

        sizes = {"grid": 8, "slot": 65536, "slots": 3, "make": make}
    else:
        sizes = {"grid": 16}
    language = Language(blocks, heads, kv_heads, EPS, cluster=cluster, **sizes)
    assert language.geometry.fits
    for _ in range(2):
        store, h = kv.clone(), x.clone()
        language(h, cos, sin, store, table, slots, position, index)
        got = h, store.nan_to_num()
        for mine, its, exact in zip(got, twin(torch.bfloat16), twin(torch.float64), strict=True):
            allowed = 2 * (its.double() - exact).norm() + 1e-6 * exact.norm()
            assert (mine.double() - exact).norm() <= allowed
