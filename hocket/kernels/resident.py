"""Decoder blocks in kernels that stay on the GPU: phases.cuh, in CUDA C++.

At a small batch a step of a decoder is a long chain of short products. Launched one by one they are bound by
what lies between kernels and by the latency of each, not by memory. Here one launch runs the whole chain
while the weights stream through it. `Predictor` runs all passes of a code predictor, drawing included;
`Backbone` runs one token a row through all layers over a paged cache. Their twins are the same steps kernel
by kernel: `hocket.nn.talker.FrameTalker._predict_by_layers` and `._backbone`.
"""

from __future__ import annotations

import ctypes
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
    """Weights of one decoder block: `hocket.nn.transformer.LayerWeights` says what each is."""

    @property
    def norm_in(self) -> Tensor: ...
    @property
    def qkv(self) -> Tensor: ...
    @property
    def q_norm(self) -> Tensor: ...
    @property
    def k_norm(self) -> Tensor: ...
    @property
    def out(self) -> Tensor: ...
    @property
    def norm_mlp(self) -> Tensor: ...
    @property
    def gate_up(self) -> Tensor: ...
    @property
    def down(self) -> Tensor: ...


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
    marked: bool = False  # rows carry marks in place of meetings
    measure: str = ""  # a switch that shows where time goes: NO_MEETINGS, NO_WEIGHTS, STAMPS

    @property
    def defines(self) -> dict[str, int]:
        """The kernel's compile-time constants."""
        values = {
            "HALF": int(self.half), "D": self.d, "F": self.f, "HEADS": self.heads, "KV": self.kv_heads,
            "HEAD": self.head_dim, "LAYERS": self.layers, "GRID": self.grid, "WARPS": self.warps,
            "SLOT": self.slot, "SLOTS": self.slots, "SHARED_BYTES": self.shared_bytes,
            "CONSTANTS": self.constants, "MARKED": int(self.marked),
        }  # fmt: skip
        rest = {"TOKENS": self.tokens, "VOCAB": self.vocab, self.measure: 1}
        return values | {name: value for name, value in rest.items() if name and value}

    @property
    def even(self) -> bool:
        """Whether every program has features of every product. Marks need it: a program that gives nothing is
        waited for by nobody, and what it still reads may be written anew."""
        widths = (self.heads + 2 * self.kv_heads) * self.head_dim, self.d, self.f, self.vocab
        return all(n % (8 * self.grid) == 0 for n in widths)

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
        columns = (
            self._tiles((self.heads + 2 * self.kv_heads) * self.head_dim), self._tiles(self.d),
            2 * self._tiles(self.f), self._tiles(self.vocab),
        )  # fmt: skip
        sums = self.warps * 16 * 8 * max(c | 1 for c in columns) * 4
        words = self.warps * (16 + 1 + 1 + 2) * 4
        return self.slots * self.slot + sums + words + 2 * 8 * self.slots + 32 + self.constants

    def _tiles(self, n: int) -> int:
        return -(-n // (8 * self.grid))

    def pack(self, *weights: Tensor) -> Tensor:
        """Weights [n, k] of one product, or of two side by side, in the order the kernel reads them; flat."""
        values = 16 // weights[0].element_size()
        n, k = weights[0].shape
        tiles, share = self._tiles(n), -(-(k // (4 * values)) // self.warps)
        room = self.slot // (self.warps * tiles * len(weights) * 512)
        depth = max(r for r in range(1, share + 1) if share % r == 0 and (r <= room or r == 1))
        padded = weights[0].new_zeros(len(weights), self.grid * tiles * 8, share * self.warps * 4 * values)
        for to, weight in zip(padded, weights, strict=True):
            to[:n, :k] = weight
        cut = padded.view(
            len(weights), self.grid, tiles, 8, share // depth, depth, self.warps, 4, values
        )  # which, program, tile, feature, message, r, warp, quarter, value
        x = cut.permute(1, 4, 6, 5, 0, 2, 3, 7, 8).flatten(4, 5)  # …, column, feature, quarter, value
        pairs = x.shape[4] // 2
        if not self.half or not pairs:
            return x.flatten()
        woven = x[:, :, :, :, : 2 * pairs].unflatten(4, (pairs, 2)).unflatten(-1, (2, 2, 2))
        woven = woven.permute(0, 1, 2, 3, 4, 8, 6, 7, 9, 5, 10).flatten(4, 5).flatten(-3)
        return torch.cat([woven, x[:, :, :, :, 2 * pairs :]], dim=4).flatten()

    def pack_block(self, b: Block) -> list[Tensor]:
        """A block's weights, packed, in the order of their phases; norms before a product are in it."""
        gate_up = folded(b.gate_up, b.norm_mlp).chunk(2)
        parts = (folded(b.qkv, b.norm_in),), (b.out,), gate_up, (b.down,)
        return [self.pack(*weights) for weights in parts]

    def kernel(self, name: str, entry: str, device: torch.device) -> cuda.Launch:
        """What launches a kernel of this geometry. Raises `hocket.kernels.cuda.Unavailable`."""
        text = cuda.source("device.cuh", "phases.cuh", name)
        cubin = cuda.compile_cubin(text, self.defines, torch.cuda.get_device_capability(device))
        kernel = cuda.Kernel(cubin, entry, device, self.shared_bytes)
        return lambda arguments: kernel.launch(self.grid, self.threads, arguments)


def folded(weight: Tensor, norm: Tensor) -> Tensor:
    """A product's weight [n, k] times that of the norm [k] before it, rounded once.

    What is left of the norm is one factor a row, so it can follow the product. The twin rounds normalised
    rows twice, here rows are taken as they are and weights rounded once more: the error against exact
    arithmetic is no larger.
    """
    return (weight.float() * norm.float()).to(weight.dtype)


FEW = 0  # streams up to which a predictor's rows carry marks instead; not seen right on a GPU yet


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
            "weights", "norms", "cosine", "sine", "embed", "first", "x", "qkv", "attended", "gated", "logits",
            "all_logits", "kv", "meeting", "temperature", "top_k", "slots", "key", "codes",
        )),
        *((f"{name}_stride", ctypes.c_longlong) for name in ("temperature", "top_k", "key", "codes")),
        ("eps", ctypes.c_float), ("scale", ctypes.c_float), ("b", ctypes.c_int),
    ]  # fmt: skip


