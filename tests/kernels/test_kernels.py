from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hocket.kernels import linear
from hocket.kernels.attention import (
    paged_decode_torch,
    paged_decode_triton,
    scratch_decode_torch,
    scratch_decode_triton,
    whole_attention_torch,
    whole_attention_triton,
)
from hocket.kernels.conv import carry_torch, carry_triton, conv_torch, conv_triton
from hocket.kernels.draw import (
    NUCLEUS,
    DrawOptions,
    Repetition,
    draw_code_torch,
    draw_code_triton,
    frame_normal_torch,
    frame_normal_triton,
)
from hocket.kernels.flow import guided_step_torch, guided_step_triton
from hocket.kernels.frame import begin_frame_torch, begin_frame_triton, end_frame_torch, end_frame_triton
from hocket.kernels.linear import (
    linear_add_torch,
    linear_add_triton,
    norm_gated_torch,
    norm_gated_triton,
    norm_linear_torch,
    norm_linear_triton,
    silu_mul_torch,
    silu_mul_triton,
)
from hocket.kernels.norm import rms_norm_torch, rms_norm_triton
from hocket.kernels.snake import snake_torch, snake_triton
from tests.kernels.conftest import close

# Triton's interpreter multiplies bfloat16 matrices wrongly, so half precision is float16 there.
DTYPES = [torch.float32, torch.bfloat16 if torch.cuda.is_available() else torch.float16]


def draw(*shape: int, device: torch.device, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    g = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=g).to(device, dtype)


def wide(*tensors: Tensor) -> list[Tensor]:
    return [t.float() if t.is_floating_point() else t for t in tensors]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("m", "d"), [(1, 1), (3, 33), (2, 63), (1, 1025)])
