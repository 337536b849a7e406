"""The vision tower: images and films to rows of the Thinker's prompt, and to deepstack maps.

Two frames make a temporal patch (an image counts as two equal frames), and attention sees all within it and
nothing outside, so temporal patches of one size run together, whatever picture they are of. Patches come in
the order of 2 x 2 blocks, each of which becomes one row.

Pixels as transformers 5.17.0: models/qwen2_vl/image_processing_qwen2_vl.py and video_processing_qwen2_vl.py
give them; the tower as models/qwen3_omni_moe `Qwen3OmniMoeVisionEncoder`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hocket.core import Chunk, Item, Job
from hocket.kernels.attention import rotate_torch
from hocket.models.qwen3_omni.config import VisionConfig
from hocket.models.qwen3_omni.prompt import Picture, VisionInput
from hocket.models.qwen3_omni.tower import KEPT_BYTES, Affine, Kept
from hocket.nn.attention import attend
from hocket.nn.rotary import frequencies
from hocket.nn.staging import to_device, to_host

# Fixed in the published code, not in its config: of LayerNorm, and of rotary positions.
EPS, THETA = 1e-6, 10000.0
TOGETHER = 16384  # patches run at once, or one temporal patch: bounds the memory of long films


@dataclass(frozen=True, slots=True)
class BlockWeights:
    """A pre-norm transformer block."""

    norm_in: Affine  # [d]
    qkv: Affine  # [3 d, d]
    out: Affine  # [d, d]
    norm_mlp: Affine  # [d]
    up: Affine  # [f, d]
    down: Affine  # [d, f]


@dataclass(frozen=True, slots=True)
class MergerWeights:
    """Four patches to one row."""

    norm: Affine  # [d], or [4 d] where patches are joined before it
    up: Affine  # [4 d, 4 d]
    down: Affine  # [out, 4 d]


@dataclass(frozen=True, slots=True)
class VisionWeights:
    """Weights of the tower, and what pixels are scaled by."""

    mean: Tensor  # fp32 [3, 1, 1]  of pixels 0 to 255
    deviation: Tensor  # fp32 [3, 1, 1]
    enter: Affine  # [d, numbers of a patch]
    places: Tensor  # [side * side, d]
    blocks: list[BlockWeights]
    merger: MergerWeights
    deep: list[MergerWeights]  # one for each deepstack map


class VisionProgram:
    """The stage that sees: `hocket.core.OneShotProgram`."""

    def __init__(self, config: VisionConfig, weights: VisionWeights) -> None:
        self.config, self.w = config, weights
        self.device = weights.places.device
        self._kept: Kept[Picture] = Kept(KEPT_BYTES)

    def begin(self, job: Job, arrived: Mapping[str, Chunk]) -> Item:
        """Jobs with pictures of any sizes run together."""
        return Item(value=msgspec.msgpack.decode(job.inputs["vision"], type=VisionInput).pictures, bucket=0)

    @torch.inference_mode()
    def run(self, items: Sequence[Item]) -> list[dict[str, np.ndarray]]:
        """{"rows": [1 + maps, n, out]} for each: rows, then deepstack maps, of its pictures one behind the
        other; see `to_host`."""
        pictures: list[Picture] = [picture for item in items for picture in item.value]
        rows = iter(self._kept.get(pictures, lambda picture: picture.key, self._encode))
        return [{"rows": np.concatenate([next(rows) for _ in item.value], axis=1)} for item in items]

    def _encode(self, pictures: list[Picture]) -> list[np.ndarray]:
        """All pictures' temporal patches, those of one size together."""
        c = self.config
        sizes: dict[tuple[int, int], list[int]] = {}
        for i, picture in enumerate(pictures):
            sizes.setdefault(picture.grid[1:], []).append(i)
        results: list[np.ndarray] = [np.empty(0)] * len(pictures)
        for (h, w), members in sizes.items():
            x = torch.cat([self._patches(pictures[i]) for i in members])  # [t, h * w, numbers]
            each = max(1, TOGETHER // (h * w))
            rows = torch.cat([encode(self.w, c, part, h, w) for part in x.split(each)], dim=1)
            counts = [pictures[i].grid[0] for i in members]
            for i, made in zip(members, rows.split(counts, dim=1), strict=True):
                results[i] = to_host(made.flatten(1, 2))
        return results

    def _patches(self, picture: Picture) -> Tensor:
        t, h, w = picture.shape
        frames = np.frombuffer(picture.frames, np.uint8).reshape(t, 3, h, w).copy()
        return patches(self.w, self.config, to_device(frames, self.device))


def patches(w: VisionWeights, c: VisionConfig, frames: Tensor) -> Tensor:
    """Scaled pixels of each patch: frames uint8 [t, 3, h, w] -> fp32 [temporal patches, patches, numbers].

    Numbers are those of (channel, time, row, column). The last frame is repeated to fill a temporal patch.
    """
    x = (frames.float() - w.mean) / w.deviation
    short = -len(x) % c.temporal_patch_size
    x = torch.cat([x, x[-1:].expand(short, -1, -1, -1)])
    merge, patch = c.spatial_merge_size, c.patch_size
    x = x.unflatten(0, (-1, c.temporal_patch_size))
    x = x.unflatten(4, (-1, merge, patch)).unflatten(3, (-1, merge, patch))
    # [t, time, channel, block row, row in block, y, block column, column in block, x]
    return x.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).flatten(5).flatten(1, 4)


