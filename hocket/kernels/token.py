"""The two ends of a text model's step: gathering what its rows need, and putting back what they become.

Each replaces some thirty small tensor operations. State tensors have one row a slot; slots int64 [b] may hold
the padding slot 0 more than once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hocket.kernels.choice import next_power_of_2, overlap, tl, triton, use_triton
from hocket.kernels.draw import _mix, noise_key
from hocket.kernels.frame import StepInput, _begin_row, stand


def begin_token_torch(
    token: Tensor, live: Tensor, made: Tensor, position: Tensor, delta: Tensor, blocks: Tensor, seed: Tensor,
    embed: Tensor, slots: Tensor, frequency: Tensor, block_tokens: int,
) -> StepInput:  # fmt: skip
    """Read the rows of a step.

    token, made, position int32 [slots]; live bool [slots]; seed int64 [slots]; delta fp32 [slots], added to
    the position before rotation; blocks int32 [slots, max_blocks]; embed [vocab, d]; frequency fp32
    [head_dim / 2].
    """
    alive, count, where = live[slots], made[slots], position[slots]
    index, cos, sin = stand(alive, where, delta, blocks, slots, frequency, block_tokens)
    key = noise_key(seed[slots], count, 1)
    x = embed[token[slots].long()]
    return StepInput(x, alive, count, where, index, cos.to(x.dtype), sin.to(x.dtype), key)


def begin_token_triton(
    token: Tensor, live: Tensor, made: Tensor, position: Tensor, delta: Tensor, blocks: Tensor, seed: Tensor,
    embed: Tensor, slots: Tensor, frequency: Tensor, block_tokens: int,
) -> StepInput:  # fmt: skip
    """`begin_token_torch` as a kernel: the same arguments, the same meaning."""
    b, d, half = slots.shape[0], embed.shape[1], frequency.shape[0]
    out = StepInput.empty(b, d, 2 * half, 1, embed)
    _begin_token[(b,)](
        token, live, made, position, delta, blocks, seed, embed, slots, frequency,
        out.x, out.live, out.made, out.position, out.index, out.cos, out.sin, out.key,
        d, blocks.stride(0), block_tokens, HALF=half, BLOCK=next_power_of_2(d), num_warps=4, **overlap(embed),
    )  # fmt: skip
    return out


def begin_token(
    token: Tensor, live: Tensor, made: Tensor, position: Tensor, delta: Tensor, blocks: Tensor, seed: Tensor,
    embed: Tensor, slots: Tensor, frequency: Tensor, block_tokens: int,
) -> StepInput:  # fmt: skip
    """`begin_token_torch`, which says what it does, or its kernel; `hocket.kernels.choice` picks."""
    call = begin_token_triton if use_triton(embed) else begin_token_torch
    return call(token, live, made, position, delta, blocks, seed, embed, slots, frequency, block_tokens)


def end_token_torch(
    drawn: Tensor, i: StepInput, stops: Tensor, limit: Tensor,
    token: Tensor, live: Tensor, made: Tensor, position: Tensor, slots: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Put drawn tokens int64 [b] into the state of the rows that are live.

    stops int32 [slots, n]: ids that end a row, which are no part of its text; limit int32 [slots]: tokens
    allowed. Written: token, made, position int32 [slots], live bool [slots].
    -> tokens int32 [b, 1]; emit bool [b], the row made a token of its text; stop bool [b]
    """
    ended = (drawn[:, None] == stops[slots]).any(1)
    stop = ended | (i.made + 1 >= limit[slots])
    token[slots] = torch.where(i.live, drawn, token[slots]).int()
    made[slots] = i.made + i.live.int()
    position[slots] = i.position + i.live.int()
    live[slots] = i.live & ~stop
    return drawn.int()[:, None], i.live & ~ended, i.live & stop


def end_token_triton(
    drawn: Tensor, i: StepInput, stops: Tensor, limit: Tensor,
    token: Tensor, live: Tensor, made: Tensor, position: Tensor, slots: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`end_token_torch` as a kernel: the same arguments, the same meaning."""
    b = drawn.shape[0]
    out = torch.empty(b, 1, dtype=torch.int32, device=drawn.device)
    emit, stop = (torch.empty(b, dtype=torch.bool, device=drawn.device) for _ in range(2))
    _end_token[(b,)](
        drawn, i.live, i.made, i.position, stops, limit, token, live, made, position, slots, out, emit, stop,
        stops.shape[1], STOPS=next_power_of_2(stops.shape[1]), num_warps=1, **overlap(drawn),
    )  # fmt: skip
    return out, emit, stop


def end_token(
    drawn: Tensor, i: StepInput, stops: Tensor, limit: Tensor,
    token: Tensor, live: Tensor, made: Tensor, position: Tensor, slots: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`end_token_torch`, which says what it does, or its kernel; `hocket.kernels.choice` picks."""
    call = end_token_triton if use_triton(drawn) else end_token_torch
    return call(drawn, i, stops, limit, token, live, made, position, slots)


# --- kernels -----------------------------------------------------------------------------------


@triton.jit
def _begin_token(
    token, live, made, position, delta, blocks, seed, embed, slots, frequency,
    out_x, out_live, out_made, out_position, out_index, out_cos, out_sin, out_key,
    d, blocks_stride, block_tokens, HALF: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    _, key = _begin_row(
        row, slot, live, made, position, delta, blocks, seed, frequency,
        out_live, out_made, out_position, out_index, out_cos, out_sin,
        blocks_stride, block_tokens, HALF,
    )  # fmt: skip
    tl.store(out_key + row, _mix(key + tl.full((), 0x9E3779B9, tl.uint32)).to(tl.int64))

    column = tl.arange(0, BLOCK)
    inside = column < d
    id = tl.load(token + slot).to(tl.int64)
    tl.store(out_x + row * d + column, tl.load(embed + id * d + column, inside, 0.0), inside)


@triton.jit
def _end_token(
    drawn, was_live, was_made, was_position, stops, limit, token, live, made, position, slots,
    out, emit, stop, n, STOPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    alive = tl.load(was_live + row).to(tl.int32)
    id = tl.load(drawn + row)
    count = tl.load(was_made + row)
    at = tl.arange(0, STOPS)
    hits = tl.load(stops + slot * n + at, at < n, -1) == id
    ended = tl.sum(hits.to(tl.int32), 0) > 0
    last = ended | (count + 1 >= tl.load(limit + slot))
    tl.store(out + row, id.to(tl.int32))
    tl.store(emit + row, (alive > 0) & (ended == 0))
    tl.store(stop + row, (alive > 0) & last)
    if alive > 0:
        tl.store(token + slot, id.to(tl.int32))
        tl.store(live + slot, last == 0)
        tl.store(made + slot, count + 1)
        tl.store(position + slot, tl.load(was_position + row) + 1)
