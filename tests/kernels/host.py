"""CUDA C++ of hocket/kernels as a function of the CPU: compiled with host.h in place of device.cuh."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from hocket.kernels import cuda


def build(
    folder: Path, name: str, defines: Mapping[str, int], seed: int, base: str = "phases.cuh"
) -> cuda.Launch:
    """The kernel of `name`, on `base`; launching it runs the grid, warps in an order drawn from seed."""
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("a C++ compiler runs the kernel here")
    text, library = folder / "kernel.cc", folder / f"{name}.so"
    files = [file for file in ("grid.cuh", base, name) if file]
    text.write_text((Path(__file__).parent / "host.h").read_text() + cuda.source(*files))
    flags = ["-std=c++17", "-O1", "-shared", "-fPIC", "-w", "-U_FORTIFY_SOURCE"]
    subprocess.run(
        [compiler, *flags, *(f"-D{k}={v}" for k, v in defines.items()), "-o", str(library), str(text)],
        check=True,
    )
    run = ctypes.CDLL(str(library)).run

    def launch(arguments: ctypes.Structure) -> None:
        assert run(ctypes.byref(arguments), seed) == 0, "the grid cannot go on"

    return launch
