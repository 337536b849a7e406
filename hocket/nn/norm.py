"""Normalisation whose rounding follows the published models."""

from __future__ import annotations

from hocket.kernels.norm import rms_norm

__all__ = ["rms_norm"]
