"""Host values on their way to a device, without waiting for what the device is doing."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def to_device(values: np.ndarray | Sequence[int], device: torch.device) -> Tensor:
    """A tensor of `values` on the device; ints become int64.

    On CUDA the copy goes through pinned memory and is only queued: `torch.tensor(values, device=...)` would
    wait until every step launched before it has finished.
    """
    host = torch.as_tensor(values)
    if device.type != "cuda":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)
