"""Random weights of an AudioVAE in the published layout, with activations as tame as trained ones.

See `hocket.nn.synthetic` for what the values depend on. Names stand here as well as in vae_weights.py: a
maker that borrowed the loader's names could not show them to be wrong.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hocket.models.voxcpm.vae import VaeConfig, VaeConfigV2
from hocket.nn.synthetic import Shapes, fill


def vae_shapes(c: VaeConfig) -> Shapes:
    """Every tensor of audiovae.pth's `state_dict`."""
    out: Shapes = {}

    def conv(name: str, *shape: int, transposed: bool = False) -> None:
        out[f"{name}.bias"] = (shape[1 if transposed else 0],)
        out[f"{name}.weight_g"] = (shape[0], 1, 1)
        out[f"{name}.weight_v"] = shape

    def snake(name: str, channels: int) -> None:
        out[f"{name}.alpha"] = (1, channels, 1)

    def unit(name: str, channels: int) -> None:
        snake(f"{name}.block.0", channels)
        conv(f"{name}.block.1", channels, 1, 7)
        snake(f"{name}.block.2", channels)
        conv(f"{name}.block.3", channels, channels, 1)

    d = c.encoder_dim
    conv("encoder.block.0", d, 1, 7)
    for i, rate in enumerate(c.encoder_rates, 1):
        for k in range(3):
            unit(f"encoder.block.{i}.block.{k}", d)
        snake(f"encoder.block.{i}.block.3", d)
        conv(f"encoder.block.{i}.block.4", 2 * d, d, 2 * rate)
        d *= 2
    for name in ("fc_mu", "fc_logvar"):
        conv(f"encoder.{name}", c.latent_dim, d, 3)

    d = c.decoder_dim
    conv("decoder.model.0", c.latent_dim, 1, 7)
    conv("decoder.model.1", d, c.latent_dim, 1)
    for i, rate in enumerate(c.decoder_rates, 2):
        if isinstance(c, VaeConfigV2) and c.sr_bin_boundaries is not None:
            for table in ("scale", "bias"):
                name = f"decoder.sr_cond_model.{i}.{table}_embed.weight"
                out[name] = (len(c.sr_bin_boundaries) + 1, d)
        snake(f"decoder.model.{i}.block.0", d)
        conv(f"decoder.model.{i}.block.1", d, d // 2, 2 * rate, transposed=True)
        d //= 2
        for k in range(2, 5):
            unit(f"decoder.model.{i}.block.{k}", d)
    last = len(c.decoder_rates) + 2
    snake(f"decoder.model.{last}", d)
    conv(f"decoder.model.{last + 1}", 1, d, 7)
    return out


def random_vae(
    c: VaeConfig, seed: int, device: torch.device | str = "cpu", exact: bool = True
) -> dict[str, Tensor]:
    """The `state_dict` of an AudioVAE, fp32.

    Frequencies, lengths and scales lie around what training begins with, apart enough from it that each
    matters. What a residual unit adds is small beside what it is given, and a transposed convolution gives as
    much as it takes; otherwise activations and their rounding errors grow from layer to layer, and the last
    tanh hides what comes before it.
    """
    tensors = {
        name: _tame(name, fill(name, shape, seed, torch.float32, device, exact), c)
        for name, shape in vae_shapes(c).items()
    }
    if isinstance(c, VaeConfigV2) and c.sr_bin_boundaries is not None:
        tensors["decoder.sr_bin_boundaries"] = torch.tensor(c.sr_bin_boundaries, dtype=torch.int32)
    return tensors


def _tame(name: str, x: Tensor, c: VaeConfig) -> Tensor:
    """x: as `fill` draws it, around 0."""
    part, _, leaf = name.rpartition(".")
    if leaf == "alpha":
        return 1 + 0.5 * x
    if "scale_embed" in name:
        return 1 + x
    if leaf != "weight_g":
        return x
    layer = part.split(".")[2:]  # in the decoder: the block, "block", place in it, "block", place in a unit
    typical = 1.0
    if part.endswith(".block.3"):
        typical = 0.2
    elif part == f"decoder.model.{len(c.decoder_rates) + 3}":
        typical = 0.5
    elif part.startswith("decoder.") and layer[1:] == ["block", "1"]:
        typical = 0.6 * math.sqrt(c.decoder_rates[int(layer[0]) - 2] / 2)
    return typical * (1 + 0.1 * x)
