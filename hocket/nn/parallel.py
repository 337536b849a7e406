"""One model over several devices that work in step: each holds some heads and some inner channels of every
layer, and what they make is added up twice a layer (Megatron-LM, arXiv 1909.08053).

Every rank runs the same calls with the same arguments. Sums are the same on all of them, to the last bit, and
so is what follows from them: no rank needs to be told what another has drawn.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hocket.errors import StartupError

PATIENCE = timedelta(minutes=15)  # for a rank whose weights take longer to read


@dataclass(frozen=True, slots=True)
class Shard:
    """Which part of a model this process holds."""

    rank: int = 0
    size: int = 1
    group: Any = None  # a backend of torch.distributed, see `join`; needed where size is above 1

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
            self.group.allreduce([x]).wait()
        return x

    def least(self, number: int, device: torch.device) -> int:
        """The smallest of the ranks' numbers. Each waits here for all others."""
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.MIN)
        x = torch.tensor([number], device=device)
        self.group.allreduce([x], options).wait()
        return int(x)


WHOLE = Shard()


def join(meeting: str, rank: int, size: int, device: torch.device) -> Shard:
    """Become one of `size` ranks; all of them name the same file, which is there for this alone.

    NCCL between CUDA devices, gloo on the CPU. Ranks may be processes, or threads of one: nothing is kept
    that a process has only one of. Raises StartupError for other devices.
    """
    store = dist.FileStore(meeting, size)  # type: ignore[attr-defined]  # documented, but not in its stubs' __all__
    if device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = PATIENCE
        return Shard(rank, size, dist.ProcessGroupNCCL(store, rank, size, options))
    if device.type == "cpu":
        return Shard(rank, size, dist.ProcessGroupGloo(store, rank, size, PATIENCE))
    raise StartupError(f"tensor_parallel works on cuda and cpu, not on {device.type}")
