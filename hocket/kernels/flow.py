"""A flow guided by its own unconditioned velocity: one step of it, and its whole loop in one launch."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hocket.kernels import cuda
from hocket.kernels.choice import next_power_of_2, overlap, tl, triton, use_triton
from hocket.kernels.clusters import Cut
from hocket.kernels.resident import Block, folded


def guided_step_torch(
    x: Tensor, velocity: Tensor, guidance: Tensor, length: Tensor, dtype: torch.dtype
) -> Tensor:
    """Move x along a guided velocity (classifier-free guidance with CFG-Zero*, arXiv 2503.18886).

    x fp32 [b, n] is written in place: x -= length * u, with u = s q + guidance (p - s q), where velocity
    [2 b, n] holds p, the conditioned rows, before q, the others, and s = <p, q> / (<q, q> + 1e-8).
    guidance, length fp32 [b]; a length of 0 leaves a row as it is. Computed in fp32: products of half
    precision would lose s. -> x in `dtype`, which the next estimate reads.
    """
    p, q = velocity.float().chunk(2)
    q = q * ((p * q).sum(1) / (q.square().sum(1) + 1e-8))[:, None]
    x -= length[:, None] * (q + guidance[:, None] * (p - q))
    return x.to(dtype)


def guided_step_triton(
    x: Tensor, velocity: Tensor, guidance: Tensor, length: Tensor, dtype: torch.dtype
) -> Tensor:
    """`guided_step_torch` as a kernel: the same arguments, the same meaning."""
    assert x.is_contiguous(), "rows are read without strides"
    assert velocity.is_contiguous(), "rows are read without strides"
    b, n = x.shape
    out = torch.empty_like(x, dtype=dtype)
    _guided_step[(b,)](
        x, velocity, guidance, length, out, b, n, BLOCK=next_power_of_2(n), num_warps=1, **overlap(x)
    )
    return out


def guided_step(x: Tensor, velocity: Tensor, guidance: Tensor, length: Tensor, dtype: torch.dtype) -> Tensor:
    """`guided_step_torch`, which says what it does, or its kernel; `hocket.kernels.choice` picks."""
    call = guided_step_triton if use_triton(x) else guided_step_torch
    return call(x, velocity, guidance, length, dtype)


@triton.jit(do_not_specialize=["b"])
def _guided_step(x, velocity, guidance, length, out, b, n, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < n
    p = tl.load(velocity + row * n + column, inside, 0.0).to(tl.float32)
    q = tl.load(velocity + (b + row) * n + column, inside, 0.0).to(tl.float32)
    q *= tl.sum(p * q, 0) / (tl.sum(q * q, 0) + 1e-8)
    moved = tl.load(x + row * n + column, inside, 0.0)
    moved -= tl.load(length + row) * (q + tl.load(guidance + row) * (p - q))
    tl.store(x + row * n + column, moved, inside)
    tl.store(out + row * n + column, moved.to(out.dtype.element_ty), inside)


# --- a stack in one launch --------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Geometry(Cut):
    """Sizes of a stack over short sequences; flow.cu computes the same."""

    tiles: int = 3  # the rows of one stream with and without condition
    several: bool = True
    tokens: int  # of a sequence
    patch: int  # of these, the last, are entered
    feat: int  # values of each
    first: int  # token of those that leave
    read: int  # how many do
    leave: int  # values of each then
    moves: bool  # what leaves is a velocity of what entered
    streams: int = 4  # at most

    @property
    def defines(self) -> dict[str, int]:
        return super().defines | {
            "TOKENS": self.tokens, "PATCH": self.patch, "FEAT": self.feat, "FIRST": self.first,
            "READ": self.read, "LEAVE": self.leave, "MOVES": int(self.moves), "STREAMS": self.streams,
        }  # fmt: skip

    @property
    def out_parts(self) -> int:
        """A program's heads: a warp attends, and goes on with what it has."""
        return self.heads // self.cluster

    @property
    def out_tiles(self) -> int:
        """A sequence is two."""
        return 2 * (self.warps // self.out_parts)

    @property
    def fits(self) -> bool:
        here = self.out_parts
        return (
            super().fits
            and self.heads % self.cluster == 0
            and self.heads // self.kv_heads % here == self.warps % here == 0
            and self.head_dim in (64, 128)
            and self.patch < self.tokens <= 16
            and self.feat % 8 == self.d % (2 * self.grid) == 0
        )

    @property
    def more_bytes(self) -> int:
        new = self.patch * self.feat * (6 * self.streams if self.moves else 2 * self.streams + 4)
        return new + 64 * self.head_dim + self.d // self.grid * (self.feat // 2 + 1) * 4

    def pack_block(self, b: Block) -> Tensor:
        """Columns of the product after attention lie as attention gives them."""
        out = b.out.unflatten(1, (self.heads, 4, self.head_dim // 32, 8)).transpose(2, 3).flatten(1)
        return self.pack_phases(b, out)


class _Arguments(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in (
            "weights", "cosine", "sine", "enter", "enter_bias", "leave", "leave_bias", "head", "guidance",
            "length", "state", "x", "qkv", "gated", "made", "meeting",
        )),
        ("eps", ctypes.c_float), ("scale", ctypes.c_float),
        ("b", ctypes.c_int), ("sides", ctypes.c_int), ("calls", ctypes.c_int),
    ]  # fmt: skip


class _InOne:
    """A stack over short sequences, its weights packed, and the kernel that runs all of it.

    Bfloat16; norms are multiplied into the products after them.
    """

    moves: bool

    def __init__(
        self,
        blocks: Sequence[Block],
        norm: Tensor,
        enter: tuple[Tensor, Tensor],
        leave: tuple[Tensor, Tensor],
        cos: Tensor,
        sin: Tensor,
        patch: int,
        read: tuple[int, int],
        heads: int,
        kv_heads: int,
        eps: float,
        make: Callable[[Geometry, str], cuda.Launch] | None = None,
        **sizes: Any,
    ) -> None:
        """norm [d], the last; enter, leave: weight [d, feat] and [out, d], each with its bias; cos, sin fp32
        [tokens, head_dim], of equal halves; patch: tokens of a sequence that are entered, its last; read:
        the first token that leaves, and how many do; sizes: of the geometry, where they are not to be the
        usual ones. Raises `hocket.kernels.cuda.Unavailable`.
        """
        first = blocks[0]
        self.geometry = g = Geometry(
            d=norm.shape[0], f=first.down.shape[1], heads=heads, kv_heads=kv_heads, head_dim=cos.shape[1],
            layers=len(blocks), tokens=cos.shape[0], patch=patch, feat=enter[0].shape[1], first=read[0],
            read=read[1], leave=leave[0].shape[0], moves=self.moves, **sizes,
        )  # fmt: skip
        self._launch = make(g, "flow") if make else g.kernel("flow", norm.device)
        self._weights = torch.cat([g.pack_block(b) for b in blocks])
        self._ends = *(t.contiguous() for t in enter), folded(leave[0], norm), leave[1].contiguous()
        self._tables = cos.float().contiguous(), sin.float().contiguous()
        self._meeting = torch.zeros(1, dtype=torch.int32, device=norm.device)
        self._eps = eps

    def _run(self, head: Tensor, x: Tensor, guidance: Tensor, length: Tensor) -> Tensor:
        """-> fp32 [sides * b, read * out], what left last."""
        g = self.geometry
        sides, calls, b = head.shape[:3]
        assert b <= g.streams
        assert calls == 1 or g.moves
        for tensor in (head, x, length):
            assert tensor.is_contiguous(), "rows are read without strides"
        rows = sides * b * g.tokens
        scratch = [head.new_empty(rows, n) for n in (g.d, g.qkv, g.f)]
        made = x.new_empty(sides * b, g.read * g.leave)
        tensors = (
            self._weights, *self._tables, *self._ends, head, guidance, length, x, *scratch, made,
            self._meeting,
        )  # fmt: skip
        addresses = [t.data_ptr() for t in tensors]
        self._launch(_Arguments(*addresses, self._eps, g.head_dim**-0.5, b, sides, calls))
        return made


class Flow(_InOne):
    """All estimates of a flow's velocity and the steps between them. Its twin:
    `hocket.models.voxcpm.patches.move`."""

    moves = True

    def __call__(self, head: Tensor, x: Tensor, guidance: Tensor, length: Tensor) -> None:
        """Move x along its velocities.

        head [sides, calls, b, tokens - patch, d]: tokens before those that move; two sides: conditioned,
        then not; x fp32 [b, patch * feat] is written in place; guidance fp32 [b], of no meaning with one
        side; length fp32 [calls, b]. See `guided_step_torch`.
        """
        self._run(head, x, guidance, length)


class Reading(_InOne):
    """Sequences read once. Its twin: `hocket.models.voxcpm.patches.encode_patches`."""

    moves = False

    def __call__(self, head: Tensor, x: Tensor) -> Tensor:
        """head [b, tokens - patch, d]: tokens before those that enter; x fp32 [b, patch * feat] -> [b, read *
        out] of the dtype of head."""
        return self._run(head[None, None], x, x, x).to(head.dtype)
