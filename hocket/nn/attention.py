"""Attention over a paged key/value cache, in torch.

The cache of one layer is kv [2, blocks, block_tokens, kv_heads, head_dim]; see `hocket.core.PagedKV`.
Index tensors are computed once a step and shared by all layers.
"""

from __future__ import annotations

from torch import Tensor

from hocket.kernels.attention import attend_torch as attend


def kv_index(blocks: Tensor, slot: Tensor, position: Tensor, block_tokens: int) -> Tensor:
    """Flat cache rows of tokens: blocks int32 [slots, max_blocks]; slot, position int64 [m] -> int64 [m]."""
    block = blocks[slot, position // block_tokens]
    return block.long() * block_tokens + position % block_tokens


__all__ = ["attend", "kv_index"]
