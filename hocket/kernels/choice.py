"""Which of a kernel and its torch twin a call takes.

Triton on CUDA and torch elsewhere, unless the environment variable HOCKET_KERNELS says `torch` (twins
everywhere) or `triton` (kernels everywhere; on a CPU under Triton's interpreter, for tests).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # PyTorch for CPU or macOS comes without it; the twins need none

    class _Absent:
        """Lets kernels be defined where they cannot run."""

        @staticmethod
        def jit(function: Any = None, **_: Any) -> Any:
            return (lambda f: f) if function is None else function

        constexpr = None

    triton = tl = _Absent()
    _AVAILABLE = False
else:
    _AVAILABLE = True

_WANTED = os.environ.get("HOCKET_KERNELS", "auto")
if _WANTED not in ("auto", "torch", "triton"):
    raise ValueError(f"HOCKET_KERNELS is {_WANTED!r}; known: auto, torch, triton")


def use_triton(x: Tensor) -> bool:
    """Whether calls on tensors that live where x does take the kernel."""
    return _AVAILABLE and (_WANTED == "triton" or (_WANTED == "auto" and x.is_cuda))


OVERLAP = False  # slower so far: docs/decisions, 2026-11-30


def overlap(x: Tensor) -> dict[str, bool]:
    """Launch options of a kernel that may start before the one before it has ended.

    Hopper's programmatic dependent launch: such a kernel calls `tl.extra.cuda.gdc_wait` before it reads
    or writes anything that another kernel touches; until then it may fetch weights.
    """
    if not (OVERLAP and x.is_cuda and torch.cuda.get_device_capability(x.device) >= (9, 0)):
        return {"PDL": False}
    return {"PDL": True, "launch_pdl": True}


@contextmanager
def compiling_ahead(threads: int = 16) -> Iterator[None]:
    """Compile the Triton kernels that are called inside, side by side; none is launched.

    What they would write stays as it was, so calls inside must not look up anything by what a kernel gives.
    Without Triton, or under its interpreter, kernels (if any) run as ever.
    """
    if not _AVAILABLE or triton.knobs.runtime.interpret:
        yield
        return
    from triton.runtime.jit import JITFunction

    launch = JITFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        return launch(self, *args, grid=grid, warmup=True, **options)

    JITFunction.run = run
    try:
        with ThreadPoolExecutor(threads) as pool, triton.AsyncCompileMode(pool):
            yield
    finally:
        JITFunction.run = launch


def next_power_of_2(n: int) -> int:
    """The least power of two that is at least `n`."""
    return 1 << max(n - 1, 0).bit_length()


__all__ = ["compiling_ahead", "next_power_of_2", "overlap", "tl", "triton", "use_triton"]
