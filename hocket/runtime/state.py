"""Makes, clears and copies the tensors that a program declares as its state.

A program says what it keeps (`Declared` leaves in a dataclass); only here do those become tensors.
Which slot belongs to whom is not known here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from hocket.core import Declared, leaves, map_leaves
from hocket.kernels.rows import RowTable, fill_rows, give_rows, take_row


@dataclass(frozen=True)
class State:
    """The tensors of one stage, beside the declaration they were made from (trees of one shape)."""

    declaration: Any
    tensors: Any  # what the program's functions take as `state`

    @cached_property
    def per_slot(self) -> list[tuple[Declared, Tensor]]:
        """Each tensor with one row a slot."""
        pairs = zip(leaves(self.declaration), leaves(self.tensors), strict=True)
        return [(declared, tensor) for declared, tensor in pairs if declared.per_slot]

    @cached_property
    def rows(self) -> RowTable:
        """The same, as what sets and copies whole rows takes it."""
        return RowTable([tensor for _, tensor in self.per_slot], [d.fill for d, _ in self.per_slot])


def allocate(
    declaration: Any,
    *,
    slots: int,
    device: torch.device | str,
    blocks: int = 0,
    block_tokens: int = 16,
    max_blocks: int = 0,
    poison: bool = False,
) -> State:
    """Tensors for `declaration`, each at its declared fill; `slots` counts row 0.

    poison: floating-point memory that belongs to no slot is NaN instead, to show a read of what nobody
    wrote. For tests.
    """
    sizes = {"slots": slots, "blocks": blocks, "block_tokens": block_tokens, "max_blocks": max_blocks}

    def make(leaf: Declared) -> Tensor:
        shape = [sizes[size] if isinstance(size, str) else size for size in leaf.shape]
        poisoned = poison and leaf.dtype.is_floating_point and not leaf.per_slot
        if leaf.fill == 0 and not poisoned:  # zeros cost no memory on a CPU until they are written
            return torch.zeros(shape, dtype=leaf.dtype, device=device)
        return torch.full(shape, float("nan") if poisoned else leaf.fill, dtype=leaf.dtype, device=device)

    return State(declaration, map_leaves(make, declaration))


def reset(state: State, slots: Tensor) -> None:
    """Set the rows of `slots` int64 [k] to their declared fill, as when a slot changes hands."""
    fill_rows(state.rows, slots)


def snapshot(state: State, slot: int) -> Tensor:
    """A copy of everything one slot holds, to be put back by `restore` into any slot."""
    return take_row(state.rows, slot)


def restore(state: State, slots: Sequence[int], rows: Sequence[Tensor]) -> None:
    """Write what `snapshot` copied into the rows of as many slots, in place."""
    give_rows(state.rows, slots, rows)
