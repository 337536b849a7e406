"""Random weights in the layout of a published checkpoint: values by tensor name, and what writes them down.

Values depend on seed and tensor name only. Drawn `exact`, they depend on no machine, torch or NumPy version
either, because golden files are made from them; otherwise torch draws them on the device asked for.

A folder may hold DRAWN in place of its weights: names, shapes and a seed, from which `Drawn` makes each
tensor when it is read. So a model can be run that is larger than the disk.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from hocket.errors import StartupError

DRAWN = "model.drawn.json"
Shapes = dict[str, tuple[int, ...]]
Draw = Callable[[tuple[int, ...], bool], Tensor]  # shape, normal (else uniform in [0, 1))


def fill(
    name: str, shape: tuple[int, ...], seed: int, dtype: torch.dtype, device: torch.device | str, exact: bool
) -> Tensor:
    """Random values for one tensor, on `device` (exact: on the CPU). They are spread so that each tensor
    matters: the usual initial values (layer scales of 0.01, biases of 0) would hide a tensor that is misread
    or left out."""
    key = int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:8], "little") >> 1
    draw = _exact_draw(key) if exact else _torch_draw(key, device)
    leaf = name.rpartition(".")[2]
    if leaf == "initialized":
        return torch.ones(shape, dtype=dtype)
    if leaf == "cluster_usage":
        values = draw(shape, False) * 4 + 0.5
    elif leaf in ("embedding_sum", "embed_sum"):
        values = draw(shape, True)
    elif leaf in ("scale", "gamma", "alpha", "beta"):
        values = draw(shape, True) * 0.3
    elif len(shape) == 1:
        values = draw(shape, True) * 0.1 + 1 if leaf == "weight" else draw(shape, True) * 0.05
    else:
        values = draw(shape, True) / math.sqrt(math.prod(shape[1:]))
    return values.to(dtype)


def _exact_draw(key: int) -> Draw:
    """float64 draws that are the same everywhere.

    NumPy promises the raw stream of a bit generator across versions but not its distributions, and a normal
    made with libm may differ in its last bit between machines. So the normal here is the sum of the four
    16-bit quarters of a raw word, scaled to variance 1.
    """
    bits = np.random.Philox(key=key)

    def draw(shape: tuple[int, ...], normal: bool) -> Tensor:
        raw = np.asarray(bits.random_raw(math.prod(shape)))
        if not normal:
            return torch.from_numpy((raw >> np.uint64(11)) * 2.0**-53).reshape(shape)
        total = raw.view(np.uint16).reshape(-1, 4).sum(1, dtype=np.int64)
        return torch.from_numpy((total - 2 * 65535) * (math.sqrt(3) / 65536)).reshape(shape)

    return draw


def _torch_draw(key: int, device: torch.device | str) -> Draw:
    generator = torch.Generator(device).manual_seed(key)

    def draw(shape: tuple[int, ...], normal: bool) -> Tensor:
        make = torch.randn if normal else torch.rand
        return make(shape, generator=generator, device=device)

    return draw


def pair(name: str, *shape: int, transposed: bool = False) -> Shapes:
    """Weight and bias; output channels come first but in a transposed convolution."""
    return {f"{name}.weight": shape, f"{name}.bias": (shape[1 if transposed else 0],)}


def vectors(name: str, leaves: str, channels: int) -> Shapes:
    """Vectors of so many channels, their names separated by blanks."""
    return {f"{name}.{leaf}": (channels,) for leaf in leaves.split()}


def write_json(path: Path, value: Any) -> None:
    """`value` as a readable file, ending in a line feed."""
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", "utf-8")


# --- drawn when read -----------------------------------------------------------------------------


class _Plan(msgspec.Struct):
    """What DRAWN says."""

    seed: int
    dtype: str  # of torch
    shapes: dict[str, tuple[int, ...]]
    factors: dict[str, float]  # by tensor name; 1 where there is none
    zeros: dict[str, list[int]] = {}  # rows that are zero, by tensor name


def write_drawn(
    folder: Path,
    shapes: Shapes,
    factors: Mapping[str, float],
    seed: int,
    dtype: torch.dtype,
    zeros: Mapping[str, list[int]] = MappingProxyType({}),
) -> None:
    """Put DRAWN into the folder: weights without their gigabytes. factors scale tensors, zeros name rows of
    them that are zero."""
    plan = _Plan(seed, str(dtype).removeprefix("torch."), shapes, dict(factors), dict(zeros))
    (folder / DRAWN).write_bytes(msgspec.json.encode(plan))


class Drawn(Mapping[str, Tensor]):
    """The tensors that DRAWN promises, each drawn on the device when asked for. Raises StartupError."""

    def __init__(self, folder: Path, device: torch.device | str) -> None:
        self.path, self.device = folder / DRAWN, torch.device(device)
        try:
            self.plan = msgspec.json.decode(self.path.read_bytes(), type=_Plan)
        except (OSError, msgspec.DecodeError) as e:
            raise StartupError(f"cannot read {self.path}: {e}") from e
        self.dtype: torch.dtype = getattr(torch, self.plan.dtype)

    def __getitem__(self, name: str) -> Tensor:
        shape = self.plan.shapes.get(name)
        if shape is None:
            raise StartupError(f"tensor {name!r} is missing from {self.path}")
        if self.device.type == "meta":
            return torch.empty(shape, dtype=self.dtype, device="meta")
        values = fill(name, shape, self.plan.seed, self.dtype, self.device, False)
        values.mul_(self.plan.factors.get(name, 1.0))
        for row in self.plan.zeros.get(name, ()):
            values[row] = 0
        return values

    def __contains__(self, name: object) -> bool:
        return name in self.plan.shapes

    def __iter__(self) -> Iterator[str]:
        return iter(self.plan.shapes)

    def __len__(self) -> int:
        return len(self.plan.shapes)