def test_rms_norm(m: int, d: int, dtype: torch.dtype, device: torch.device) -> None:
    x, w = draw(m, d, device=device, dtype=dtype), draw(d, device=device, dtype=dtype, seed=1)
    got = rms_norm_triton(x, w, 1e-6)
    close(got, rms_norm_torch(x, w, 1e-6), rms_norm_torch(*wide(x, w), 1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("m", "k", "n"), [(1, 48, 17), (2, 63, 33), (2, 1025, 16), (3, 128, 64)])
def test_linear(m: int, k: int, n: int, dtype: torch.dtype, device: torch.device) -> None:
    x, norm = draw(m, k, device=device, dtype=dtype), draw(k, device=device, dtype=dtype, seed=1)
    w = draw(n, k, device=device, dtype=dtype, seed=2) / k**0.5
    residual = draw(m, n, device=device, dtype=dtype, seed=3)
    gates = draw(2 * n, k, device=device, dtype=dtype, seed=4) / k**0.5
    for kernel, twin, arguments in (
        (norm_linear_triton, norm_linear_torch, (x, norm, w, 1e-6)),
        (norm_gated_triton, norm_gated_torch, (x, norm, gates, 1e-6)),
        (norm_gated_triton, norm_gated_torch, (x, None, gates, 1e-6)),
        (linear_add_triton, linear_add_torch, (x, w, residual.clone())),
        (silu_mul_triton, silu_mul_torch, (draw(m, 2 * n, device=device, dtype=dtype),)),
    ):
        full = [a.float() if isinstance(a, Tensor) else a for a in arguments]
        wanted = twin(*arguments), twin(*full)
        close(kernel(*arguments), *wanted)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cut", [(1, 64, 4, 2), (4, 16, 1, 2)], ids=["whole", "split"])
@pytest.mark.parametrize("normed", [True, False], ids=["normed", "plain"])
def test_paged_decode(
    normed: bool,
    cut: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows of every length, padding rows among them, over blocks in no order."""
    monkeypatch.setattr("hocket.kernels.attention.plan", lambda pairs: cut)
    heads, kv_heads, d, block_tokens = 4, 2, 32, 4
    positions = torch.tensor([0, 1, 62, 63, 64, 0, 0], dtype=torch.int32, device=device)
    b = len(positions)
    slots = torch.tensor([3, 1, 2, 5, 4, 0, 0], device=device)
    g = torch.Generator().manual_seed(0)
    blocks = (torch.randperm(8 * 20, generator=g).int() + 1).reshape(8, 20).to(device)
    blocks[0] = 0
    kv = draw(2, 8 * 20 + 1, block_tokens, kv_heads, d, device=device, dtype=dtype)
    qkv = draw(b, (heads + 2 * kv_heads) * d, device=device, dtype=dtype, seed=1)
    q_norm, k_norm = (draw(d, device=device, dtype=dtype, seed=s) for s in (2, 3))
    cos, sin = (draw(b, d, device=device, dtype=dtype, seed=s) for s in (4, 5))
    at = positions.long()
    block = blocks[slots].gather(1, (at // block_tokens)[:, None])[:, 0].long()
    index = torch.where(slots > 0, block * block_tokens + at % block_tokens, 0)
    outputs = []
    for call, type in (
        (paged_decode_triton, dtype),
        (paged_decode_torch, dtype),
        (paged_decode_torch, torch.float32),
    ):
        cache = kv.to(type).clone()
        a = [t.to(type) for t in (qkv, q_norm, k_norm)] if normed else [qkv.to(type), None, None]
        table = [t.to(type if normed else torch.float32) for t in (cos, sin)]
        out = call(*a, 1e-6, *table, cache, blocks, slots, positions, index)
        outputs.append((out[:5], cache[:, 1:]))  # padding writes to block 0, in any order
    for got, twin, exact in zip(*outputs, strict=True):
        close(got, twin, exact.float())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("start", "n"), [(0, 2), (2, 1), (15, 1)])
def test_scratch_decode(start: int, n: int, dtype: torch.dtype, device: torch.device) -> None:
    """What lies beyond the scratch's filled part is NaN and is not read."""
    b, heads, kv_heads, t, d = 3, 4, 2, 16, 16
    scratch = torch.full((2, b, kv_heads, t, d), float("nan"), device=device, dtype=dtype)
    scratch[:, :, :, :start] = draw(2, b, kv_heads, start, d, device=device, dtype=dtype)
    qkv = draw(b, n, (heads + 2 * kv_heads) * d, device=device, dtype=dtype, seed=1)
    q_norm, k_norm = (draw(d, device=device, dtype=dtype, seed=s) for s in (2, 3))
    cos, sin = (draw(t, d, device=device, dtype=dtype, seed=s) for s in (4, 5))
    outputs = []
    for call, type in (
        (scratch_decode_triton, dtype), (scratch_decode_torch, dtype), (scratch_decode_torch, torch.float32),
    ):  # fmt: skip
        mine = scratch.to(type).clone()
        a = [x.to(type) for x in (qkv, q_norm, k_norm)]
        out = call(*a, 1e-6, cos.to(type), sin.to(type), mine, start)
        outputs.append((out, mine[:, :, :, : start + n]))
    for got, twin, exact in zip(*outputs, strict=True):
        close(got, twin, exact.float())


@pytest.mark.parametrize("n", [1, 33, 256])
def test_frame_normal(n: int, device: torch.device) -> None:
    """Seeds of either sign and of more than 32 bits."""
    seed = torch.tensor([0, -1, 2**31, -(2**62) + 5, 7], device=device)
    frame = torch.tensor([0, 1, 77, 4095, 3], dtype=torch.int32, device=device)
    torch.testing.assert_close(
        frame_normal_triton(seed, frame, n), frame_normal_torch(seed, frame, n), rtol=2e-5, atol=2e-5
    )


def test_frame_normal_is_standard_and_differs_by_seed_and_frame() -> None:
    seed = torch.arange(64).repeat_interleave(64)
    noise = frame_normal_torch(seed, torch.arange(64).int().repeat(64), 256)
    assert noise.mean().abs() < 0.005
    assert (noise.std() - 1).abs() < 0.005
    assert (noise.flatten(1) @ noise.flatten(1).t() / 256).fill_diagonal_(0).abs().max() < 0.45


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("d", [16, 32])
@pytest.mark.parametrize(("n", "first", "m"), [(11, 0, 11), (11, 7, 4), (5, 0, 1), (17, 3, 9)])
def test_whole_attention(
    n: int, first: int, m: int, d: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Queries and keys are parts of one projection; the queries may be of some tokens only."""
    s, heads, kv_heads = 3, 16, 2
    qkv = draw(s, n, (heads + 2 * kv_heads) * d, device=device, dtype=dtype)
    cos, sin = (draw(n, d // 2, device=device, seed=seed).repeat(1, 2) for seed in (1, 2))
    q, kv = qkv[:, first : first + m, : heads * d], qkv[:, :, heads * d :]
    got = whole_attention_triton(q, kv, cos, sin, first)
    twin = whole_attention_torch(q, kv, cos, sin, first)
    close(got, twin, whole_attention_torch(q.float(), kv.float(), cos, sin, first))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [33, 256])
def test_guided_step(n: int, dtype: torch.dtype, device: torch.device) -> None:
    """A row whose step has no length stays as it is, whatever its velocity."""
    b = 5
    velocity = draw(2 * b, n, device=device, dtype=dtype)
    x = draw(b, n, device=device, seed=1)
    guidance = torch.tensor([1.0, 2.0, 3.0, 0.0, 2.0], device=device)
    length = torch.tensor([0.1, 0.2, 0.0, 0.1, 0.05], device=device)
    one, two = x.clone(), x.clone()
    got = guided_step_triton(one, velocity, guidance, length, dtype)
    twin = guided_step_torch(two, velocity, guidance, length, dtype)
    torch.testing.assert_close(one, two, rtol=2e-5, atol=2e-5)
    assert torch.equal(one[2], x[2])
    close(got, twin, two)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("v", [33, 2049])
@pytest.mark.parametrize("first", [False, True], ids=["inner", "first"])
@pytest.mark.parametrize("nucleus", [False, True], ids=["top-k", "top-p"])
def test_draw_code(nucleus: bool, first: bool, v: int, dtype: torch.dtype, device: torch.device) -> None:
    """Greedy and warm rows, every limit, in one batch."""
    b, slots = 6, torch.tensor([3, 1, 0, 5, 4, 2], device=device)
    ones, variant = torch.ones(6, device=device), NUCLEUS if nucleus else 0
    o = DrawOptions(
        temperature=torch.tensor([0.0, 0.9, 0.5, 2.0, 0.9, 1.0], device=device),
        top_k=torch.tensor([50, 50, 1, 5, 20, 50], dtype=torch.int32, device=device),
        top_p=torch.tensor([0.1, 0.8, 0.8, 0.5, 1.0, 0.3], device=device) if nucleus else ones,
    )
    repetition = None
    if first:
        seen = draw(6, v, device=device, seed=3) > 0
        frame = torch.tensor([0, 1, 2, 3, 4, 5], dtype=torch.int32, device=device)
        repetition = Repetition(seen, torch.full((6,), 1.3, device=device), frame, 2)
    table = draw(v, 24, device=device, dtype=dtype, seed=7)
    for seed in range(8 if device.type == "cuda" else 2):  # the interpreter takes a second each
        logits = draw(b, v, device=device, dtype=dtype, seed=seed) * 3
        key = torch.arange(b, device=device) * 977 + seed
        drawn = []
        for call in (draw_code_triton, draw_code_torch):
            codes = torch.zeros(b, 2, dtype=torch.int64, device=device)
            x = call(logits, o, slots, key, variant, codes[:, 1], table, repetition)
            drawn.append((codes, x))
        # A greedy tie may go either way in the twin: its top-k promises no order.
        best = logits.float()[:, None]
        same = drawn[0][0] == drawn[1][0]
        rows = torch.arange(b, device=device)
        tie = logits[rows, drawn[0][0][:, 1]] == logits[rows, drawn[1][0][:, 1]]
        assert (same.all(1) | tie).all(), best
        agree = same.all(1)
        assert torch.equal(drawn[0][1][agree], drawn[1][1][agree])


@pytest.mark.parametrize("dtype", DTYPES)
def test_frame_ends(dtype: torch.dtype, device: torch.device) -> None:
    """Live rows, finished rows, the padding row twice; text read, run out, and not begun."""
    n, d, books, vocab, end, block_tokens = 6, 40, 3, 11, 10, 4
    slots = torch.tensor([2, 4, 1, 5, 0, 0], device=device)

    def ints(*values: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    def state() -> dict[str, Tensor]:
        return {
            "x": draw(n, d, device=device, dtype=dtype),
            "live": torch.tensor([False, True, True, True, False, True], device=device),
            "frame": ints(0, 0, 1, 2, 3, 30),
            "position": ints(0, 7, 8, 9, 10, 300),
            "seen": draw(n, end + 1, device=device, seed=1) > 0,
        }

    blocks = torch.arange(n * 80, dtype=torch.int32, device=device).reshape(n, 80)
    seed = ints(0, 1, -5, 1 << 40, 7, (1 << 62) + 3, dtype=torch.int64)
    text = torch.arange(n * 5, dtype=torch.int32, device=device).reshape(n, 5)
    length, limit = ints(0, 5, 5, 1, 2, 5), ints(0, 9, 2, 9, 9, 99)
    table = draw(30, d, device=device, dtype=dtype, seed=2)
    tables = draw(books, vocab, d, device=device, dtype=dtype, seed=3)
    frequency = 1.0 / 1e6 ** (torch.arange(8, device=device) / 8)
    shift = torch.tensor([0, 0, 2.5, 0, -7, 1], device=device)
    codes = ints(3, 1, 2, end, 4, 4, 9, 0, 0, 2, 2, 2, 1, 1, 1, 1, 1, 1, dtype=torch.int64).reshape(6, 3)

    results = []
    for begin, finish in ((begin_frame_triton, end_frame_triton), (begin_frame_torch, end_frame_torch)):
        s = state()
        i = begin(
            s["x"], s["live"], s["frame"], s["position"], shift, blocks, seed, text, length, table, 29,
            slots, frequency, block_tokens, books,
        )  # fmt: skip
        out = finish(
            codes, i, tables, end, s["x"], s["live"], s["frame"], s["position"], s["seen"], limit, slots
        )
        results.append([*(getattr(i, f) for f in i.__slots__), *out, *s.values()])
    for got, twin in zip(*results, strict=True):
        close(got.float(), twin.float())


def test_more_rows_than_the_fused_kernel_takes_give_the_same(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    x, w, r = (
        draw(2, 32, device=device),
        draw(16, 32, device=device, seed=1),
        draw(2, 16, device=device, seed=2),
    )
    fused = linear_add_triton(x, w, r.clone())
    monkeypatch.setattr(linear, "SKINNY", 1)
    close(linear_add_triton(x, w, r), fused)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("c", [1, 33, 96])
def test_snake(c: int, dtype: torch.dtype, device: torch.device) -> None:
    x, alpha, gain = (
        draw(7, 3, c, device=device, dtype=dtype),
        draw(c, device=device).exp(),
        draw(c, device=device, seed=1).exp(),
    )
    close(snake_triton(x, alpha, gain), snake_torch(x, alpha, gain), snake_torch(x.float(), alpha, gain))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("active", [False, True], ids=["plain", "snake"])
@pytest.mark.parametrize("skipped", [None, (0, 3), (5, 1)], ids=str)
@pytest.mark.parametrize(("t", "reach", "c"), [(1, 6, 33), (7, 2, 16), (2, 54, 5), (3, 4, 300)])
def test_carry(
    t: int,
    reach: int,
    c: int,
    skipped: tuple[int, int] | None,
    active: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    slots = torch.tensor([3, 1], device=device)
    x, past = draw(t, 2, c, device=device, dtype=dtype), draw(4, reach, c, device=device, dtype=dtype, seed=1)
    a = (draw(c, device=device).exp(), draw(c, device=device, seed=1).exp()) if active else None
    skip = None if skipped is None else torch.tensor(skipped, dtype=torch.int32, device=device)
    pasts = past.clone(), past.clone()
    close(
        carry_triton(pasts[0], slots, x, a, skip),
        carry_torch(pasts[1], slots, x, a, skip),
        carry_torch(past.float(), slots, x.float(), a, skip),
    )
    close(*pasts, exact=pasts[1].float())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("t", "k", "c_in", "c_out", "dilation", "rate"),
    [(5, 7, 24, 24, 3, 1), (1, 7, 33, 1, 1, 1), (3, 2, 40, 10, 1, 5), (4, 1, 64, 48, 1, 1)],
)
def test_conv(
    t: int, k: int, c_in: int, c_out: int, dilation: int, rate: int, dtype: torch.dtype, device: torch.device
) -> None:
    joined = draw(t + (k - 1) * dilation, 2, c_in, device=device, dtype=dtype)
    taps = draw(k, c_in, rate * c_out, device=device, dtype=dtype, seed=1) / (k * c_in) ** 0.5
    bias = draw(rate * c_out, device=device, dtype=dtype, seed=2)
    residual = draw(rate * t, 2, c_out, device=device, dtype=dtype, seed=3)
    a = (draw(c_out, device=device).exp(), draw(c_out, device=device, seed=1).exp())
    for activation, added in ((None, None), (a, None), (None, residual)):
        arguments = joined, taps, bias, dilation, rate, activation, added
        full = *wide(joined, taps, bias), dilation, rate, activation, None if added is None else added.float()
        close(conv_triton(*arguments), conv_torch(*arguments), conv_torch(*full))


@pytest.mark.parametrize(("t", "k", "c_out", "rate"), [(20, 3, 96, 1), (9, 2, 48, 2), (9, 2, 16, 3)])
def test_conv_with_half_as_many_columns_more(
    t: int, k: int, c_out: int, rate: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hocket.kernels.conv.tile", lambda *_: (16, 32, True, 4))
    test_conv(t, k, 24, c_out, 1, rate, DTYPES[1], device)
