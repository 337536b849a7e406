"""One model over several devices that work in step: each holds some heads and some inner channels of every
layer, and what they make is added up twice a layer (Megatron-LM, arXiv 1909.08053).

Every rank runs the same calls with the same arguments. Sums are the same on all of them, to the last bit, and
so is what follows from them: no rank needs to be told what another has drawn.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from hocket.errors import StartupError


@dataclass(frozen=True, slots=True)
class Shard:
    """Which part of a model this process holds."""

    rank: int = 0
    size: int = 1
    group: Any = None  # torch.distributed.ProcessGroup; None: the default one

    def part(self, count: int, what: str) -> slice:
        """The share of `count` things. Raises StartupError when they cannot be shared evenly."""
        if count % self.size:
            raise StartupError(
                f"{count} {what} cannot be split over {self.size} devices; {self.size} must divide {count}"
            )
        each = count // self.size
        return slice(self.rank * each, (self.rank + 1) * each)

    def once(self, x: Tensor) -> Tensor:
        """x on the first rank, zeros on the others: what all ranks add to has it once in the sum."""
        return x if self.rank == 0 else torch.zeros_like(x)

    def total(self, x: Tensor) -> Tensor:
        """The sum over ranks of x, which may be overwritten; the same on every rank."""
        if self.size > 1:
            torch.distributed.all_reduce(x, group=self.group)
        return x


WHOLE = Shard()
