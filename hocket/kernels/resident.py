"""Decoder blocks in kernels that stay on the GPU: phases.cuh, in CUDA C++.

At a small batch a step of a decoder is a long chain of short products. Launched one by one they are bound by
what lies between kernels and by the latency of each, not by memory. Here one launch runs the whole chain
while the weights stream through it. `Predictor` runs all passes of a code predictor, drawing included. Its
twin is the same steps kernel by kernel: `hocket.nn.talker.FrameTalker._predict_by_layers`.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from hocket.kernels import cuda
from hocket.kernels.choice import use_triton
from hocket.kernels.draw import DrawOptions


class Block(Protocol):
    """Weights of one decoder block: `hocket.nn.transformer.BlockWeights` says what each is."""

    @property
    def norm_in(self) -> Tensor: ...
    @property
    def qkv(self) -> Tensor: ...
    @property
    def out(self) -> Tensor: ...
    @property
    def norm_mlp(self) -> Tensor | None: ...
    @property
    def gate_up(self) -> Tensor: ...
    @property
    def down(self) -> Tensor: ...


class NormedBlock(Block, Protocol):
    """... of one whose heads are normalised: `hocket.nn.transformer.LayerWeights`."""

    @property
    def q_norm(self) -> Tensor: ...
    @property
    def k_norm(self) -> Tensor: ...


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """Sizes a kernel is compiled for, and how it cuts weights; phases.cuh computes the same."""

    d: int
    f: int
    heads: int
    kv_heads: int
    head_dim: int
    layers: int
    half: bool  # bfloat16, else fp32
    tokens: int = 0  # codebooks, and positions of a frame
    vocab: int = 0  # of each, or 0: the kernel has no head
    grid: int = 128  # programs, each with a multiprocessor of its own
    warps: int = 8  # that compute, in a program
    slot: int = 24576  # bytes of a ring's slot
    slots: int = 7
    cluster: int = 1  # programs that share features and split k, for many rows; 1: warps of a program do
    measure: str = ""  # a switch that shows where time goes: NO_MEETINGS, NO_WEIGHTS, STAMPS

    @property
    def defines(self) -> dict[str, int]:
        """The kernel's compile-time constants."""
        values = {
            "HALF": int(self.half), "D": self.d, "F": self.f, "HEADS": self.heads, "KV": self.kv_heads,
            "HEAD": self.head_dim, "LAYERS": self.layers, "GRID": self.grid, "WARPS": self.warps,
            "SLOT": self.slot, "SLOTS": self.slots, "SHARED_BYTES": self.shared_bytes,
            "CONSTANTS": self.constants, "WAITED": int(self.cluster > 1), "CLUSTER": self.cluster,
        }  # fmt: skip
        rest = {"TOKENS": self.tokens, "VOCAB": self.vocab, self.measure: 1}
        return values | {name: value for name, value in rest.items() if name and value}

    @property
    def threads(self) -> int:
        """Of a program: the warps that compute and the one that brings weights."""
        return 32 * self.warps + 32

    @property
    def constants(self) -> int:
        """Bytes of what a program keeps at hand."""
        heads = 2 * (self.layers + max(1, self.tokens)) * self.head_dim * (2 if self.half else 4)
        words = 4 * self.tokens + 8 if self.tokens else 4 * 256 + 24
        return -(-(heads + words) // 16) * 16

    @cached_property
    def shared_bytes(self) -> int:
        """Shared memory of a program."""
        if self.cluster > 1:
            rows = 64  # that are taken at a time
            held = max(math.prod(p.cut(self)) * 64 + 32 for p in self._products)
            parts = [
                max(p.parts(self) * p.finished(self) * 32 for p in self._products if p.deep == deep)
                for deep in (False, True)
            ]
            sums = rows * (held + sum(parts) + self.cluster * 4) + 3 * 8
        else:
            sums = self.warps * 16 * (8 * max(p.columns(self) | 1 for p in self._products) + 1) * 4
        words = self.warps * (1 + 1 + 2) * 4
        return self.slots * self.slot + sums + words + 2 * 8 * self.slots + 32 + self.constants

    @property
    def most_rows(self) -> float:
        """Rows that a launch can take. More than a product takes at a time go over its weights again, and
        then all of these must find room in the ring."""
        fits = self.cluster > 1 or all(p.cut(self)[0] <= self.slots for p in self._products)
        return float("inf") if fits else 16

    @property
    def _products(self) -> tuple[_Product, ...]:
        """Of a block, in the order of their phases, and the head's if there is one."""
        heads = self.heads * self.head_dim
        block = (
            _Product(heads + 2 * self.kv_heads * self.head_dim, self.d), _Product(self.d, heads, deep=True),
            _Product(self.f, self.d, together=2), _Product(self.d, self.f, deep=True),
        )  # fmt: skip
        return block + ((_Product(self.vocab, self.d),) if self.vocab else ())

    def pack_block(self, b: Block) -> list[Tensor]:
        """A block's weights, packed, in the order of their phases; norms before a product are in it."""
        gate_up = folded(b.gate_up, b.norm_mlp).chunk(2)
        parts = (folded(b.qkv, b.norm_in),), (b.out,), gate_up, (b.down,)
        return [p.pack(self, *weights) for p, weights in zip(self._products, parts, strict=False)]

    def pack_head(self, weight: Tensor) -> Tensor:
        """A head [vocab, d], packed."""
        return self._products[4].pack(self, weight)

    def roomy(self) -> Geometry:
        """The same with a ring in what shared memory is left: its slots take a k block of the widest product.

        Raises `hocket.kernels.cuda.Unavailable`.
        """
        slot = 512 * max(p.columns(self) for p in self._products)
        bare = replace(self, slot=slot, slots=0).shared_bytes
        slots = (SHARED - bare) // (slot + 16)  # and two barriers each
        if slots < 3:
            raise cuda.Unavailable(f"the weights' ring has {SHARED - bare} bytes of shared memory")
        return replace(self, slot=slot, slots=slots)

    def kernel(self, name: str, entry: str, device: torch.device) -> cuda.Launch:
        """What launches a kernel of this geometry. Raises `hocket.kernels.cuda.Unavailable`."""
        text = cuda.source("device.cuh", "grid.cuh", "phases.cuh", name)
        cubin = cuda.compile_cubin(text, self.defines, torch.cuda.get_device_capability(device))
        kernel = cuda.Kernel(cubin, entry, device, self.shared_bytes)
        if self.cluster > 1:
            kernel.check(self.grid, self.threads, self.cluster)
        return lambda arguments: kernel.launch(self.grid, self.threads, arguments, self.cluster)


@dataclass(frozen=True)
class _Product:
    """A product [rows, k] x [n, k], or `together` of them side by side, and how a geometry cuts it."""

    n: int
    k: int
    together: int = 1
    deep: bool = False  # more programs of a cluster share k

    def parts(self, g: Geometry) -> int:
        """Warps, or programs of a cluster, that k is split over."""
        return g.warps if g.cluster == 1 else min(g.cluster, 8 if self.deep else 4)

    def columns(self, g: Geometry) -> int:
        """Tiles of eight features that weights of a part of k have in a program."""
        groups = g.grid if g.cluster == 1 else g.grid // self.parts(g)
        return self.together * -(-self.n // (8 * groups))

    def finished(self, g: Geometry) -> int:
        """Tiles whose sums a program of a cluster gets."""
        return self.together * -(-self.columns(g) // self.together // self.parts(g))

    def cut(self, g: Geometry) -> tuple[int, int]:
        """Messages that a program's weights come in, and k blocks of a part of k in each."""
        share = -(-(self.k // (32 if g.half else 16)) // self.parts(g))
        room = g.slot // ((self.parts(g) if g.cluster == 1 else 1) * self.columns(g) * 512)
        depth = max(r for r in range(1, share + 1) if share % r == 0 and (r <= room or r == 1))
        return share // depth, depth

    def pack(self, g: Geometry, *weights: Tensor) -> Tensor:
        """Weights [n, k], one or `together`, in the order the kernel reads them; flat."""
        values = 16 // weights[0].element_size()
        tiles, parts, (messages, depth) = self.columns(g) // self.together, self.parts(g), self.cut(g)
        k = parts * messages * depth * 4 * values
        if g.cluster > 1:
            groups, units = g.grid // parts, self.n // 8
            group = torch.arange(groups)[:, None]
            tile = torch.arange(tiles)[None]
            there = tile < units // groups + (group < units % groups)
            first = group * (units // groups) + group.clamp(max=units % groups)
            index = torch.where(there, first + tile, units).to(weights[0].device)  # the last is zero
            padded = weights[0].new_zeros(self.together, (units + 1) * 8, k)
            for to, weight in zip(padded, weights, strict=True):
                to[: self.n, : self.k] = weight
            cut = padded.view(self.together, units + 1, 8, parts, messages, depth, 4, values)[:, index]
            # which, group, tile, feature, part, message, r, quarter, value
            return cut.permute(1, 4, 5, 6, 0, 2, 3, 7, 8).flatten()
        padded = weights[0].new_zeros(self.together, g.grid * tiles * 8, k)
        for to, weight in zip(padded, weights, strict=True):
            to[: self.n, : self.k] = weight
        cut = padded.view(
            self.together, g.grid, tiles, 8, messages, depth, parts, 4, values
        )  # which, program, tile, feature, message, r, warp, quarter, value
        x = cut.permute(1, 4, 6, 5, 0, 2, 3, 7, 8).flatten(4, 5)  # …, column, feature, quarter, value
        pairs = x.shape[4] // 2
        if not g.half or not pairs:
            return x.flatten()
        woven = x[:, :, :, :, : 2 * pairs].unflatten(4, (pairs, 2)).unflatten(-1, (2, 2, 2))
        woven = woven.permute(0, 1, 2, 3, 4, 8, 6, 7, 9, 5, 10).flatten(4, 5).flatten(-3)
        return torch.cat([woven, x[:, :, :, :, 2 * pairs :]], dim=4).flatten()


def folded(weight: Tensor, norm: Tensor | None) -> Tensor:
    """A product's weight [n, k] times that of the norm [k] before it, rounded once. None: it is so already.

    What is left of the norm is one factor a row, so it can follow the product. The twin rounds normalised
    rows twice, here rows are taken as they are and weights rounded once more: the error against exact
    arithmetic is no larger.
    """
    return weight if norm is None else (weight.float() * norm.float()).to(weight.dtype)


SHARED = 232448 - 1024  # bytes of shared memory that a program of Hopper may have, but for what is declared


def in_clusters(device: torch.device) -> dict[str, Any]:
    """Sizes of a geometry whose programs work in clusters of eight, as many as run on this device at a time.

    Raises `hocket.kernels.cuda.Unavailable` if few do.
    """
    cubin = cuda.compile_cubin(
        'extern "C" __global__ void nothing() {}', {}, torch.cuda.get_device_capability(device)
    )
    fit = cuda.Kernel(cubin, "nothing", device, SHARED).fitting(32 * Geometry.warps + 32, 8)
    if fit < 12:
        raise cuda.Unavailable(f"{fit} clusters of 8 programs run at a time")
    return {"grid": 8 * min(16, fit), "cluster": 8}


def obstacle(weight: Tensor) -> str | None:
    """Why kernels of this module cannot run over such weights, or None."""
    if not use_triton(weight) or not weight.is_cuda:
        return "kernels are off" if weight.is_cuda else "weights are not on a GPU"
    device = torch.cuda.get_device_properties(weight.device)
    if (device.major, device.minor) < (9, 0):
        return f"{device.name} is older than Hopper"
    if device.multi_processor_count < Geometry.grid:
        return f"{device.name} has {device.multi_processor_count} multiprocessors of {Geometry.grid}"
    return None if weight.dtype == torch.bfloat16 else f"in {weight.dtype} they are slow"


Maker = Callable[[Geometry, str], cuda.Launch]  # makes a kernel of a file; by default on the weights' device


# --- a code predictor ----------------------------------------------------------------------------


class _PredictArguments(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in (
            "weights", "norms", "cosine", "sine", "embed", "first", "fresh", "x", "middle", "qkv", "attended",
            "gated", "logits", "all_logits", "kv", "meeting", "temperature", "top_k", "slots", "key", "codes",
        )),
        *((f"{name}_stride", ctypes.c_longlong) for name in ("temperature", "top_k", "key", "codes")),
        ("eps", ctypes.c_float), ("scale", ctypes.c_float), ("b", ctypes.c_int),
    ]  # fmt: skip


class Predictor:
    """A code predictor's weights, packed, and the kernel that runs its passes."""

    def __init__(
        self,
        blocks: Sequence[NormedBlock],
        norm: Tensor,
        heads: Tensor,
        embed: Tensor,
        cos: Tensor,
        sin: Tensor,
        kv_heads: int,
        eps: float,
        make: Maker | None = None,
        **sizes: Any,
    ) -> None:
        """norm [d]; heads, embed [books - 1, vocab, d]; cos, sin [books, head_dim], tables of all positions.

        sizes: of the geometry, where they are not to be the usual ones. Raises
        `hocket.kernels.cuda.Unavailable`.
        """
        first, head_dim = blocks[0], cos.shape[1]
        self.geometry = g = Geometry(
            d=norm.shape[0], f=first.down.shape[1], heads=first.out.shape[1] // head_dim, kv_heads=kv_heads,
            head_dim=head_dim, layers=len(blocks), half=norm.dtype == torch.bfloat16, tokens=cos.shape[0],
            vocab=heads.shape[1], **sizes,
        )  # fmt: skip
        if g.cluster > 1 and "slot" not in sizes:
            self.geometry = g = g.roomy()
        self._launch = make(g, "predictor.cu") if make else g.kernel("predictor.cu", "predict", norm.device)
        self._weights = torch.cat(
            [
                *(t for b in blocks for t in g.pack_block(b)),
                *(g.pack_head(folded(head, norm)) for head in heads),
            ]
        )
        self._norms = torch.cat([t for b in blocks for t in (b.q_norm, b.k_norm)])
        self._cos, self._sin, self._embed = cos.contiguous(), sin.contiguous(), embed
        self._meeting = torch.zeros(1, dtype=torch.int32, device=norm.device)
        self._eps = eps

    def __call__(
        self,
        x: Tensor,
        o: DrawOptions,
        slots: Tensor,
        key: Tensor,
        codes: Tensor,
        logits: Tensor | None = None,
    ) -> None:
        """Draw codes[:, 1:]; codes int64 [b, books] is written.

        x [b, 2, d], the rows of the first pass. Options of all slots [slots]; slots int64 [b];
        key int64 [b, books], noise. Draws as `hocket.kernels.draw.draw_code_torch` does, without top-p.
        logits [b, books - 1, vocab], if given, takes those of each pass.
        """
        g, b = self.geometry, x.shape[0]
        assert 2 * b <= g.most_rows, "the ring is too small to take weights twice"
        assert x.is_contiguous()
        assert key.stride(1) == codes.stride(1) == 1
        widths = [*[g.d] * 3, (g.heads + 2 * g.kv_heads) * g.head_dim, g.heads * g.head_dim, g.f]
        sizes = [2 * b * width for width in (*widths, g.vocab)]
        # Programs in clusters wait for words: each lies there twice, and what nobody wrote has all bits set.
        room = [n * x.element_size() // 4 * (2 if g.cluster > 1 else 1) for n in sizes]
        words = torch.empty(sum(room), dtype=torch.int32, device=x.device)
        rows = (words.fill_(-1) if g.cluster > 1 else words).split(room)
        kv = x.new_empty(g.layers, b, g.heads, 2, g.tokens, g.head_dim)
        tensors = (
            self._weights, self._norms, self._cos, self._sin, self._embed, x, *rows, logits, kv,
            self._meeting, o.temperature, o.top_k, slots, key, codes,
        )  # fmt: skip
        strides = o.temperature.stride(0), o.top_k.stride(0), key.stride(0), codes.stride(0)
        self._launch(_PredictArguments(*_addresses(tensors), *strides, self._eps, g.head_dim**-0.5, b))


def _addresses(tensors: Sequence[Tensor | None]) -> list[int | None]:
    return [None if t is None else t.data_ptr() for t in tensors]
