"""How kernels on clusters.cuh cut the weights of decoder blocks, and how they are compiled."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from hocket.kernels import cuda
from hocket.kernels.resident import Block, folded


@dataclass(frozen=True, kw_only=True)
class Cut:
    """Sizes a kernel is compiled for, and how it cuts weights; clusters.cuh computes the same."""

    d: int
    f: int
    heads: int
    kv_heads: int
    head_dim: int
    layers: int
    tiles: int  # of eight rows, that most products take at a time
    several: bool  # there may be more rows than that
    grid: int = 128  # programs, each with a multiprocessor of its own
    cluster: int = 2  # of them write into each other's shared memory; of 4 an H200 has room for 30 only
    warps: int = 8  # that compute, in a program
    slot: int = 16384  # bytes of a ring's slot
    slots: int = 8
    measure: str = ""  # a switch that shows where time goes: NO_MEETINGS, NO_WEIGHTS

    @property
    def defines(self) -> dict[str, int]:
        """The kernel's compile-time constants."""
        values = {
            "HALF": 1, "D": self.d, "F": self.f, "HEADS": self.heads, "KV": self.kv_heads,
            "HEAD": self.head_dim, "LAYERS": self.layers, "TILES": self.tiles, "SEVERAL": int(self.several),
            "OUT_PARTS": self.out_parts, "OUT_TILES": self.out_tiles, "GRID": self.grid,
            "CLUSTER": self.cluster, "WARPS": self.warps, "SLOT": self.slot, "SLOTS": self.slots,
            "SHARED_BYTES": self.shared_bytes,
        }  # fmt: skip
        return values | ({self.measure: 1} if self.measure else {})

    @property
    def out_parts(self) -> int:
        """Of a program's k in the product after attention: one for each warp."""
        return self.warps

    @property
    def out_tiles(self) -> int:
        """Of eight rows, that it takes at a time."""
        return self.tiles

    @property
    def threads(self) -> int:
        """Of a program: the warps that compute and the one that brings weights."""
        return 32 * self.warps + 32

    @property
    def qkv(self) -> int:
        """Width of a row of queries, keys and values."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def fits(self) -> bool:
        """Whether a model of these sizes can be cut so."""
        attended = self.heads * self.head_dim
        return (
            self.grid % self.cluster == 0
            and self.cluster in (2, 4)
            and all(n % (self.grid // self.cluster * 8) == 0 for n in (self.qkv, self.d, self.f))
            and self.d // self.cluster % (32 * self.qkv_parts) == 0
            and attended // self.cluster % (32 * self.out_parts) == 0
            and self.f // self.cluster % (32 * self.warps) == 0
        )

    @property
    def qkv_parts(self) -> int:
        """Of a program's k in the first product: two, if warps would else have nothing to do."""
        return 2 if 2 * self._tiles(self.qkv) <= self.warps else 1

    def _tiles(self, n: int) -> int:
        """Of sixteen features, in a cluster."""
        return -(-n // (self.grid // self.cluster) // 16)

    @cached_property
    def shared_bytes(self) -> int:
        """Shared memory of a program."""
        c, rows = self.cluster, 8 * self.tiles
        most = max(
            self.tiles * self.qkv_parts * self._tiles(self.qkv),
            self.tiles * 2 * self._tiles(self.f),
            self.tiles * self.warps * self._tiles(self.d),
            self.out_tiles * self.out_parts * self._tiles(self.d),
        )
        sums = 2 * 4 * 16 * 8 * most
        stage = (2 if self.several else 1) * rows * (self.d // c * 2 + 64)
        return self.slots * (self.slot + 16) + stage + sums + 2 * c * rows * 4 + 48 + self.more_bytes

    @property
    def more_bytes(self) -> int:
        """Of shared memory, for what a kernel keeps beside its products."""
        return 0

    def pack(self, parts: int, *weights: Tensor) -> Tensor:
        """Weights [n, k] of one product, or of two side by side, in the order the kernel reads them: of each
        program in turn. parts: of a program's k, for warps."""
        clusters = self.grid // self.cluster
        n, k = weights[0].shape
        features = n // clusters
        tiles, blocks = -(-features // 16), k // self.cluster // parts // 32
        cut = [F.pad(w.unflatten(0, (clusters, features)), (0, 0, 0, 16 * tiles - features)) for w in weights]
        x = torch.stack(cut, dim=1).reshape(
            clusters, len(weights) * tiles, 2, 8, self.cluster, parts, blocks, 4, 2, 2, 2
        )  # cluster, tile, upper, feature, program, part, block, quarter, pair, word, value
        return x.permute(0, 4, 6, 5, 1, 8, 3, 7, 9, 2, 10).flatten(0, 1).flatten(1)

    def pack_block(self, b: Block) -> Tensor:
        """A block's weights, packed, program by program, in the order of their phases; flat. Norms before a
        product are in it."""
        return self.pack_phases(b, b.out)

    def pack_phases(self, b: Block, out: Tensor) -> Tensor:
        """`pack_block` with `out` in place of the block's own."""
        phases = (
            self.pack(self.qkv_parts, folded(b.qkv, b.norm_in)),
            self.pack(self.out_parts, out),
            self.pack(1, *folded(b.gate_up, b.norm_mlp).chunk(2)),
            self.pack(self.warps, b.down),
        )
        return torch.cat(phases, dim=1).flatten()

    def kernel(self, name: str, device: torch.device) -> cuda.Launch:
        """What launches the kernel of that name. Raises `hocket.kernels.cuda.Unavailable`."""
        if not self.fits:
            raise cuda.Unavailable(f"a stack of these sizes cannot be cut into {self.grid} programs: {self}")
        text = cuda.source("device.cuh", "grid.cuh", "clusters.cuh", f"{name}.cu")
        cubin = cuda.compile_cubin(text, self.defines, torch.cuda.get_device_capability(device))
        kernel = cuda.Kernel(cubin, name, device, self.shared_bytes)
        kernel.check(self.grid, self.threads, self.cluster)
        return lambda arguments: kernel.launch(self.grid, self.threads, arguments, self.cluster)
