"""Drawing from a whole vocabulary of text: no sort, no list of candidates, one pass over the logits.

Greedy rows and rows without limits need only a largest value (Gumbel-max, see `hocket.kernels.draw`); rows
with top-k or top-p are that module's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hocket.kernels.choice import next_power_of_2, overlap, tl, triton, use_triton
from hocket.kernels.draw import _mix, gumbel

_PART = 4096  # tokens that one program looks at


def draw_any_torch(logits: Tensor, temperature: Tensor, key: Tensor, noisy: bool) -> Tensor:
    """Draw from the softmax of each row: logits [b, v], temperature fp32 [b], key int64 [b] -> int64 [b].

    At temperature 0 the largest logit, of equal ones the first. noisy False: every row is at 0.
    """
    if not noisy:
        return logits.argmax(1)
    greedy = (temperature == 0)[:, None]
    noise = gumbel(key, torch.arange(logits.shape[1], device=logits.device).expand(len(logits), -1))
    scores = logits.float() / torch.where(greedy, 1.0, temperature[:, None])
    return (scores + noise.masked_fill(greedy, 0.0)).argmax(1)


def draw_any_triton(logits: Tensor, temperature: Tensor, key: Tensor, noisy: bool) -> Tensor:
    """`draw_any_torch` as a kernel: the same arguments, the same meaning."""
    b, v = logits.shape
    parts = -(-v // _PART)
    best = torch.empty(b, parts, dtype=torch.float32, device=logits.device)
    where = torch.empty(b, parts, dtype=torch.int32, device=logits.device)
    out = torch.empty(b, dtype=torch.int64, device=logits.device)
    _best_of_part[(b, parts)](
        logits, temperature, key, best, where, v, parts,
        NOISY=noisy, BLOCK=_PART, num_warps=4, **overlap(logits),
    )  # fmt: skip
    _best_of_all[(b,)](
        best, where, out, parts, BLOCK=next_power_of_2(parts), num_warps=1, **overlap(logits)
    )  # fmt: skip
    return out


def draw_any(logits: Tensor, temperature: Tensor, key: Tensor, noisy: bool) -> Tensor:
    """`draw_any_torch`, which says what it does, or its kernel; `hocket.kernels.choice` picks."""
    return (draw_any_triton if use_triton(logits) else draw_any_torch)(logits, temperature, key, noisy)


@triton.jit
def _best_of_part(
    logits, temperature, key, best, where, v, parts,
    NOISY: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = part * BLOCK + tl.arange(0, BLOCK)
    score = tl.load(logits + row * v + token, token < v, float("-inf")).to(tl.float32)
    if NOISY:
        heat = tl.load(temperature + row)
        bits = _mix(tl.load(key + row).to(tl.uint32) ^ _mix((token + 1).to(tl.uint32))) >> 9
        uniform = (bits.to(tl.float32) + 0.5) * 1.1920928955078125e-07  # 2**-23
        noise = -tl.log(-tl.log(uniform))
        score = tl.div_rn(score, tl.where(heat == 0, 1.0, heat)) + tl.where(heat == 0, 0.0, noise)
    tl.store(best + row * parts + part, tl.max(score, 0))
    tl.store(where + row * parts + part, part * BLOCK + tl.argmax(score, 0))


@triton.jit
def _best_of_all(best, where, out, parts, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0)
    part = tl.arange(0, BLOCK)
    score = tl.load(best + row * parts + part, part < parts, float("-inf"))
    tl.store(out + row, tl.load(where + row * parts + tl.argmax(score, 0)).to(tl.int64))
