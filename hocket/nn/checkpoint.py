"""A checkpoint's tensors by name, from one safetensors file or from several with an index."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hocket.errors import StartupError
from hocket.nn.synthetic import DRAWN, Drawn


class Tensors(Mapping[str, Tensor]):
    """A checkpoint's tensors by name, read from disk to the device when asked for, in the file's dtype.

    names: the files; by default model.safetensors, or those that its index names.
    On the meta device they have shapes and no content, which is enough to plan memory.
    """

    def __init__(self, folder: Path, device: torch.device | str, names: Sequence[str] = ()) -> None:
        self.folder = folder
        self._meta = torch.device(device).type == "meta"
        self._device = "cpu" if self._meta else str(device)
        self._files = {name: self._open(folder / name) for name in names or _file_names(folder)}
        self._where = {tensor: name for name, file in self._files.items() for tensor in file.keys()}  # noqa: SIM118  no iterator

    def _open(self, path: Path) -> safe_open:
        try:
            return safe_open(path, framework="pt", device=self._device)
        except (OSError, SafetensorError) as e:
            raise StartupError(f"cannot read {path}: {e}") from e

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._where:
            raise StartupError(f"tensor {name!r} is missing from {self.folder / ' or '.join(self._files)}")
        tensor: Tensor = self._files[self._where[name]].get_tensor(name)
        return tensor.to("meta") if self._meta else tensor

    def __contains__(self, name: object) -> bool:
        return name in self._where

    def __iter__(self) -> Iterator[str]:
        return iter(self._where)

    def __len__(self) -> int:
        return len(self._where)


def _file_names(folder: Path) -> list[str]:
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return ["model.safetensors"]
    try:
        return sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, AttributeError) as e:
        raise StartupError(f"{index}: expected a JSON object with a weight_map") from e


def open_tensors(folder: Path, device: torch.device | str = "cpu") -> Mapping[str, Tensor]:
    """The tensors of model.safetensors, or of the files that model.safetensors.index.json names, or random
    ones where the folder says so (`hocket.nn.synthetic`).

    A missing file or tensor raises StartupError.
    """
    return Drawn(folder, device) if (folder / DRAWN).exists() else Tensors(folder, device)


class Reader:
    """Tensors under one prefix, in the forms that layers take, rounded to one dtype."""

    def __init__(self, tensors: Mapping[str, Tensor], prefix: str, dtype: torch.dtype) -> None:
        self.tensors, self.prefix, self.dtype = tensors, prefix, dtype

    def under(self, prefix: str) -> Reader:
        """A reader whose names begin with `prefix`, below this one's."""
        return Reader(self.tensors, f"{self.prefix}{prefix}.", self.dtype)

    def wide(self, name: str) -> Tensor:
        """fp32, to compute with."""
        return self.tensors[self.prefix + name].float()

    def __call__(self, name: str) -> Tensor:
        return self.tensors[self.prefix + name].to(self.dtype)

    def __contains__(self, name: str) -> bool:
        return self.prefix + name in self.tensors

    def stacked(self, *names: str) -> Tensor:
        """Matrices of one input as one matrix."""
        return torch.cat([self(f"{name}.weight") for name in names])

    def round(self, tensor: Tensor) -> Tensor:
        """A computed tensor in the reader's dtype."""
        return tensor.to(self.dtype).contiguous()
