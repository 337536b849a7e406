"""Stacks over short sequences in one kernel against the same kernel by kernel: on the device, else thread by
thread (tests/kernels/host.h)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hocket.kernels import choice, cuda
from hocket.kernels.flow import Geometry
from hocket.models.voxcpm.patches import Diffusion, Encoder, encode_patches, move
from hocket.models.voxcpm.stacks import Layer, Linear, Stack
from hocket.models.voxcpm.talker import drawn_whole, read_whole
from hocket.nn.transformer import BlockWeights, Shape
from tests.kernels.conftest import DEVICE
from tests.kernels.host import build

EPS = 1e-5


@pytest.fixture(autouse=True)
def _twins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "_WANTED", "torch")


def made(
    d: int, f: int, heads: int, kv_heads: int, head_dim: int, tokens: int, feat: int, out: int
) -> tuple[Linear, Stack, Linear, Tensor, Tensor]:
    """Two layers of random weights, the ways in and out, and tables; fp64."""
    g = torch.Generator().manual_seed(d)

    def normal(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=g) / shape[-1] ** 0.5).bfloat16().double()

    def norm() -> Tensor:
        return (torch.randn(d, generator=g) * 0.1 + 1).bfloat16().double()

    one = torch.ones(d).double()
    blocks = [
        Layer(
            BlockWeights(
                norm_in=one, qkv=normal((heads + 2 * kv_heads) * head_dim, d),
                out=normal(d, heads * head_dim), norm_mlp=None, gate_up=normal(2 * f, d), down=normal(d, f),
            )
        )
        for _ in range(2)
    ]  # fmt: skip
    angle = (torch.rand(tokens, head_dim // 2, generator=g) * 6).repeat(1, 2)
    stack = Stack(blocks, norm(), Shape(heads, kv_heads, head_dim, EPS))
    enter, leave = (Linear(normal(n, k), normal(1, n)[0]) for n, k in ((d, feat), (out, d)))
    return enter, stack, leave, angle.cos(), angle.sin()


def cast(value: Any, dtype: torch.dtype) -> Any:
    """All tensors under a dataclass or list, in dtype; tables stay fp32 at least."""
    if isinstance(value, Tensor):
        return value.to(DEVICE, dtype)
    if isinstance(value, list):
        return [cast(v, dtype) for v in value]
    names = getattr(value, "__dataclass_fields__", None)
    if names is None or isinstance(value, Shape):
        return value
    wide = torch.promote_types(dtype, torch.float32)
    return type(value)(*(cast(getattr(value, n), wide if n in ("cos", "sin") else dtype) for n in names))


def sizes(folder: Path, cluster: int, seed: int) -> dict[str, Any]:
    """Of a grid for tiny weights, run by whatever there is."""
    if DEVICE.type == "cuda":
        return {"grid": 32, "cluster": cluster}

    def make(g: Geometry, name: str) -> cuda.Launch:
        assert g.fits
        return build(folder, f"{name}.cu", g.defines, seed, "clusters.cuh")

    return {"grid": 8, "slot": 65536, "slots": 4, "cluster": cluster, "make": make}


@pytest.mark.parametrize(
    ("b", "sides", "calls", "cluster", "heads", "kv_heads", "head_dim", "f"),
    [
        (1, 2, 2, 2, 4, 2, 128, 512),
        (3, 2, 1, 2, 4, 2, 64, 1024),
        (2, 1, 2, 4, 4, 1, 64, 1024),
        (3, 1, 1, 4, 8, 2, 128, 1024),
    ],
    ids=["one", "narrow-heads", "unguided", "clusters-of-four"],
)
def test_patches_are_drawn_as_layer_by_layer(
    b: int, sides: int, calls: int, cluster: int, heads: int, kv_heads: int, head_dim: int, f: int,
    tmp_path: Path,
) -> None:  # fmt: skip
    """Rows of several chunks, sequences that leave warps idle, twice in a row. The error against fp64 is no
    larger than twice the twin's."""
    d, tokens, patch, feat = 256, 11, 4, 16
    enter, stack, leave, cos, sin = made(d, f, heads, kv_heads, head_dim, tokens, feat, feat)
    exact = Diffusion(enter, enter, stack, leave, torch.empty(0), torch.empty(0), cos, sin)
    w = cast(exact, torch.bfloat16)
    flow = drawn_whole(w, patch, **sizes(tmp_path, cluster, b)).whole
    assert flow is not None
    g = torch.Generator().manual_seed(b)
    for _ in range(2):
        head = torch.randn(sides, calls, b, tokens - patch, d, generator=g).to(DEVICE, torch.bfloat16)
        x = torch.randn(b, patch * feat, generator=g).to(DEVICE)
        guidance = torch.rand(b, generator=g).to(DEVICE) * 2
        length = torch.rand(calls, b, generator=g).to(DEVICE) / 2
        got, twin, wanted = x.clone(), x.clone(), x.double()
        flow(head, got, guidance, length)
        move(w, head, twin, guidance, length, None)
        move(cast(exact, torch.float64), head.double(), wanted, guidance.double(), length.double(), None)
        moved = (wanted - x).norm()
        error = (got - wanted).norm() / moved
        assert error <= 2 * (twin - wanted).norm() / moved  # not so if any is NaN
        assert error < 0.05


@pytest.mark.parametrize("b", [1, 7])
def test_patches_are_read_as_layer_by_layer(b: int, tmp_path: Path) -> None:
    d, patch, feat = 256, 4, 16
    enter, stack, leave, cos, sin = made(d, 512, 4, 2, 64, 1 + patch, feat, 320)
    special = torch.randn(d, generator=torch.Generator().manual_seed(b)).double()
    exact = Encoder(enter, special, stack, leave, cos, sin)
    w = cast(exact, torch.bfloat16)
    whole = read_whole(w, patch, streams=7, **sizes(tmp_path, 2, b))
    patches = torch.randn(b, patch, feat, generator=torch.Generator().manual_seed(b)).to(DEVICE).bfloat16()
    got, twin = encode_patches(whole, patches, None), encode_patches(w, patches, None)
    wanted = encode_patches(cast(exact, torch.float64), patches.double(), None)
    error, its = ((x.double() - wanted).norm() / wanted.norm() for x in (got, twin))
    assert got.dtype == twin.dtype
    assert error <= 2 * its
    assert error < 0.05
