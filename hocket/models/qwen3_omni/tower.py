"""What the two towers have in common: layers with a bias, and results kept by content."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import torch.nn.functional as F
from torch import Tensor

T = TypeVar("T")
KEPT_BYTES = 1 << 30  # of each tower: minutes of film, hours of sound


@dataclass(frozen=True, slots=True)
class Affine:
    """A matrix or kernel and its bias, or a LayerNorm's two vectors."""

    weight: Tensor
    bias: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """The product of rows x [..., d] and the matrix [n, d], and the bias -> [..., n]."""
        return F.linear(x, self.weight, self.bias)

    def norm(self, x: Tensor, eps: float) -> Tensor:
        """Rows x [..., d] normalised over d."""
        return F.layer_norm(x, x.shape[-1:], self.weight, self.bias, eps)


class Kept(Generic[T]):
    """Arrays by content key, of at most `limit_bytes` together; the one longest unused is forgotten first.

    A chat that goes on sends its earlier pictures and recordings again.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._made: OrderedDict[bytes, np.ndarray] = OrderedDict()
        self._bytes = 0

    def get(
        self, items: Sequence[T], key: Callable[[T], bytes], make: Callable[[list[T]], Sequence[np.ndarray]]
    ) -> list[np.ndarray]:
        """The array of each item; `make` is called once, for those that are not known, each once."""
        new = {key(item): item for item in items if key(item) not in self._made}
        for k, made in zip(new, make(list(new.values())) if new else [], strict=True):
            self._made[k] = made
            self._bytes += made.nbytes
        results = []
        for item in items:
            results.append(self._made[key(item)])
            self._made.move_to_end(key(item))
        while self._bytes > self.limit_bytes:
            self._bytes -= self._made.popitem(last=False)[1].nbytes
        return results