def encode(w: VisionWeights, c: VisionConfig, x: Tensor, height: int, width: int) -> Tensor:
    """Temporal patches of one size: x fp32 [t, n, numbers], n = height * width -> [1 + maps, t, n / 4, out].

    The first of 1 + maps are the rows, the others deepstack maps.
    """
    row, column = _grid(c, height, width, x.device)
    x = w.enter(x.to(w.enter.weight.dtype))  # [t, n, d]
    x = x + _places(w, row, column, height, width).to(x.dtype)
    head_dim = c.hidden_size // c.num_heads
    frequency = frequencies(head_dim // 2, THETA, x.device)  # [head_dim / 4]
    angle = torch.cat([row[:, None] * frequency, column[:, None] * frequency], dim=1)
    angle = torch.cat([angle, angle], dim=1)[:, None]  # [n, 1, head_dim]
    cos, sin = angle.cos(), angle.sin()  # fp32, and so is the rotation: as published
    deep = []
    for i, block in enumerate(w.blocks):
        qkv = block.qkv(block.norm_in.norm(x, EPS))
        q, k, v = qkv.unflatten(-1, (3, c.num_heads, head_dim)).unbind(2)  # [t, n, heads, head_dim]
        q, k = rotate_torch(q, cos, sin), rotate_torch(k, cos, sin)
        x = x + block.out(attend(q, k.transpose(1, 2), v.transpose(1, 2), None).flatten(2))
        x = x + block.down(F.gelu(block.up(block.norm_mlp.norm(x, EPS)), approximate="tanh"))
        if i in c.deepstack_visual_indexes:
            merger = w.deep[c.deepstack_visual_indexes.index(i)]
            deep.append(_merge(merger, merger.norm.norm(_joined(c, x), EPS)))
    return torch.stack([_merge(w.merger, _joined(c, w.merger.norm.norm(x, EPS))), *deep])


def _grid(c: VisionConfig, height: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Row and column of each patch, in the order of blocks: int64 [height * width] each."""
    merge = c.spatial_merge_size
    at = torch.arange(height * width, device=device).view(height // merge, merge, width // merge, merge)
    at = at.transpose(1, 2).flatten()
    return at // width, at % width


def _places(w: VisionWeights, row: Tensor, column: Tensor, height: int, width: int) -> Tensor:
    """Learned positions of a square grid, stretched over height x width corner to corner: [n, d].

    Of the four neighbours, each weighs in fp32 by its nearness; products are summed as published.
    """
    side = round(w.places.shape[0] ** 0.5)
    taps, weights = [], []
    for at, size in ((row, height), (column, width)):
        place = at.float() * (side - 1) / max(size - 1, 1)
        below = place.floor()
        near = below.long()[:, None] + torch.arange(2, device=at.device)
        taps.append(near.clamp(max=side - 1))
        share = place - below
        weights.append(torch.stack([1 - share, share], dim=1))
    index = (taps[0][:, :, None] * side + taps[1][:, None]).flatten(1)  # [n, 4]
    weight = (weights[0][:, :, None] * weights[1][:, None]).flatten(1)
    return (w.places[index] * weight[:, :, None]).sum(1)


def _joined(c: VisionConfig, x: Tensor) -> Tensor:
    """Patches of a block side by side: [t, n, d] -> [t, n / 4, 4 d]"""
    return x.unflatten(1, (-1, c.spatial_merge_size**2)).flatten(2)


def _merge(w: MergerWeights, x: Tensor) -> Tensor:
    return w.down(F.gelu(w.up(x)))
