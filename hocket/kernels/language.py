"""A language model's layers for one token a row in one launch: language.cu on clusters.cuh.

At few rows such a step is a chain of short products, bound by what lies between kernels and by the latency of
each; here weights stream on while the chain runs. Its twin are the layers one by one, with
`hocket.kernels.attention.paged_decode`: heads are not normalised, and rotated in fp32.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hocket.kernels import cuda
from hocket.kernels.clusters import Cut
from hocket.kernels.resident import Block

USUAL: dict[str, Any] = {"tiles": 2, "several": False, "slots": 9}


class Geometry(Cut):
    """Of up to `8 * tiles` rows."""

    @property
    def more_bytes(self) -> int:
        return self.warps * (self.head_dim + 2) * 4


class _Arguments(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in (
            "weights", "cosine", "sine", "x", "qkv", "attended", "gated", "kv", "blocks", "slots", "position",
            "index", "meeting",
        )),
        *((name, ctypes.c_longlong) for name in ("layer_stride", "kv_stride", "blocks_stride")),
        ("eps", ctypes.c_float), ("scale", ctypes.c_float),
        ("b", ctypes.c_int), ("block_tokens", ctypes.c_int),
    ]  # fmt: skip


class Language:
    """Layers, packed, and the kernel that runs one token a row through them. Bfloat16."""

    def __init__(
        self,
        blocks: Sequence[Block],
        heads: int,
        kv_heads: int,
        eps: float,
        make: Callable[[Geometry, str], cuda.Launch] | None = None,
        **sizes: Any,
    ) -> None:
        """sizes: of the geometry, where they are not to be the usual ones. Raises
        `hocket.kernels.cuda.Unavailable`."""
        first = blocks[0]
        self.geometry = g = Geometry(
            d=first.down.shape[0], f=first.down.shape[1], heads=heads, kv_heads=kv_heads,
            head_dim=first.out.shape[1] // heads, layers=len(blocks), **USUAL | sizes,
        )  # fmt: skip
        device = first.down.device
        self._launch = make(g, "language") if make else g.kernel("language", device)
        self._weights = torch.cat([g.pack_block(b) for b in blocks])
        self._meeting = torch.zeros(1, dtype=torch.int32, device=device)
        self._eps = eps

    @property
    def most_rows(self) -> int:
        """That a launch can take."""
        return 8 * self.geometry.tiles

    def __call__(
        self, x: Tensor, cos: Tensor, sin: Tensor, kv: Tensor, blocks: Tensor, slots: Tensor,
        position: Tensor, index: Tensor,
    ) -> None:  # fmt: skip
        """x [b, d] is overwritten by what the last layer gives, not normalised.

        cos, sin fp32 [b, head_dim]; kv [layers, 2, blocks, block_tokens, kv_heads, head_dim]; the others as
        `hocket.kernels.attention.paged_decode_torch` takes them.
        """
        g, b = self.geometry, x.shape[0]
        assert b <= self.most_rows
        assert kv[0, 0].is_contiguous()
        for tensor in (x, cos, sin):
            assert tensor.is_contiguous(), "rows are read without strides"
        assert cos.dtype == sin.dtype == torch.float32
        widths = g.qkv, g.heads * g.head_dim, g.f
        scratch = [x.new_empty(b, n) for n in widths]
        tensors = self._weights, cos, sin, x, *scratch, kv, blocks, slots, position, index, self._meeting
        addresses = [t.data_ptr() for t in tensors]
        strides = kv.stride(0), kv.stride(1), blocks.stride(0)
        self._launch(_Arguments(*addresses, *strides, self._eps, g.head_dim**-0.5, b, kv.shape[3]))
