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


def frequencies(head_dim: int, theta: float, device: torch.device) -> Tensor:
    """Radians a position of each pair: fp32 [head_dim / 2]."""
    even = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32)
    return 1.0 / theta ** (even / head_dim)


__all__ = ["apply_rotary", "frequencies", "rotary_tables"]
