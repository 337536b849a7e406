"""Reads Qwen3-TTS checkpoints. The files' tensor names appear here only.

Derived tables and folded matrices are computed in fp32 and rounded once, to the dtype asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from hocket.models.qwen3_tts import codec, encoder, speaker, talker
from hocket.models.qwen3_tts.config import BlockConfig, ModelConfig, load_codec_config, load_speaker_config
from hocket.nn import transformer
from hocket.nn.checkpoint import open_tensors
from hocket.nn.conv import Conv, ConvNext, Snake, conv_taps, strided_as_conv, transposed_as_conv


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


# --- talker ------------------------------------------------------------------------------------

RESERVED = 1024  # the talker's last ids are control ids; of them only the end token may be drawn


def load_talker(
    folder: Path, config: ModelConfig, device: torch.device, dtype: torch.dtype
) -> talker.TalkerWeights:
    """folder: the model's. Raises StartupError."""
    tensors = open_tensors(folder, device)
    t, p = config.talker_config, config.talker_config.code_predictor_config

    def get(name: str) -> Tensor:
        return tensors[f"talker.{name}"].to(device, dtype)

    codec = get("model.codec_embedding.weight")
    head = get("codec_head.weight")
    legal = [*range(t.vocab_size - RESERVED), t.codec_eos_token_id]
    inner = "code_predictor.model."
    books = range(t.num_code_groups - 1)
    codes = torch.stack([codec[: p.vocab_size], *(get(f"{inner}codec_embedding.{k}.weight") for k in books)])
    projected = "talker.code_predictor.small_to_mtp_projection.weight" in tensors
    projection = None
    inner_embed = codes[:-1]
    if projected:
        name = "code_predictor.small_to_mtp_projection"
        projection = (get(f"{name}.weight"), get(f"{name}.bias"))
        inner_embed = torch.stack([F.linear(table, *projection) for table in codes[:-1]])
    text = talker.TextTable(
        tensors["talker.model.text_embedding.weight"],
        (get("text_projection.linear_fc1.weight"), get("text_projection.linear_fc1.bias")),
        (get("text_projection.linear_fc2.weight"), get("text_projection.linear_fc2.bias")),
    )
    if device.type == "cuda":
        text.ensure(range(t.text_vocab_size))
        text.embedding = text.embedding.new_empty(0)
    return talker.TalkerWeights(
        layers=_layers(get, "model.", t),
        norm=get("model.norm.weight"),
        head=head[torch.tensor(legal, device=device)].contiguous(),
        text=text,
        codec=codec,
        codes=codes,
        inner_layers=_layers(get, inner, p),
        inner_norm=get(f"{inner}norm.weight"),
        inner_heads=torch.stack([get(f"code_predictor.lm_head.{k}.weight") for k in books]),
        inner_embed=inner_embed,
        projection=projection,
    )


def _layers(get: Callable[[str], Tensor], prefix: str, c: BlockConfig) -> list[transformer.LayerWeights]:
    out = []
    for i in range(c.num_hidden_layers):

        def at(name: str, i: int = i) -> Tensor:
            return get(f"{prefix}layers.{i}.{name}.weight")

        out.append(
            transformer.LayerWeights(
                norm_in=at("input_layernorm"),
                qkv=torch.cat([at(f"self_attn.{x}_proj") for x in "qkv"]),
                q_norm=at("self_attn.q_norm"),
                k_norm=at("self_attn.k_norm"),
                out=at("self_attn.o_proj"),
                norm_mlp=at("post_attention_layernorm"),
                gate_up=torch.cat([at("mlp.gate_proj"), at("mlp.up_proj")]),
                down=at("mlp.down_proj"),
            )
        )
    return out


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
