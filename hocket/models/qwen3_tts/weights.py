"""Reads Qwen3-TTS checkpoints. The files' tensor names appear here only.

Derived tables and folded matrices are computed in fp32 and rounded once, to the dtype asked for.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from hocket.models.qwen3_tts import codec, encoder, speaker
from hocket.models.qwen3_tts.config import ModelConfig, load_codec_config, load_speaker_config
from hocket.nn.checkpoint import Reader, open_tensors
from hocket.nn.conv import Conv, strided_as_conv
from hocket.nn.mel import mel_filters
from hocket.nn.talker import TalkerWeights, read_talker
from hocket.nn.transformer import read_layer
from hocket.nn.wave import read_conv, read_wave

# --- talker ------------------------------------------------------------------------------------


def load_talker(folder: Path, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> TalkerWeights:
    """folder: the model's. Raises StartupError."""
    t = config.talker_config
    r = Reader(open_tensors(folder, device), "talker.", dtype)
    return read_talker(
        r,
        [read_layer(r.under(f"model.layers.{i}")) for i in range(t.num_hidden_layers)],
        embedding=r.tensors["talker.model.text_embedding.weight"],
        end=t.codec_eos_token_id,
        inner_layers=t.code_predictor_config.num_hidden_layers,
        books=t.num_code_groups,
    )


# --- codec decoder -----------------------------------------------------------------------------


def load_codec_decoder(folder: Path, device: torch.device | str, dtype: torch.dtype) -> codec.CodecWeights:
    """folder: the codec's own (a model's `speech_tokenizer`)."""
    c = load_codec_config(folder).decoder_config
    r = Reader(open_tensors(folder, device), "decoder.", dtype)
    return codec.CodecWeights(
        books=_output_books(r.under("quantizer"), c.num_quantizers),
        pre_conv=read_conv(r, "pre_conv.conv"),
        enter=r("pre_transformer.input_proj.weight"),
        enter_bias=r("pre_transformer.input_proj.bias"),
        leave=r("pre_transformer.output_proj.weight"),
        leave_bias=r("pre_transformer.output_proj.bias"),
        wave=read_wave(r, codec.wave_shape(c), c.num_hidden_layers),
    )


def _output_books(r: Reader, codebooks: int) -> Tensor:
    """Every codebook's entries after its branch's projection, which is linear: a frame is then a sum."""
    names = ["rvq_first.vq.layers.0"] + [f"rvq_rest.vq.layers.{i}" for i in range(codebooks - 1)]
    books = []
    for name in names:
        project = r.wide(f"{name.split('.')[0]}.output_proj.weight").squeeze(-1)  # [codebook_dim, d]
        books.append(r.round(_codebook(r, f"{name}._codebook", "embedding_sum") @ project.t()))
    return torch.stack(books)


def _codebook(r: Reader, name: str, total: str) -> Tensor:
    """Entries [size, d], fp32: the running sum of the vectors assigned to each over their number."""
    return r.wide(f"{name}.{total}") / r.wide(f"{name}.cluster_usage").clamp(min=1e-5)[:, None]


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
        first=read_conv(r, "encoder.layers.0.conv"),
        stages=[_encoder_stage(r, 3 * i + 1, rate) for i, rate in enumerate(rates)],
        last=read_conv(r, f"encoder.layers.{3 * len(rates) + 2}.conv"),
        layers=[
            _encoder_layer(r.under(f"encoder_transformer.layers.{i}")) for i in range(c.num_hidden_layers)
        ],
        halve=_strided(r, "downsample.conv", 2),
        semantic=quantizer["semantic"]("input_proj.weight").squeeze(-1),
        acoustic=quantizer["acoustic"]("input_proj.weight").squeeze(-1),
        books=torch.stack(
            [_codebook(quantizer[kind], f"layers.{i}.codebook", "embed_sum") for kind, i in books]
        ),
    )


def _encoder_stage(r: Reader, at: int, rate: int) -> encoder.StageWeights:
    """`at`: place of the residual unit in the published list, where an activation follows it."""
    return encoder.StageWeights(
        narrow=read_conv(r, f"encoder.layers.{at}.block.1.conv"),
        restore=read_conv(r, f"encoder.layers.{at}.block.3.conv"),
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
    bias = r(f"{name}.bias") if f"{name}.bias" in r else weight.new_zeros(weight.shape[0])
    return strided_as_conv(weight, bias, rate)


# --- speaker encoder ---------------------------------------------------------------------------


def load_speaker_encoder(
    folder: Path, device: torch.device | str, dtype: torch.dtype
) -> speaker.SpeakerWeights:
    """folder: the model's."""
    c = load_speaker_config(folder)
    r = Reader(open_tensors(folder, device), "speaker_encoder.", dtype)
    last = len(c.enc_channels) - 1
    filters = mel_filters(c.sample_rate, speaker.FFT, c.mel_dim, speaker.TOP_HZ)
    return speaker.SpeakerWeights(
        filters=torch.from_numpy(filters).to(device),
        first=read_conv(r, "blocks.0.conv", c.enc_dilations[0]),
        blocks=[
            _speaker_block(r.under(f"blocks.{i}"), c.enc_res2net_scale, c.enc_dilations[i])
            for i in range(1, last)
        ],
        merge=read_conv(r, "mfa.conv", c.enc_dilations[last]),
        attend_in=read_conv(r, "asp.tdnn.conv"),
        attend_out=read_conv(r, "asp.conv"),
        out=read_conv(r, "fc"),
    )


def _speaker_block(r: Reader, parts: int, dilation: int) -> speaker.BlockWeights:
    return speaker.BlockWeights(
        enter=read_conv(r, "tdnn1.conv"),
        parts=[read_conv(r, f"res2net_block.blocks.{i}.conv", dilation) for i in range(parts - 1)],
        leave=read_conv(r, "tdnn2.conv"),
        squeeze=read_conv(r, "se_block.conv1"),
        excite=read_conv(r, "se_block.conv2"),
    )
