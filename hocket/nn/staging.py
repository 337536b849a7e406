"""Host values on their way to a device, without waiting for what the device is doing."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def to_device(values: np.ndarray | Sequence[int] | Tensor, device: torch.device) -> Tensor:
    """A tensor of `values` on the device; ints become int64.

    On CUDA the copy goes through pinned memory and is only queued: `torch.tensor(values, device=...)` would
    wait until every step launched before it has finished.
    """
    host = torch.as_tensor(values)
    if device.type != "cuda":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)


def to_host(rows: Tensor) -> np.ndarray:
    """Rows as an array; bf16, which NumPy lacks, as its bits in uint16. Waits for the device."""
    host = rows.contiguous().cpu()
    return host.view(torch.uint16).numpy() if host.dtype is torch.bfloat16 else host.numpy()


def from_host(rows: np.ndarray, device: torch.device, dtype: torch.dtype) -> Tensor:
    """What `to_host` gave, on the device in another dtype."""
    host = torch.as_tensor(np.require(rows, requirements=["C", "W"]))  # what a message brings is read-only
    if host.dtype is torch.uint16:
        host = host.view(torch.bfloat16)
    return to_device(host, device).to(dtype)
