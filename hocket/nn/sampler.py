"""Drawing codes: options, step variants and the counter-based noise. See `hocket.kernels.draw`."""

from __future__ import annotations

from hocket.kernels.draw import (
    NARROW,
    NUCLEUS,
    WIDE,
    DrawOptions,
    Repetition,
    draw,
    draw_code,
    frame_normal,
    gumbel,
    mix,
    noise_key,
    penalise,
)

__all__ = [
    "NARROW",
    "NUCLEUS",
    "WIDE",
    "DrawOptions",
    "Repetition",
    "draw",
    "draw_code",
    "frame_normal",
    "gumbel",
    "mix",
    "noise_key",
    "penalise",
]
