"""Kernels that stay against their twins: on the device, else thread by thread (tests/kernels/host.h)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from hocket.kernels import choice, cuda
from hocket.kernels.draw import NUCLEUS, WIDE, DrawOptions
from hocket.kernels.resident import SHARED, Geometry, Maker, Predictor, obstacle
from hocket.models.qwen3_tts.config import read_model_config
from hocket.models.qwen3_tts.talker import TalkerProgram
from hocket.models.qwen3_tts.weights import load_talker
from hocket.nn import talker
from hocket.nn.rotary import rotary_tables
from hocket.nn.talker import FrameTalker
from hocket.nn.transformer import LayerWeights, Shape
from tests.kernels.conftest import DEVICE
from tests.kernels.host import build

SLOTS, EPS = 9, 1e-6
SMALL = {"grid": 6, "slot": 65536, "slots": 3} if DEVICE.type == "cpu" else {}


@pytest.fixture(autouse=True)
def _twins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "_WANTED", "torch")


@pytest.fixture(scope="session")
def make(tmp_path_factory: pytest.TempPathFactory) -> Maker | None:
    """Compile a kernel for the CPU, once a geometry; None where there is a device."""
    if DEVICE.type != "cpu":
        return None
    made: dict[tuple[Geometry, str], cuda.Launch] = {}

    def maker(g: Geometry, name: str) -> cuda.Launch:
        if (g, name) not in made:
            made[g, name] = build(tmp_path_factory.mktemp("kernel"), name, g.defines, seed=len(made))
        return made[g, name]

    return maker


@pytest.mark.parametrize("size", ["tiny", "tiny-0.6b"])
@pytest.mark.parametrize("b", [1, 9])
def test_predictor_draws_what_its_passes_draw(
    b: int, size: str, checkpoint: Callable[..., Path], make: Maker | None
) -> None:
    """fp32; greedy and warm rows, every limit; more rows than the matrix unit's sixteen in the first pass."""
    folder = checkpoint(size=size)
    config = read_model_config(folder)
    program = TalkerProgram(config, load_talker(folder, config, DEVICE, torch.float32))
    w = program.w
    sizes = SMALL | ({"grid": 16} if SMALL else {})  # a head of 2,048 rows for so few programs
    predictor = Predictor(
        w.inner_layers, w.inner_norm, w.inner_heads, w.inner_embed, program.inner_cos, program.inner_sin,
        program.inner.kv_heads, program.inner.eps, make, **sizes,
    )  # fmt: skip
    g = torch.Generator().manual_seed(b)
    x = torch.randn(b, 2, predictor.geometry.d, generator=g).to(DEVICE)
    slots = torch.randint(SLOTS, (b,), generator=g).to(DEVICE)
    key = torch.randint(1 << 32, (b, 16), generator=g).to(DEVICE)
    k = torch.tensor([50, 5, 1, 0, 50, 2, 2048, 20, 50], dtype=torch.int32)
    heat = torch.rand(SLOTS, 2, generator=g) + 0.5
    heat[::3] = 0
    options = (heat, torch.stack([k, k.flip(0)], dim=1), torch.ones(SLOTS, 2))
    o = DrawOptions(*(t.to(DEVICE)[:, 1] for t in options))
    codes = torch.full((2, b, 16), -1, device=DEVICE)
    logits = torch.full((b, 15, 2048), float("nan"), device=DEVICE)
    predictor(x.clone(), o, slots, key, codes[0], logits)
    program._predict_by_layers(x, o, slots, key, WIDE, codes[1])
    assert not logits.isnan().any()
    assert torch.equal(*codes)


