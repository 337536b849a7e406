"""Reads Qwen3-TTS checkpoints. The files' tensor names appear here only.

Derived tables and folded matrices are computed in fp32 and rounded once, to the dtype asked for.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hocket.errors import StartupError
from hocket.models.qwen3_tts import codec, encoder, speaker
from hocket.models.qwen3_tts.config import load_codec_config, load_speaker_config
from hocket.nn.conv import Conv, ConvNext, Snake, conv_taps, strided_as_conv, transposed_as_conv

# --- files -------------------------------------------------------------------------------------


class Tensors(Mapping[str, Tensor]):
    """A checkpoint's tensors by name, read from disk to the device when asked for, in the file's dtype.

    On the meta device they have shapes and no content, which is enough to plan memory.
    """

    def __init__(self, folder: Path, device: torch.device | str) -> None:
        self.folder = folder
        self._meta = torch.device(device).type == "meta"
        self._device = "cpu" if self._meta else str(device)
        self._files = {name: self._open(folder / name) for name in _file_names(folder)}
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


def open_tensors(folder: Path, device: torch.device | str = "cpu") -> Tensors:
    """The tensors of model.safetensors, or of the files that model.safetensors.index.json names.

    A missing file or tensor raises StartupError.
    """
    return Tensors(folder, device)


class Reader:
    """Tensors under one prefix, in the forms that layers take, rounded to one dtype."""

    def __init__(self, tensors: Mapping[str, Tensor], prefix: str, dtype: torch.dtype) -> None:
        self.tensors, self.prefix, self.dtype = tensors, prefix, dtype

    def under(self, prefix: str) -> Reader:
        return Reader(self.tensors, f"{self.prefix}{prefix}.", self.dtype)

    def wide(self, name: str) -> Tensor:
        """fp32, to compute with."""
        return self.tensors[self.prefix + name].float()

    def __call__(self, name: str) -> Tensor:
        return self.tensors[self.prefix + name].to(self.dtype)

    def stacked(self, *names: str) -> Tensor:
        """Matrices of one input as one matrix."""
        return torch.cat([self(f"{name}.weight") for name in names])

    def round(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.dtype).contiguous()

    def codebook(self, name: str, total: str) -> Tensor:
        """Entries [size, d], fp32: the running sum of the vectors assigned to each over their number."""
        return self.wide(f"{name}.{total}") / self.wide(f"{name}.cluster_usage").clamp(min=1e-5)[:, None]


# --- codec decoder -----------------------------------------------------------------------------


def load_codec_decoder(folder: Path, device: torch.device | str, dtype: torch.dtype) -> codec.CodecWeights:
    """folder: the codec's own (a model's `speech_tokenizer`)."""
    c = load_codec_config(folder).decoder_config
    r = Reader(open_tensors(folder, device), "decoder.", dtype)
    stages, last = len(c.upsampling_ratios), len(c.upsample_rates) + 1
    return codec.CodecWeights(
        books=_output_books(r.under("quantizer"), c.num_quantizers),
        pre_conv=_conv(r, "pre_conv.conv"),
        enter=r("pre_transformer.input_proj.weight"),
        enter_bias=r("pre_transformer.input_proj.bias"),
        layers=[_codec_layer(r.under(f"pre_transformer.layers.{i}")) for i in range(c.num_hidden_layers)],
        norm=r("pre_transformer.norm.weight"),
        leave=r("pre_transformer.output_proj.weight"),
        leave_bias=r("pre_transformer.output_proj.bias"),
        widen=[_transposed(r, f"upsample.{i}.0.conv", rate) for i, rate in enumerate(c.upsampling_ratios)],
        refine=[_convnext(r.under(f"upsample.{i}.1")) for i in range(stages)],
        first=_conv(r, "decoder.0.conv"),
        blocks=[_block(r.under(f"decoder.{i}.block"), rate) for i, rate in enumerate(c.upsample_rates, 1)],
        snake_last=_snake(r, f"decoder.{last}"),
        last=_conv(r, f"decoder.{last + 1}.conv"),
    )


def _output_books(r: Reader, codebooks: int) -> Tensor:
    """Every codebook's entries after its branch's projection, which is linear: a frame is then a sum."""
    names = ["rvq_first.vq.layers.0"] + [f"rvq_rest.vq.layers.{i}" for i in range(codebooks - 1)]
    books = []
    for name in names:
        project = r.wide(f"{name.split('.')[0]}.output_proj.weight").squeeze(-1)  # [codebook_dim, d]
        books.append(r.round(r.codebook(f"{name}._codebook", "embedding_sum") @ project.t()))
    return torch.stack(books)


def _codec_layer(r: Reader) -> codec.LayerWeights:
    attention_scale = r.wide("self_attn_layer_scale.scale")[:, None]
    mlp_scale = r.wide("mlp_layer_scale.scale")[:, None]
    return codec.LayerWeights(
        norm_in=r("input_layernorm.weight"),
        qkv=r.stacked("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        out=r.round(attention_scale * r.wide("self_attn.o_proj.weight")),
        norm_mlp=r("post_attention_layernorm.weight"),
        gate_up=r.stacked("mlp.gate_proj", "mlp.up_proj"),
        down=r.round(mlp_scale * r.wide("mlp.down_proj.weight")),
    )


def _convnext(r: Reader) -> ConvNext:
    gamma = r.wide("gamma")
    return ConvNext(
        taps=r.wide("dwconv.conv.weight").squeeze(1).t().contiguous(),
        bias=r.wide("dwconv.conv.bias"),
        norm_weight=r("norm.weight"),
        norm_bias=r("norm.bias"),
        up=r("pwconv1.weight"),
        up_bias=r("pwconv1.bias"),
        down=r.round(gamma[:, None] * r.wide("pwconv2.weight")),
        down_bias=r.round(gamma * r.wide("pwconv2.bias")),
        eps=1e-6,  # fixed in the published code, not in its config
    )


def _block(r: Reader, rate: int) -> codec.BlockWeights:
    return codec.BlockWeights(
        snake=_snake(r, "0"),
        widen=_transposed(r, "1.conv", rate),
        units=[
            codec.UnitWeights(
                snake_in=_snake(r, f"{i}.act1"),
                conv=_conv(r, f"{i}.conv1.conv", dilation),
                snake_mid=_snake(r, f"{i}.act2"),
                mix=_conv(r, f"{i}.conv2.conv"),
            )
            for i, dilation in ((2, 1), (3, 3), (4, 9))  # fixed in the published code, not in its config
        ],
    )


def _conv(r: Reader, name: str, dilation: int = 1) -> Conv:
    return conv_taps(r(f"{name}.weight"), r(f"{name}.bias"), dilation)


def _transposed(r: Reader, name: str, rate: int) -> Conv:
    return transposed_as_conv(r(f"{name}.weight"), r(f"{name}.bias"), rate)


def _snake(r: Reader, name: str) -> Snake:
    """Published as logarithms; the 1e-9 is the published guard against division by zero."""
    return Snake(r.wide(f"{name}.alpha").exp(), 1.0 / (r.wide(f"{name}.beta").exp() + 1e-9))


# --- codec encoder -----------------------------------------------------------------------------


def load_codec_encoder(
    folder: Path, device: torch.device | str, dtype: torch.dtype
) -> encoder.EncoderWeights:
    """folder: the codec's own. Codebooks beyond those that the talker knows are not read."""
    config = load_codec_config(folder)
    c = config.encoder_config
    r = Reader(open_tensors(folder, device), "encoder.", dtype)
    rates = list(reversed(c.upsampling_ratios))
    quantizer = {
        kind: r.under(f"quantizer.{kind}_residual_vector_quantizer") for kind in ("semantic", "acoustic")
    }
    books = [("semantic", 0)] + [("acoustic", i) for i in range(config.encoder_valid_num_quantizers - 1)]
    return encoder.EncoderWeights(
        first=_conv(r, "encoder.layers.0.conv"),
        stages=[_encoder_stage(r, 3 * i + 1, rate) for i, rate in enumerate(rates)],
        last=_conv(r, f"encoder.layers.{3 * len(rates) + 2}.conv"),
        layers=[
            _encoder_layer(r.under(f"encoder_transformer.layers.{i}")) for i in range(c.num_hidden_layers)
        ],
        halve=_strided(r, "downsample.conv", 2),
        semantic=quantizer["semantic"]("input_proj.weight").squeeze(-1),
        acoustic=quantizer["acoustic"]("input_proj.weight").squeeze(-1),
        books=torch.stack(
            [quantizer[kind].codebook(f"layers.{i}.codebook", "embed_sum") for kind, i in books]
        ),
    )


