"""Reads the AudioVAE of VoxCPM checkpoints: audiovae.safetensors, else audiovae.pth.

Convolutions are published as direction and length (weight norm, arXiv 1602.07868), by either of PyTorch's
names for them, and folded here in fp32; a file that holds plain weights is read too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from hocket.errors import StartupError
from hocket.models.voxcpm.vae import BlockWeights, DecoderWeights, UnitWeights, VaeConfig
from hocket.models.voxcpm.vae_encoder import DownWeights, EncoderWeights
from hocket.models.voxcpm.weights import Pickled
from hocket.nn.checkpoint import Reader, Tensors
from hocket.nn.conv import (
    Conv,
    Depthwise,
    Snake,
    conv_taps,
    depthwise_taps,
    strided_as_conv,
    transposed_as_conv,
)

FILES = ("audiovae.safetensors", "audiovae.pth")  # the first that is there
DILATIONS = (1, 3, 9)  # of a block's units; fixed in the published code


def load_vae_decoder(
    folder: Path, config: VaeConfig, device: torch.device | str, dtype: torch.dtype
) -> DecoderWeights:
    """folder: the model's. Raises StartupError."""
    return decoder_weights(open_vae(folder, device), config, dtype)


def load_vae_encoder(
    folder: Path, config: VaeConfig, device: torch.device | str, dtype: torch.dtype
) -> EncoderWeights:
    """folder: the model's. Raises StartupError."""
    return encoder_weights(open_vae(folder, device), config, dtype)


def open_vae(folder: Path, device: torch.device | str) -> Mapping[str, Tensor]:
    """The AudioVAE's tensors as published. Raises StartupError."""
    if (folder / FILES[0]).exists():
        return Tensors(folder, device, FILES[:1])
    if (folder / FILES[1]).exists():
        return Pickled(folder / FILES[1], device)
    raise StartupError(f"{folder} holds neither {FILES[0]} nor {FILES[1]}")


def decoder_weights(tensors: Mapping[str, Tensor], config: VaeConfig, dtype: torch.dtype) -> DecoderWeights:
    """From the published layout. Raises StartupError."""
    r = Reader(Folded(tensors), "decoder.model.", dtype)
    last = len(config.decoder_rates) + 2
    w = DecoderWeights(
        enter=_depthwise(r, "0"),
        widen=_conv(r, "1"),
        blocks=[_up(r, i, rate, config.rate_row) for i, rate in enumerate(config.decoder_rates, 2)],
        snake_last=_snake(r, str(last)),
        last=_conv(r, str(last + 1)),
    )
    _check("decoder_dim", config.decoder_dim, w.widen.taps.shape[2])
    _check("latent_dim", config.latent_dim, w.enter.taps.shape[1])
    return w


def encoder_weights(tensors: Mapping[str, Tensor], config: VaeConfig, dtype: torch.dtype) -> EncoderWeights:
    """From the published layout. Raises StartupError."""
    r = Reader(Folded(tensors), "encoder.", dtype)
    w = EncoderWeights(
        first=_conv(r, "block.0"),
        blocks=[_down(r, i, rate) for i, rate in enumerate(config.encoder_rates, 1)],
        last=_conv(r, "fc_mu"),
    )
    _check("encoder_dim", config.encoder_dim, w.first.taps.shape[2])
    _check("latent_dim", config.latent_dim, w.last.taps.shape[2])
    return w


class Folded(Mapping[str, Tensor]):
    """A checkpoint's tensors with each weight in one piece, fp32."""

    LAYOUTS = (
        ("weight_g", "weight_v"),
        ("parametrizations.weight.original0", "parametrizations.weight.original1"),
    )

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors

    def __getitem__(self, name: str) -> Tensor:
        stem = name.removesuffix("weight")
        if name not in self.tensors and stem != name:
            for length, direction in self.LAYOUTS:
                if stem + direction in self.tensors:
                    v = self.tensors[stem + direction].float()
                    # Over all but the first axis: of a transposed convolution that is the input channels.
                    norm = v.flatten(1).norm(dim=1).view(-1, *[1] * (v.dim() - 1))
                    return v * (self.tensors[stem + length].float() / norm)
        return self.tensors[name].float()

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)


def _up(r: Reader, i: int, rate: int, row: int | None) -> BlockWeights:
    """Block i of the published list."""
    tint = None
    if row is not None:
        tables = Reader(r.tensors, f"decoder.sr_cond_model.{i}.", r.dtype)
        scale, offset = tables("scale_embed.weight"), tables("bias_embed.weight")
        if row >= len(scale):
            raise StartupError(
                f"the AudioVAE knows {len(scale)} output rates, but sr_bin_boundaries and out_sample_rate"
                f" ask for number {row + 1}"
            )
        tint = scale[row].contiguous(), offset[row].contiguous()
    r = r.under(f"{i}.block")
    weight = r("1.weight")  # [2 c, c, 2 rate]
    _check(f"decoder_rates[{i - 2}]", rate, weight.shape[2] // 2)
    return BlockWeights(
        tint=tint,
        snake=_snake(r, "0"),
        widen=transposed_as_conv(weight, r("1.bias"), rate),
        rate=rate,
        units=[_unit(r.under(f"{i}.block"), dilation) for i, dilation in enumerate(DILATIONS, 2)],
    )


def _down(r: Reader, i: int, rate: int) -> DownWeights:
    """Block i of the published list."""
    r = r.under(f"block.{i}.block")
    weight = r("4.weight")  # [2 c, c, 2 rate]
    _check(f"encoder_rates[{i - 1}]", rate, weight.shape[2] // 2)
    return DownWeights(
        units=[_unit(r.under(f"{i}.block"), dilation) for i, dilation in enumerate(DILATIONS)],
        snake=_snake(r, "3"),
        down=strided_as_conv(weight, r("4.bias"), rate),
        rate=rate,
    )


def _unit(r: Reader, dilation: int) -> UnitWeights:
    return UnitWeights(_snake(r, "0"), _depthwise(r, "1", dilation), _snake(r, "2"), _conv(r, "3"))


def _conv(r: Reader, name: str) -> Conv:
    return conv_taps(r(f"{name}.weight"), r(f"{name}.bias"))


def _depthwise(r: Reader, name: str, dilation: int = 1) -> Depthwise:
    return depthwise_taps(r.wide(f"{name}.weight"), r.wide(f"{name}.bias"), dilation)


def _snake(r: Reader, name: str) -> Snake:
    """Published as one vector for both; the 1e-9 is the published guard against division by zero."""
    alpha = r.wide(f"{name}.alpha").flatten()
    return Snake(alpha, 1.0 / (alpha + 1e-9))


def _check(key: str, said: int, found: int) -> None:
    if said != found:
        raise StartupError(f"audio_vae_config.{key} is {said}, but the AudioVAE's weights have {found}")
