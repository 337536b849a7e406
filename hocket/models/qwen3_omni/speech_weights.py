"""Reads the Talker and Code2Wav of Qwen3-Omni checkpoints. Their tensor names appear here, and in the readers
that both families of 12 Hz speech models share.

Derived tables and folded matrices are computed in fp32 and rounded once, to the dtype asked for.
"""

from __future__ import annotations

from pathlib import Path

import torch

from hocket.models.qwen3_omni.code2wav import Code2WavWeights, wave_shape
from hocket.models.qwen3_omni.config import ModelConfig
from hocket.models.qwen3_omni.talker import OmniTalkerWeights
from hocket.nn.checkpoint import Reader, open_tensors
from hocket.nn.moe import read_layer
from hocket.nn.talker import read_resize, read_talker
from hocket.nn.wave import read_wave


def load_talker(
    folder: Path, config: ModelConfig, device: torch.device, dtype: torch.dtype
) -> OmniTalkerWeights:
    """The Talker, its code predictor and the table of the Thinker's text embeddings. Raises StartupError."""
    c = config.talker
    t = c.text_config
    r = Reader(open_tensors(folder, device), "talker.", dtype)
    layers = [
        read_layer(r.under(f"model.layers.{i}"), t.num_experts, t.num_experts_per_tok)
        for i in range(t.num_hidden_layers)
    ]
    fc1, fc2 = read_resize(r.under("hidden_projection"))
    talker = read_talker(
        r,
        layers,
        embedding=r.tensors["thinker.model.embed_tokens.weight"],
        end=c.codec_eos_token_id,
        inner_layers=c.code_predictor_config.num_hidden_layers,
        books=c.num_code_groups,
    )
    return OmniTalkerWeights(talker, fc1, fc2)


def load_code2wav(
    folder: Path, config: ModelConfig, device: torch.device | str, dtype: torch.dtype
) -> Code2WavWeights:
    """Raises StartupError."""
    c = config.code2wav
    r = Reader(open_tensors(folder, device), "code2wav.", dtype)
    return Code2WavWeights(
        books=r("code_embedding.weight").unflatten(0, (c.num_quantizers, c.codebook_size)),
        wave=read_wave(r, wave_shape(c), c.num_hidden_layers),
    )