def _encoder_stage(r: Reader, at: int, rate: int) -> encoder.StageWeights:
    """`at`: place of the residual unit in the published list, where an activation follows it."""
    return encoder.StageWeights(
        narrow=_conv(r, f"encoder.layers.{at}.block.1.conv"),
        restore=_conv(r, f"encoder.layers.{at}.block.3.conv"),
        down=_strided(r, f"encoder.layers.{at + 2}.conv", rate),
        rate=rate,
    )


def _encoder_layer(r: Reader) -> encoder.LayerWeights:
    attention_scale = r.wide("self_attn_layer_scale.scale")[:, None]
    mlp_scale = r.wide("mlp_layer_scale.scale")[:, None]
    return encoder.LayerWeights(
        norm_in=r("input_layernorm.weight"),
        norm_in_bias=r("input_layernorm.bias"),
        qkv=r.stacked("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        out=r.round(attention_scale * r.wide("self_attn.o_proj.weight")),
        norm_mlp=r("post_attention_layernorm.weight"),
        norm_mlp_bias=r("post_attention_layernorm.bias"),
        up=r("mlp.fc1.weight"),
        down=r.round(mlp_scale * r.wide("mlp.fc2.weight")),
    )


def _strided(r: Reader, name: str, rate: int) -> Conv:
    weight = r(f"{name}.weight")
    bias = r(f"{name}.bias") if f"{r.prefix}{name}.bias" in r.tensors else weight.new_zeros(weight.shape[0])
    return strided_as_conv(weight, bias, rate)


# --- speaker encoder ---------------------------------------------------------------------------


def load_speaker_encoder(
    folder: Path, device: torch.device | str, dtype: torch.dtype
) -> speaker.SpeakerWeights:
    """folder: the model's."""
    c = load_speaker_config(folder)
    r = Reader(open_tensors(folder, device), "speaker_encoder.", dtype)
    last = len(c.enc_channels) - 1
    return speaker.SpeakerWeights(
        filters=torch.from_numpy(speaker.mel_filters(c.sample_rate, c.mel_dim)).to(device),
        first=_conv(r, "blocks.0.conv", c.enc_dilations[0]),
        blocks=[
            _speaker_block(r.under(f"blocks.{i}"), c.enc_res2net_scale, c.enc_dilations[i])
            for i in range(1, last)
        ],
        merge=_conv(r, "mfa.conv", c.enc_dilations[last]),
        attend_in=_conv(r, "asp.tdnn.conv"),
        attend_out=_conv(r, "asp.conv"),
        out=_conv(r, "fc"),
    )


def _speaker_block(r: Reader, parts: int, dilation: int) -> speaker.BlockWeights:
    return speaker.BlockWeights(
        enter=_conv(r, "tdnn1.conv"),
        parts=[_conv(r, f"res2net_block.blocks.{i}.conv", dilation) for i in range(parts - 1)],
        leave=_conv(r, "tdnn2.conv"),
        squeeze=_conv(r, "se_block.conv1"),
        excite=_conv(r, "se_block.conv2"),
    )
