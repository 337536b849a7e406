"""Draws follow the distribution, and depend on nothing but seed, frame, codebook and token."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.nn.sampler import NUCLEUS, WIDE, DrawOptions, draw, gumbel, mix, noise_key, penalise


def options(rows: int, temperature: float = 1.0, top_k: int = 50, top_p: float = 1.0) -> DrawOptions:
    return DrawOptions(
        torch.full((rows,), temperature),
        torch.full((rows,), top_k, dtype=torch.int32),
        torch.full((rows,), top_p),
    )


def reference_lowbias32(x: int) -> int:
    x ^= x >> 16
    x = x * 0x7FEB352D % 2**32
    x ^= x >> 15
    x = x * 0x846CA68B % 2**32
    return x ^ x >> 16


@given(st.integers(-(2**63), 2**63 - 1))
def test_hash_is_the_published_one_on_the_low_32_bits(x: int) -> None:
    assert int(mix(torch.tensor([x]))[0]) == reference_lowbias32(x % 2**32)


def test_noise_is_gumbel() -> None:
    noise = gumbel(torch.arange(200), torch.arange(2000).expand(200, -1)).double()
    assert noise.isfinite().all()
    assert noise.mean().item() == pytest.approx(np.euler_gamma, abs=0.01)
    assert noise.var().item() == pytest.approx(np.pi**2 / 6, rel=0.02)
    lag = torch.corrcoef(torch.stack([noise[:, :-1].flatten(), noise[:, 1:].flatten()]))[0, 1]
    rows = torch.corrcoef(torch.stack([noise[:-1].flatten(), noise[1:].flatten()]))[0, 1]
    assert abs(lag) < 0.01
    assert abs(rows) < 0.01


def test_keys_of_near_counters_are_all_different() -> None:
    seed = torch.arange(40).repeat_interleave(50)
    frame = torch.arange(50).repeat(40)
    keys = noise_key(seed, frame, 16).flatten()
    assert keys.unique().numel() > 0.9999 * keys.numel()
    high = noise_key(torch.tensor([5, 5 + (1 << 32), -5]), torch.zeros(3), 1)
    assert high.unique().numel() == 3, "the upper half of a seed counts"


def test_draws_follow_the_softmax() -> None:
    probability = torch.tensor([0.4, 0.3, 0.2, 0.08, 0.02])
    n = 40000
    drawn = draw(
        probability.log().expand(n, -1), options(n), noise_key(torch.arange(n), torch.zeros(n), 1)[:, 0], 0
    )
    counts = torch.bincount(drawn, minlength=5)
    chi2 = ((counts - n * probability) ** 2 / (n * probability)).sum().item()
    assert chi2 < 18.5  # 99.9 % of the chi-square distribution with 4 degrees of freedom


def test_temperature_zero_takes_the_best_whatever_the_rest_of_the_batch_does() -> None:
    logits = torch.randn(64, 300, generator=torch.Generator().manual_seed(0))
    o = options(64, 1.5)
    o.temperature[::2] = 0
    drawn = draw(logits, o, torch.arange(64), WIDE | NUCLEUS)
    assert (drawn[::2] == logits[::2].argmax(1)).all()
    assert (drawn[1::2] != logits[1::2].argmax(1)).any()


@settings(max_examples=30)
@given(st.integers(1, 64), st.floats(0.05, 1.0), st.integers(0, 10**6))
def test_nothing_outside_top_k_and_nucleus_is_drawn(k: int, p: float, seed: int) -> None:
    logits = torch.randn(50, 200, generator=torch.Generator().manual_seed(seed)) * 2
    drawn = draw(logits, options(50, 1.3, k, p), torch.arange(50) + seed, NUCLEUS)
    ordered, ids = (logits / 1.3).sort(descending=True)
    probability = ordered[:, :k].softmax(1)
    before = probability.cumsum(1) - probability
    for row in range(50):
        rank = int((ids[row] == drawn[row]).nonzero())
        assert rank < k
        assert rank == 0 or before[row, rank] < p + 1e-6


def test_row_does_not_depend_on_its_batch() -> None:
    logits = torch.randn(32, 500, generator=torch.Generator().manual_seed(3))
    key = noise_key(torch.arange(32), torch.arange(32), 4)[:, 2]
    o = options(32, 0.9)
    together = draw(logits, o, key, 0)
    for i in (0, 7, 31):
        assert draw(logits[i : i + 1], options(1, 0.9), key[i : i + 1], 0) == together[i]


def test_wide_and_narrow_draw_the_same_when_top_k_allows_both() -> None:
    logits = torch.randn(64, 500, generator=torch.Generator().manual_seed(4))
    assert (
        draw(logits, options(64), torch.arange(64), 0) == draw(logits, options(64), torch.arange(64), WIDE)
    ).all()


def test_without_a_limit_everything_can_be_drawn() -> None:
    n = 4000
    drawn = draw(torch.zeros(n, 200), options(n, top_k=0), torch.arange(n), WIDE)
    assert drawn.unique().numel() == 200


def test_penalty_makes_seen_tokens_less_likely() -> None:
    logits = torch.tensor([[2.0, -2.0, 2.0, -2.0]])
    seen = torch.tensor([[True, True, False, False]])
    out = penalise(logits, seen, torch.tensor([2.0]))
    assert out.tolist() == [[1.0, -4.0, 2.0, -2.0]]