class Predictor:
    """A code predictor's weights, packed, and the kernel that runs its passes."""

    def __init__(
        self,
        blocks: Sequence[Block],
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
        self.few = FEW if g.even else 0  # streams up to which rows carry marks
        geometries = [g, replace(g, marked=True)][: 2 if self.few else 1]
        if make is None:
            launches = [k.kernel("predictor.cu", "predict", norm.device) for k in geometries]
        else:
            launches = [make(k, "predictor.cu") for k in geometries]
        self._launch, self._launch_few = launches[0], launches[-1]
        self._few = _scratch(g, 2 * self.few, norm, marked=True)
        self._weights = torch.cat(
            [*(t for b in blocks for t in g.pack_block(b)), *(g.pack(folded(head, norm)) for head in heads)]
        )
        self._norms = torch.cat([t for b in blocks for t in (b.q_norm, b.k_norm)])
        self._cos, self._sin, self._embed = cos.contiguous(), sin.contiguous(), embed
        self._meeting = torch.zeros(1, dtype=torch.int32, device=norm.device)
        self._marks = torch.ones_like(self._meeting)  # the next: what was never written is marked 0
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
        assert x.is_contiguous()
        assert key.stride(1) == codes.stride(1) == 1
        few = b <= self.few
        rows = self._few if few else _scratch(g, 2 * b, x)
        kv = x.new_empty(g.layers, b, g.heads, 2, g.tokens, g.head_dim)
        tensors = (
            self._weights, self._norms, self._cos, self._sin, self._embed, x, *rows, logits, kv,
            self._marks if few else self._meeting, o.temperature, o.top_k, slots, key, codes,
        )  # fmt: skip
        strides = o.temperature.stride(0), o.top_k.stride(0), key.stride(0), codes.stride(0)
        launch = self._launch_few if few else self._launch
        launch(_PredictArguments(*_addresses(tensors), *strides, self._eps, g.head_dim**-0.5, b))


# --- a backbone ----------------------------------------------------------------------------------


class _AdvanceArguments(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in (
            "weights", "norms", "cosine", "sine", "x", "qkv", "attended", "gated", "out", "kv", "blocks",
            "slots", "position", "index", "meeting", "stamps",
        )),
        *((name, ctypes.c_longlong) for name in ("layer_stride", "kv_stride", "blocks_stride")),
        ("eps", ctypes.c_float), ("scale", ctypes.c_float), ("b", ctypes.c_int),
        ("block_tokens", ctypes.c_int),
    ]  # fmt: skip


