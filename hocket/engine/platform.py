"""Which kind of accelerator this process sees, as profiles name it, and its PyTorch device type."""

from __future__ import annotations

import importlib.util

import torch

DEVICE_TYPES = {"cuda": "cuda", "rocm": "cuda", "xpu": "xpu", "npu": "npu", "cpu": "cpu"}
"""Platform name in profiles -> device type in PyTorch. ROCm builds speak of their devices as `cuda`."""

PLATFORMS = tuple(DEVICE_TYPES)


def current_platform() -> str:
    """The platform of the accelerator in use: one of `PLATFORMS`, "cpu" if there is none."""
    if torch.cuda.is_available():
        return "rocm" if torch.version.hip else "cuda"
    if torch.xpu.is_available():
        return "xpu"
    if importlib.util.find_spec("torch_npu") is not None:
        import torch_npu  # an optional package; it adds the device to torch when it is imported

        if torch_npu.npu.is_available():
            return "npu"
    return "cpu"
