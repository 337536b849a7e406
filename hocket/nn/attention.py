"""Attention over a paged key/value cache, in torch.

The cache of one layer is kv [2, blocks, block_tokens, kv_heads, head_dim]; see `hocket.core.PagedKV`.
Index tensors are computed once a step and shared by all layers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hocket.kernels.attention import attend_torch as attend


def kv_index(blocks: Tensor, position: Tensor, block_tokens: int) -> Tensor:
    """Flat cache rows of tokens: blocks int32 [b, max_blocks], position int64 [b, n] -> int64 [b, n]."""
    block = blocks.gather(1, position // block_tokens)
    return block.long() * block_tokens + position % block_tokens


def write_kv(kv: Tensor, index: Tensor, k: Tensor, v: Tensor) -> None:
    """Store k, v [b, n, kv_heads, head_dim] at flat rows index [b, n] of kv, in place."""
    flat = kv.flatten(1, 2)  # [2, rows, kv_heads, head_dim], a view
    flat[0].index_copy_(0, index.flatten(), k.flatten(0, 1))
    flat[1].index_copy_(0, index.flatten(), v.flatten(0, 1))


def causal_mask(position: Tensor, context: int) -> Tensor:
    """What each query may see: position int64 [b, n] -> bool [b, 1, n, context]."""
    key = torch.arange(context, device=position.device)
    return (key <= position[:, :, None])[:, None]


def paged_attention(q: Tensor, kv: Tensor, table: Tensor, mask: Tensor) -> Tensor:
    """Attend from q to the tokens in each row's blocks.

    q [b, n, heads, head_dim]; table int32 [b, m], the first m blocks of each row; mask bool
    [b, 1, n, m * block_tokens] -> [b, n, heads, head_dim]. Grouped-query; scale head_dim ** -0.5.
    Hidden tokens have no weight but must be finite (0 * NaN is NaN), so the pool starts as zeros.
    """
    b, m = table.shape
    k, v = kv[:, table.flatten().long()].unflatten(1, (b, m)).flatten(2, 3).transpose(2, 3)
    return attend(q, k, v, mask)


__all__ = ["attend", "causal_mask", "kv_index", "paged_attention", "write_kv"]
