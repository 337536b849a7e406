"""From hidden states to a patch of latents, and from a patch back to what the language models read.

A patch is drawn by flow matching: noise moves along a velocity that a small transformer (LocDiT) estimates
from the hidden states, the patch before and the time. A second one (LocEnc) reads the patch. Both see
sequences of a fixed few tokens, whatever the text, so any rows share a batch. Numerics follow voxcpm 2.0.3:
modules/locdit/{unified_cfm,local_dit,local_dit_v2}.py, modules/locenc/local_encoder.py.

Computed once where the result is the same: the embedding of every time, the projection of the patch before,
the first steps (whose velocity is zero by rule), and of the last layer only what is read.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from hocket.kernels.flow import Flow, Reading, guided_step
from hocket.models.voxcpm.stacks import Linear, Stack, per_token, run_whole

MAX_STEPS = 50
STILL = 0.04  # share of the steps, at least one, that the published solver starts with at zero velocity


@dataclass(frozen=True, slots=True)
class Encoder:
    """LocEnc and the projection to the language model's width."""

    enter: Linear  # feat -> d'
    special: Tensor  # [d']  the token whose result is the patch's
    stack: Stack
    leave: Linear  # d' -> d
    cos: Tensor  # fp32 [1 + patch, head_dim]
    sin: Tensor
    whole: Reading | None = None  # all of it in one kernel


@dataclass(frozen=True, slots=True)
class Diffusion:
    """LocDiT, with what depends on the time alone as tables over (steps asked for, call)."""

    enter: Linear  # feat -> d'
    condition: Linear  # feat -> d'
    stack: Stack
    leave: Linear  # d' -> feat
    time: Tensor  # [MAX_STEPS + 1, MAX_STEPS, d']  embedding of the time of each call
    length: Tensor  # fp32 [MAX_STEPS + 1, MAX_STEPS]  of the Euler step after it; 0 beyond the last
    cos: Tensor  # fp32 [tokens, head_dim]
    sin: Tensor
    whole: Flow | None = None  # all estimates in one kernel


def encode_patches(w: Encoder, patches: Tensor, share: Tensor | None) -> Tensor:
    """patches [m, patch, feat] -> [m, d]; share [m, ranks]."""
    special = w.special.expand(patches.shape[0], 1, -1)
    if w.whole is not None and len(patches) <= w.whole.geometry.streams and share is None:
        return w.whole(special.contiguous(), patches.flatten(1).float())
    x = torch.cat([special, w.enter(patches, None)], dim=1)  # [m, 1 + patch, d']
    h = run_whole(w.stack, x, 0, 1, w.cos, w.sin, None)  # [m, 1, d']
    return w.leave(h[:, 0], share)


def diffuse(
    w: Diffusion,
    mu: Tensor,
    before: Tensor,
    noise: Tensor,
    guidance: Tensor,
    steps: Tensor,
    calls: int,
    guided: bool,
    share: Tensor | None,
) -> Tensor:
    """Draw one patch for each row.

    mu [b, k, d'] condition: k = 2 tokens of their own (VoxCPM2), or one that the time is added to; before
    [b, patch, feat] the patch before; noise fp32 [b, patch, feat], overwritten; guidance fp32 [b]; steps
    int64 [b] Euler steps asked for; calls: how often velocities are estimated, enough for all rows (one that
    needs fewer stands still in the others); guided: some guidance is not 1, so velocities without condition
    are estimated too; share [b, ranks].
    -> fp32 [b, patch, feat]
    """
    b, patch, feat = before.shape
    sides = 2 if guided else 1
    share = per_token(None if share is None else share.repeat(sides, 1), w.cos.shape[0])
    # [sides, 1, b, k, d']  conditioned rows, then the others
    both = torch.stack([mu, torch.zeros_like(mu)] if guided else [mu])[:, None]
    time = w.time[steps, :calls].transpose(0, 1)[None, :, :, None]  # [1, calls, b, 1, d']
    last = w.condition(before, None)  # [b, patch, d']
    wide = (sides, calls, b)
    if mu.shape[1] == 1:
        parts = [both + time]
    else:
        parts = [both.expand(*wide, -1, -1), time.expand(*wide, -1, -1)]
    head = torch.cat([*parts, last.expand(*wide, -1, -1)], dim=3)  # [sides, calls, b, tokens - patch, d']
    length = w.length[steps, :calls].t().contiguous()  # [calls, b]
    x = noise.flatten(1)
    if w.whole is not None and b <= w.whole.geometry.streams and share is None:
        w.whole(head, x, guidance, length)
    else:
        move(w, head, x, guidance, length, share)
    return x.unflatten(1, (patch, feat))


