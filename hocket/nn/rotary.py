"""Rotary positions in the half-split ("rotate half") form. Source: RoFormer, arXiv 2104.09864."""

from __future__ import annotations

import torch
from torch import Tensor

from hocket.kernels.attention import rotate_torch as apply_rotary


def rotary_tables(
    head_dim: int, theta: float, positions: Tensor, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Cosines and sines for integer positions [...] -> two tensors [..., 1, head_dim] of `dtype`.

    Angles are fp32 whatever the dtype: in half precision position 300 and 301 would coincide.
    """
    angle = positions[..., None, None].float() * frequencies(
        head_dim, theta, positions.device
    )  # [..., 1, d / 2]
    angle = torch.cat([angle, angle], dim=-1)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def mrope_tables(
    frequency: Tensor, sections: tuple[int, int, int], position: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Tables of positions in time, height and width: fp32 [..., 3] -> two tensors [..., 1, head_dim].

    frequency fp32 [head_dim / 2]; `sections` says how many of them follow each. They take turns (time,
    height, width, time, …) as long as the sections of height and width last; the others follow time.
    Source: transformers 5.17.0: models/qwen3_omni_moe `apply_interleaved_mrope`.
    """
    axis = torch.zeros(frequency.shape[0], dtype=torch.int64, device=frequency.device)
    for k in (1, 2):
        axis[k : 3 * sections[k] : 3] = k
    angle = position.index_select(-1, axis)[..., None, :] * frequency  # [..., 1, d / 2]
    angle = torch.cat([angle, angle], dim=-1)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def frequencies(head_dim: int, theta: float, device: torch.device) -> Tensor:
    """Radians a position of each pair: fp32 [head_dim / 2]."""
    even = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32)
    return 1.0 / theta ** (even / head_dim)


__all__ = ["apply_rotary", "frequencies", "mrope_tables", "rotary_tables"]
