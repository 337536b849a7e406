"""Results on their way from the device to the host.

A step's outputs are copied to pinned memory without waiting, and read when their event has fired.
Each entry remembers who owned its rows (slot and epoch), so a row that changed hands meanwhile is
dropped and can never reach another request. On a CPU results are there at once.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

_HALF = (torch.bfloat16, torch.float16)  # NumPy has no bfloat16, and what leaves the device is small


@dataclass(slots=True)
class Owner:
    """Whose a row of a step is: the slot, its epoch at launch, and what the runner keeps for it."""

    slot: int
    epoch: int
    task: Any


@dataclass(slots=True)
class _Entry:
    owners: list[Owner]
    tensors: list[Tensor]
    pinned: list[Tensor]  # the memory that they are views of; empty on a CPU
    event: Any  # torch.cuda.Event, or None on a CPU


class OutputRing:
    """At most `depth` steps in flight; the oldest comes out first."""

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self._entries: deque[_Entry] = deque()
        # Pinned memory and events are used again: to make either costs more than a step's copy.
        self._pinned: defaultdict[tuple[torch.dtype, int], list[Tensor]] = defaultdict(list)
        self._events: list[Any] = []

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def full(self) -> bool:
        return len(self._entries) >= self.depth

    @property
    def readable(self) -> bool:
        """Whether the oldest step's rows are there."""
        return bool(self._entries) and (self._entries[0].event is None or self._entries[0].event.query())

    def push(self, owners: list[Owner], tensors: list[Tensor]) -> None:
        """Rows i of all tensors belong to owners[i]; further rows are padding and are left behind."""
        event, pinned = None, []
        tensors = [t.float() if t.dtype in _HALF else t for t in tensors]
        if tensors[0].is_cuda:
            tensors = [t[: len(owners)] for t in tensors]
            pinned = [self._pin(t.dtype, t.numel()) for t in tensors]
            tensors = [
                memory[: t.numel()].view(t.shape).copy_(t, non_blocking=True)
                for memory, t in zip(pinned, tensors, strict=True)
            ]
            event = self._events.pop() if self._events else torch.cuda.Event()
            event.record()
        self._entries.append(_Entry(owners, tensors, pinned, event))

    def pop(self, *, wait: bool) -> tuple[list[Owner], list[np.ndarray]] | None:
        """The oldest step's rows if they are there, or None."""
        if not self._entries:
            return None
        entry = self._entries[0]
        if entry.event is None:
            self._entries.popleft()
            return entry.owners, [t.numpy() for t in entry.tensors]
        if wait:
            entry.event.synchronize()
        elif not entry.event.query():
            return None
        self._entries.popleft()
        self._events.append(entry.event)
        rows = [t.numpy().copy() for t in entry.tensors]  # receivers keep them, the memory is used again
        for memory in entry.pinned:
            self._pinned[memory.dtype, len(memory)].append(memory)
        return entry.owners, rows

    def _pin(self, dtype: torch.dtype, count: int) -> Tensor:
        """Pinned memory of at least `count` elements, flat."""
        size = 1 << max(count - 1, 0).bit_length()  # few sizes, so that memory is found again
        free = self._pinned[dtype, size]
        return free.pop() if free else torch.empty(size, dtype=dtype, pin_memory=True)
