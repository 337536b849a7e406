"""Reads the Thinker and the towers of Qwen3-Omni checkpoints. Their tensor names appear here only."""

from __future__ import annotations

from pathlib import Path

import torch

from hocket.models.qwen3_omni import audio, thinker, vision
from hocket.models.qwen3_omni.config import ModelConfig, read_media_config
from hocket.models.qwen3_omni.tower import Affine
from hocket.nn.checkpoint import Reader, open_tensors
from hocket.nn.mel import mel_filters
from hocket.nn.moe import read_layer
from hocket.nn.parallel import WHOLE, Shard


def load_thinker(
    folder: Path,
    config: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    *,
    float8: bool = False,
    shard: Shard = WHOLE,
) -> thinker.ThinkerWeights:
    """folder: the model's. float8: experts in half the bytes, see `hocket.nn.moe.in_float8`. shard: the part
    of each layer to read. Raises StartupError."""
    t = config.thinker_config.text_config
    r = Reader(open_tensors(folder, device), "thinker.", dtype)
    return thinker.ThinkerWeights(
        embed=r("model.embed_tokens.weight"),
        layers=[
            read_layer(
                r.under(f"model.layers.{i}"), t.num_experts, t.num_experts_per_tok, float8=float8, shard=shard
            )
            for i in range(t.num_hidden_layers)
        ],
        norm=r("model.norm.weight"),
        head=r("lm_head.weight"),
    )


# --- towers ------------------------------------------------------------------------------------


def load_audio(
    folder: Path, config: ModelConfig, device: torch.device, dtype: torch.dtype
) -> audio.AudioWeights:
    """folder: the model's. Raises StartupError."""
    c = config.thinker_config.audio_config
    r = Reader(open_tensors(folder, device), "thinker.audio_tower.", dtype)
    filters = mel_filters(audio.RATE_HZ, audio.FFT, c.num_mel_bins, audio.TOP_HZ)
    return audio.AudioWeights(
        filters=torch.from_numpy(filters).to(device),
        convs=[_affine(r, f"conv2d{i}") for i in (1, 2, 3)],
        enter=r("conv_out.weight"),
        layers=[_audio_layer(r.under(f"layers.{i}")) for i in range(c.encoder_layers)],
        norm=_affine(r, "ln_post"),
        leave_in=_affine(r, "proj1"),
        leave_out=_affine(r, "proj2"),
    )


def _audio_layer(r: Reader) -> audio.AudioLayerWeights:
    qkv = [f"self_attn.{x}_proj" for x in "qkv"]
    return audio.AudioLayerWeights(
        norm_in=_affine(r, "self_attn_layer_norm"),
        qkv=Affine(r.stacked(*qkv), torch.cat([r(f"{name}.bias") for name in qkv])),
        out=_affine(r, "self_attn.out_proj"),
        norm_mlp=_affine(r, "final_layer_norm"),
        up=_affine(r, "fc1"),
        down=_affine(r, "fc2"),
    )


def load_vision(
    folder: Path, config: ModelConfig, device: torch.device, dtype: torch.dtype
) -> vision.VisionWeights:
    """folder: the model's. Raises StartupError."""
    c, media = config.thinker_config.vision_config, read_media_config(folder)
    r = Reader(open_tensors(folder, device), "thinker.visual.", dtype)
    patch = r("patch_embed.proj.weight").flatten(1)  # published as a convolution whose steps do not overlap
    mean, deviation = (
        torch.tensor(values, device=device).mul(1 / media.rescale_factor)[:, None, None]
        for values in (media.image_mean, media.image_std)
    )
    return vision.VisionWeights(
        mean=mean,
        deviation=deviation,
        enter=Affine(patch, r("patch_embed.proj.bias")),
        places=r("pos_embed.weight"),
        blocks=[
            vision.BlockWeights(
                norm_in=_affine(b, "norm1"),
                qkv=_affine(b, "attn.qkv"),
                out=_affine(b, "attn.proj"),
                norm_mlp=_affine(b, "norm2"),
                up=_affine(b, "mlp.linear_fc1"),
                down=_affine(b, "mlp.linear_fc2"),
            )
            for b in (r.under(f"blocks.{i}") for i in range(c.depth))
        ],
        merger=_merger(r.under("merger")),
        deep=[_merger(r.under(f"merger_list.{k}")) for k in range(len(c.deepstack_visual_indexes))],
    )


def _merger(r: Reader) -> vision.MergerWeights:
    return vision.MergerWeights(norm=_affine(r, "ln_q"), up=_affine(r, "mlp.0"), down=_affine(r, "mlp.2"))


def _affine(r: Reader, name: str) -> Affine:
    return Affine(r(f"{name}.weight"), r(f"{name}.bias"))