@pytest.mark.parametrize(
    ("b", "cluster"),
    [(1, 8), (17, 8), (40, 8), (9, 4)],
    ids=["one", "several-tiles", "rows-in-parts", "of-four"],
)
def test_clusters_draw_what_passes_draw(b: int, cluster: int, make: Maker | None) -> None:
    """fp32, greedy and warm rows, features that groups of programs share unevenly; thread by thread, programs
    get as far ahead of each other as they may."""
    d, f, heads, kv_heads, head_dim, layers, vocab = 128, 128, 4, 2, 16, 2, 512
    g = torch.Generator().manual_seed(b)

    def normal(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=g) / shape[-1] ** 0.5).to(DEVICE)

    blocks = [
        LayerWeights(
            norm_in=normal(d), qkv=normal((heads + 2 * kv_heads) * head_dim, d), q_norm=normal(head_dim),
            k_norm=normal(head_dim), out=normal(d, heads * head_dim), norm_mlp=normal(d),
            gate_up=normal(2 * f, d), down=normal(d, f),
        )
        for _ in range(layers)
    ]  # fmt: skip
    w = SimpleNamespace(
        inner_layers=blocks, inner_norm=normal(d) + 1, inner_heads=normal(15, vocab, d) * 3,
        inner_embed=normal(15, vocab, d) * 11,
    )  # fmt: skip
    position = torch.arange(16, device=DEVICE)
    cos, sin = (t.squeeze(1) for t in rotary_tables(head_dim, 1e6, position))
    shape = Shape(heads, kv_heads, head_dim, EPS)
    twin: Any = SimpleNamespace(w=w, inner=shape, books=16, inner_cos=cos, inner_sin=sin)
    predictor = Predictor(
        blocks, w.inner_norm, w.inner_heads, w.inner_embed, cos, sin, kv_heads, EPS, make,
        grid=24 if cluster == 8 else 20, slot=16384, slots=4, cluster=cluster,
    )  # fmt: skip
    heat = torch.tensor([0.0, 0.9] * SLOTS, device=DEVICE)
    o = DrawOptions(heat, torch.full_like(heat, 50).int(), torch.ones_like(heat))
    x = torch.randn(b, 2, d, generator=g).to(DEVICE)
    slots = torch.randint(2 * SLOTS, (b,), generator=g).to(DEVICE)
    key = torch.randint(1 << 32, (b, 16), generator=g).to(DEVICE)
    codes = torch.full((2, b, 16), -1, device=DEVICE)
    predictor(x.clone(), o, slots, key, codes[0])
    FrameTalker._predict_by_layers(twin, x, o, slots, key, 0, codes[1])
    assert torch.equal(*codes)


def test_a_compiler_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    cuda._nvrtc.cache_clear()
    with pytest.raises(cuda.Unavailable, match="without CUDA"):
        cuda.compile_cubin("", {}, (9, 0))


@pytest.mark.parametrize("grid", [96, 112, 120, 128])
def test_the_ring_takes_what_shared_memory_is_left(grid: int) -> None:
    """A predictor of the published size in as many clusters of eight as may fit on a GPU."""
    g = Geometry(
        d=1024, f=3072, heads=16, kv_heads=8, head_dim=128, layers=5, vocab=2048, tokens=16, half=True,
        grid=grid, cluster=8,
    )  # fmt: skip
    assert SHARED - g.roomy().slot < g.roomy().shared_bytes <= SHARED
    with pytest.raises(cuda.Unavailable, match="ring"):
        replace(g, half=False, f=4096).roomy()


@pytest.mark.parametrize("clusters", [True, False], ids=["clusters", "none-fit"])
@pytest.mark.parametrize(
    ("rows", "variant", "taken", "without"),
    [
        (2, 0, "one kernel", "one kernel"), (3, WIDE, "clusters", "one kernel"),
        (16, 0, "clusters", "one kernel"), (17, 0, "clusters", "layers"), (64, 0, "clusters", "layers"),
        (65, 0, "layers", "layers"), (1, NUCLEUS, "layers", "layers"), (17, NUCLEUS, "layers", "layers"),
    ],
)  # fmt: skip
def test_a_talker_chooses_by_rows(
    rows: int, variant: int, taken: str, without: str, clusters: bool, checkpoint: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """More rows, and draws by top-p, go layer by layer."""
    folder = checkpoint(size="tiny")
    config = read_model_config(folder)
    program = TalkerProgram(config, load_talker(folder, config, DEVICE, torch.float32))
    took: list[str] = []
    monkeypatch.setattr(talker, "WHOLE", 16)
    monkeypatch.setattr(talker, "CLUSTERED", range(3, 65))
    monkeypatch.setattr(program, "whole", lambda *_: took.append("one kernel"))
    if clusters:
        monkeypatch.setattr(program, "clustered", lambda *_: took.append("clusters"))
    monkeypatch.setattr(program, "_predict_by_layers", lambda *_: took.append("layers"))
    h = torch.zeros(rows, program.width, device=DEVICE)
    x = torch.zeros(rows, program.w.inner_norm.shape[0], device=DEVICE)
    nothing: Any = None
    program._predict(h, x, nothing, nothing, nothing, variant, nothing)
    assert took == [taken if clusters else without]


def test_on_a_cpu_no_kernel_stays(checkpoint: Callable[..., Path]) -> None:
    folder = checkpoint(size="tiny")
    config = read_model_config(folder)
    program = TalkerProgram(config, load_talker(folder, config, torch.device("cpu"), torch.float32))
    assert program.whole is None
    assert program.clustered is None
    assert "GPU" in str(obstacle(program.w.head))