class Backbone:
    """A backbone's weights, packed, and the kernel that runs one token a row through its layers."""

    def __init__(
        self,
        blocks: Sequence[Block],
        norm: Tensor,
        heads: int,
        kv_heads: int,
        eps: float,
        make: Maker | None = None,
        **sizes: Any,
    ) -> None:
        """norm [d]. sizes: of the geometry, where they are not to be the usual ones. Raises
        `hocket.kernels.cuda.Unavailable`."""
        first = blocks[0]
        usual = {"slot": 49152, "slots": 3}  # two halves of a gated MLP twice as wide as a predictor's
        self.geometry = g = Geometry(
            d=norm.shape[0], f=first.down.shape[1], heads=heads, kv_heads=kv_heads,
            head_dim=first.out.shape[1] // heads, layers=len(blocks), half=norm.dtype == torch.bfloat16,
            **usual | sizes,
        )  # fmt: skip
        self._launch = make(g, "backbone.cu") if make else g.kernel("backbone.cu", "advance", norm.device)
        self._weights = torch.cat([t for b in blocks for t in g.pack_block(b)])
        self._norms = torch.cat([*(t for b in blocks for t in (b.q_norm, b.k_norm)), norm])
        self._meeting = torch.zeros(1, dtype=torch.int32, device=norm.device)
        self._eps = eps

    def __call__(
        self, x: Tensor, cos: Tensor, sin: Tensor, kv: Tensor, blocks: Tensor, slots: Tensor,
        position: Tensor, index: Tensor, stamps: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """x [b, d], overwritten -> normalised hidden [b, d].

        cos, sin [b, head_dim] of x's dtype; kv [layers, 2, blocks, block_tokens, kv_heads, head_dim]; the
        others as `hocket.kernels.attention.paged_decode_torch` takes them.
        """
        g, b = self.geometry, x.shape[0]
        assert x.is_contiguous()
        assert kv[0, 0].is_contiguous()
        assert cos.dtype == x.dtype, "rotation rounds as x does"
        _, qkv, attended, gated = _scratch(g, b, x)
        out = torch.empty_like(x)
        tensors = (
            self._weights, self._norms, cos, sin, x, qkv, attended, gated, out, kv, blocks, slots, position,
            index, self._meeting, stamps,
        )  # fmt: skip
        strides = kv.stride(0), kv.stride(1), blocks.stride(0)
        self._launch(
            _AdvanceArguments(*_addresses(tensors), *strides, self._eps, g.head_dim**-0.5, b, kv.shape[3])
        )
        return out


def _scratch(g: Geometry, rows: int, like: Tensor, marked: bool = False) -> list[Tensor]:
    """x, qkv, attended, gated of so many rows, and logits if there is a head; with room for marks, zeroed."""
    heads = (g.heads + 2 * g.kv_heads) * g.head_dim, g.heads * g.head_dim
    widths = (g.d, *heads, g.f, *([g.vocab] if g.vocab else []))
    if marked:
        words = [width * like.element_size() // 4 for width in widths]
        return [torch.zeros(rows, n, 2, dtype=torch.int32, device=like.device) for n in words]
    return [like.new_empty(rows, width) for width in widths]


def _addresses(tensors: Sequence[Tensor | None]) -> list[int | None]:
    return [None if t is None else t.data_ptr() for t in tensors]
