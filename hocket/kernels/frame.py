"""The two ends of a frame step: gathering what its rows need, and putting back what they become.

Each replaces some thirty small tensor operations. State tensors have one row a slot; slots int64 [b] may
hold the padding slot 0 more than once. What a step reads whatever it makes (`StepInput`, `stand`,
`_begin_row`) serves `hocket.kernels.token` too.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hocket.kernels.choice import next_power_of_2, overlap, tl, triton, use_triton
from hocket.kernels.draw import _mix, noise_key

# --- beginning -----------------------------------------------------------------------------------


@dataclass(slots=True)
class StepInput:
    """What a step reads of its rows."""

    x: Tensor  # [b, d]
    live: Tensor  # bool [b]
    made: Tensor  # int32 [b]  frames, or tokens
    position: Tensor  # int32 [b]
    index: Tensor  # int64 [b]  flat cache row of this token; 0 where not live
    cos: Tensor  # [b, head_dim]
    sin: Tensor  # [b, head_dim]
    key: Tensor  # int64 [b, draws]  noise

    @classmethod
    def empty(cls, b: int, d: int, head_dim: int, draws: int, like: Tensor) -> StepInput:
        """Memory for a kernel to fill; floating point as in `like`."""

        def empty(*shape: int, dtype: torch.dtype = like.dtype) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=like.device)

        return cls(
            x=empty(b, d),
            live=empty(b, dtype=torch.bool),
            made=empty(b, dtype=torch.int32),
            position=empty(b, dtype=torch.int32),
            index=empty(b, dtype=torch.int64),
            cos=empty(b, head_dim),
            sin=empty(b, head_dim),
            key=empty(b, draws, dtype=torch.int64),
        )


def stand(
    alive: Tensor, where: Tensor, shift: Tensor, blocks: Tensor, slots: Tensor, frequency: Tensor,
    block_tokens: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Where rows of cache position `where` int32 [b] stand: their cache row, and cos and sin fp32 there.

    alive bool [b]; shift fp32 [slots], added to the position before rotation.
    """
    block = blocks[slots, (where // block_tokens).long()].long()
    index = torch.where(alive, block * block_tokens + where % block_tokens, 0)
    angle = (where.float() + shift[slots])[:, None] * frequency
    angle = torch.cat([angle, angle], dim=1)
    return index, angle.cos(), angle.sin()


def begin_frame_torch(
    x: Tensor, live: Tensor, frame: Tensor, position: Tensor, shift: Tensor, blocks: Tensor, seed: Tensor,
    text: Tensor, text_length: Tensor, table: Tensor, pad: int,
    slots: Tensor, frequency: Tensor, block_tokens: int, books: int,
) -> StepInput:  # fmt: skip
    """Gather the rows of a step.

    State: x [slots, d]; live bool, frame, position int32, shift fp32, seed int64, text_length int32 [slots];
    blocks int32 [slots, m]; text int32 [slots, t], ids that are looked up in table [vocab, d] and added to x,
    one a frame from the second on, and `pad` where they have run out. frequency fp32 [head_dim / 2], radians
    a position; rotary positions are those of the cache plus shift.
    """
    alive, made = live[slots], frame[slots]
    at = (made - 1).clamp(min=0).long()
    id = text[slots, at.clamp(max=text.shape[1] - 1)]
    id = torch.where(at < text_length[slots], id, pad)
    row = x[slots] + table[id.long()] * (made > 0)[:, None]
    where = position[slots]
    index, cos, sin = stand(alive, where, shift, blocks, slots, frequency, block_tokens)
    key = noise_key(seed[slots], made, books)
    return StepInput(row, alive, made, where, index, cos.to(x.dtype), sin.to(x.dtype), key)


def begin_frame_triton(
    x: Tensor, live: Tensor, frame: Tensor, position: Tensor, shift: Tensor, blocks: Tensor, seed: Tensor,
    text: Tensor, text_length: Tensor, table: Tensor, pad: int,
    slots: Tensor, frequency: Tensor, block_tokens: int, books: int,
) -> StepInput:  # fmt: skip
    """`begin_frame_torch` as a kernel: the same arguments, the same meaning."""
    b, d, half = slots.shape[0], x.shape[1], frequency.shape[0]
    out = StepInput.empty(b, d, 2 * half, books, x)
    _begin_frame[(b,)](
        x, live, frame, position, shift, blocks, seed, text, text_length, table, slots, frequency,
        out.x, out.live, out.made, out.position, out.index, out.cos, out.sin, out.key,
        pad, d, blocks.stride(0), text.shape[1], block_tokens, books,
        HALF=half, BLOCK=next_power_of_2(d), BOOKS=next_power_of_2(books), num_warps=4,
        **overlap(x),
    )  # fmt: skip
    return out


def begin_frame(
    x: Tensor, live: Tensor, frame: Tensor, position: Tensor, shift: Tensor, blocks: Tensor, seed: Tensor,
    text: Tensor, text_length: Tensor, table: Tensor, pad: int,
    slots: Tensor, frequency: Tensor, block_tokens: int, books: int,
) -> StepInput:  # fmt: skip
    """`begin_frame_torch`, which says what it does, or its kernel; `hocket.kernels.choice` picks."""
    call = begin_frame_triton if use_triton(x) else begin_frame_torch
    return call(
        x, live, frame, position, shift, blocks, seed, text, text_length, table, pad, slots, frequency,
        block_tokens, books,
    )  # fmt: skip


# --- end -------------------------------------------------------------------------------------------


def end_frame_torch(
    codes: Tensor, i: StepInput, tables: Tensor, end: int,
    x: Tensor, live: Tensor, frame: Tensor, position: Tensor, seen: Tensor, limit: Tensor, slots: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Put a drawn frame into the state of the rows that are live.

    codes int64 [b, books] as drawn, the first of them `end` where the request ends; tables [books, vocab, d].
    Written: x [slots, d], the sum of the codes' rows; live; frame; position; seen bool [slots, end + 1].
    limit int32 [slots]: frames allowed.
    -> codes int32 [b, books], 0 in place of `end`; emit bool [b], the row made a frame; stop bool [b]
    """
    first = codes[:, 0]
    ended = first == end
    codes = torch.cat([torch.where(ended, 0, first)[:, None], codes[:, 1:]], dim=1)
    alive = i.live
    stop = ended | (i.made + 1 >= limit[slots])
    was = seen[slots]
    seen[slots] = was.scatter(1, first[:, None], alive[:, None] | was.gather(1, first[:, None]))
    x[slots] = torch.where(alive[:, None], embed_codes_torch(codes, tables), x[slots])
    frame[slots] = i.made + alive.int()
    position[slots] += alive.int()
    live[slots] = alive & ~stop
    return codes.int(), alive & ~ended, alive & stop


def embed_codes_torch(codes: Tensor, tables: Tensor) -> Tensor:
    """Sum a frame's code embeddings: codes int64 [n, books], tables [books, vocab, d] -> [n, d].

    Summed in fp32 and then rounded, as torch's own sum does in half precision.
    """
    book = torch.arange(codes.shape[1], device=codes.device)
    return tables[book, codes].float().sum(1).to(tables.dtype)


def end_frame_triton(
    codes: Tensor, i: StepInput, tables: Tensor, end: int,
    x: Tensor, live: Tensor, frame: Tensor, position: Tensor, seen: Tensor, limit: Tensor, slots: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`end_frame_torch` as a kernel: the same arguments, the same meaning."""
    b, books = codes.shape
    vocab, d = tables.shape[1:]
    out = torch.empty(b, books, dtype=torch.int32, device=x.device)
    emit = torch.empty(b, dtype=torch.bool, device=x.device)
    stop = torch.empty_like(emit)
    block = min(512, next_power_of_2(d))
    _end_frame[(b, -(-d // block))](
        codes, i.live, i.made, i.position, tables, x, live, frame, position, seen, limit, slots,
        out, emit, stop,
        end, vocab, d, BOOKS=books, BLOCK=block, num_warps=4, **overlap(x),
    )  # fmt: skip
    return out, emit, stop


def end_frame(
    codes: Tensor, i: StepInput, tables: Tensor, end: int,
    x: Tensor, live: Tensor, frame: Tensor, position: Tensor, seen: Tensor, limit: Tensor, slots: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`end_frame_torch`, which says what it does, or its kernel; `hocket.kernels.choice` picks."""
    call = end_frame_triton if use_triton(x) else end_frame_torch
    return call(codes, i, tables, end, x, live, frame, position, seen, limit, slots)


# --- kernels -----------------------------------------------------------------------------------


@triton.jit
def _begin_row(
    row, slot, live, made, position, shift, blocks, seed, frequency,
    out_live, out_made, out_position, out_index, out_cos, out_sin,
    blocks_stride, block_tokens, HALF: tl.constexpr,
):  # fmt: skip
    """What every step reads of a row. -> how much it has made; uint32 noise, to be mixed with each draw's"""
    alive = tl.load(live + slot)
    count = tl.load(made + slot)
    where = tl.load(position + slot)
    tl.store(out_live + row, alive)
    tl.store(out_made + row, count)
    tl.store(out_position + row, where)
    block = tl.load(blocks + slot * blocks_stride + where // block_tokens).to(tl.int64)
    index = block * block_tokens + where % block_tokens
    tl.store(out_index + row, tl.where(alive != 0, index, 0))

    half = tl.arange(0, HALF)
    angle = (where.to(tl.float32) + tl.load(shift + slot)) * tl.load(frequency + half)
    at = row * 2 * HALF + half
    type = out_cos.dtype.element_ty
    tl.store(out_cos + at, tl.cos(angle).to(type))
    tl.store(out_cos + at + HALF, tl.cos(angle).to(type))
    tl.store(out_sin + at, tl.sin(angle).to(type))
    tl.store(out_sin + at + HALF, tl.sin(angle).to(type))

    golden = tl.full((), 0x9E3779B9, tl.uint32)
    whole = tl.load(seed + slot)
    key = _mix(_mix(whole.to(tl.uint32)) ^ (whole >> 32).to(tl.uint32))
    return count, _mix(key + count.to(tl.uint32) * golden)


@triton.jit
def _begin_frame(
    x, live, frame, position, shift, blocks, seed, text, text_length, table, slots, frequency,
    out_x, out_live, out_made, out_position, out_index, out_cos, out_sin, out_key,
    pad, d, blocks_stride, text_rows, block_tokens, books,
    HALF: tl.constexpr, BLOCK: tl.constexpr, BOOKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    made, key = _begin_row(
        row, slot, live, frame, position, shift, blocks, seed, frequency,
        out_live, out_made, out_position, out_index, out_cos, out_sin,
        blocks_stride, block_tokens, HALF,
    )  # fmt: skip

    at = tl.maximum(made - 1, 0)
    id = tl.load(text + slot * text_rows + tl.minimum(at, text_rows - 1))
    id = tl.where(at < tl.load(text_length + slot), id, pad)
    column = tl.arange(0, BLOCK)
    inside = column < d
    value = tl.load(x + slot * d + column, inside, 0.0).to(tl.float32)
    read = tl.load(
        table + id.to(tl.int64) * d + column, inside & (tl.zeros([BLOCK], tl.int32) + made > 0), 0.0
    ).to(tl.float32)
    tl.store(out_x + row * d + column, (value + read).to(out_x.dtype.element_ty), inside)

    golden = tl.full((), 0x9E3779B9, tl.uint32)
    book = tl.arange(0, BOOKS)
    keys = _mix(key + (book + 1).to(tl.uint32) * golden)
    tl.store(out_key + row * books + book, keys.to(tl.int64), book < books)


@triton.jit
def _end_frame(
    codes, was_live, was_frame, was_position, tables, x, live, frame, position, seen, limit, slots,
    out, emit, stop,
    end, vocab, d, BOOKS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    alive = tl.load(was_live + row).to(tl.int32)
    first = tl.load(codes + row * BOOKS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < d
    total = tl.zeros([BLOCK], tl.float32)
    for book in tl.static_range(BOOKS):
        code = tl.load(codes + row * BOOKS + book)
        if book == 0:
            code = tl.where(code == end, 0, code)
        at = tables + (book * vocab + code) * d
        total += tl.load(at + column, inside, 0.0).to(tl.float32)
        if tl.program_id(1) == 0:
            tl.store(out + row * BOOKS + book, code.to(tl.int32))
    tl.store(
        x + slot * d + column,
        total.to(x.dtype.element_ty),
        inside & (tl.zeros([BLOCK], tl.int32) + alive > 0),
    )
    if tl.program_id(1) == 0:
        made = tl.load(was_frame + row)
        ended = first == end
        stops = (ended | (made + 1 >= tl.load(limit + slot))).to(tl.int32)
        tl.store(emit + row, (alive > 0) & (first != end))
        tl.store(stop + row, (alive > 0) & (stops > 0))
        if alive > 0:
            tl.store(live + slot, stops == 0)
            tl.store(frame + slot, made + 1)
            tl.store(position + slot, tl.load(was_position + row) + 1)
            tl.store(seen + slot * (end + 1) + first, True)