def move(
    w: Diffusion, head: Tensor, x: Tensor, guidance: Tensor, length: Tensor, share: Tensor | None
) -> None:
    """Move x along its velocities, in place: the twin of `hocket.kernels.flow.Flow`, which says of what.

    share [sides * b * tokens, ranks].
    """
    sides, calls = head.shape[:2]
    first, feat = head.shape[3], w.enter.weight.shape[1]
    now = x.to(head.dtype)
    for call in range(calls):
        enter = w.enter(now.unflatten(1, (-1, feat)), None)
        tokens = torch.cat([head[:, call], enter.expand(sides, -1, -1, -1)], dim=2)  # [sides, b, tokens, d']
        h = run_whole(
            w.stack, tokens.flatten(0, 1), first, enter.shape[1], w.cos, w.sin, share
        )  # [sides * b, patch, d']
        velocity = w.leave(h, None).flatten(1)
        if sides == 2:
            now = guided_step(x, velocity, guidance, length[call], head.dtype)
        else:
            now = x.sub_(length[call][:, None] * velocity.float()).to(head.dtype)


# --- time --------------------------------------------------------------------------------------


def still_steps(steps: int) -> int:
    """Steps at the start that do not move."""
    return max(1, int((steps + 1) * STILL))


def schedule(steps: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Time and length of each moving Euler step: two [steps - still] in `dtype`, on the CPU.

    In half precision the times are those of half-precision arithmetic in the published order of operations
    (for ten steps .9531, .9102, .8516, …): released weights were run with them, and an embedding of the exact
    times has a cosine of no more than 0.78 to 0.96 with theirs.
    """
    span = torch.linspace(1, 0, steps + 1, dtype=dtype)
    span = span + (torch.cos(torch.pi / 2 * span) - 1 + span)
    time, length = span[0], span[0] - span[1]
    times, lengths = [], []
    for step in range(1, steps + 1):
        times.append(time)
        lengths.append(length)
        time = time - length
        if step < steps:
            length = time - span[step + 1]
    still = still_steps(steps)
    return torch.stack(times)[still:], torch.stack(lengths)[still:]


def time_waves(time: Tensor, width: int) -> Tensor:
    """Sinusoidal embedding: time [m] -> [m, width], every product in the dtype of `time`, in the published
    order."""
    half = width // 2
    w = torch.exp(torch.arange(half, dtype=time.dtype) * -(math.log(10000) / (half - 1)))
    angle = 1000 * time[:, None] * w[None]
    return torch.cat([angle.sin(), angle.cos()], dim=-1)


def time_tables(time_mlp: tuple[Linear, Linear], delta_mlp: tuple[Linear, Linear]) -> tuple[Tensor, Tensor]:
    """`Diffusion.time` and `Diffusion.length`, from the two maps of a time and of a time difference.

    The difference is always 0 in the published code, so its part is one vector.
    """
    weight = time_mlp[0].weight
    dtype, width = weight.dtype, weight.shape[1]

    def embed(mlp: tuple[Linear, Linear], time: Tensor) -> Tensor:
        waves = time_waves(time, width).to(weight.device)
        return mlp[1](F.silu(mlp[0](waves, None)), None)

    table = weight.new_zeros(MAX_STEPS + 1, MAX_STEPS, width)
    length = torch.zeros(MAX_STEPS + 1, MAX_STEPS, device=weight.device)
    rest = embed(delta_mlp, torch.zeros(1, dtype=dtype))
    for steps in range(2, MAX_STEPS + 1):
        times, lengths = schedule(steps, dtype)
        table[steps, : len(times)] = embed(time_mlp, times) + rest
        length[steps, : len(times)] = lengths.float().to(weight.device)
    return table, length
