"""config.json and generation_config.json of a Qwen3-TTS checkpoint, as far as the talker needs them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from hocket.errors import StartupError


class BlockConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Widths of one stack of decoder blocks."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    vocab_size: int
    num_code_groups: int
    max_position_embeddings: int


class TalkerConfig(BlockConfig, frozen=True, kw_only=True):
    text_hidden_size: int
    text_vocab_size: int
    codec_pad_id: int
    codec_bos_id: int
    codec_eos_token_id: int
    codec_think_id: int
    codec_nothink_id: int
    codec_think_bos_id: int
    codec_think_eos_id: int
    codec_language_id: dict[str, int]
    spk_id: dict[str, int]
    spk_is_dialect: dict[str, str | bool]
    code_predictor_config: BlockConfig


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    model_type: str
    tts_model_type: str  # base, custom_voice or voice_design
    tts_model_size: str  # 0b6 or 1b7
    im_start_token_id: int
    im_end_token_id: int
    assistant_token_id: int
    tts_pad_token_id: int
    tts_bos_token_id: int
    tts_eos_token_id: int
    talker_config: TalkerConfig


class GenerationConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The checkpoint's own sampling options."""

    do_sample: bool
    temperature: float
    top_k: int
    top_p: float
    repetition_penalty: float
    subtalker_dosample: bool
    subtalker_temperature: float
    subtalker_top_k: int
    subtalker_top_p: float
    max_new_tokens: int


def read_json(path: Path, kind: Any) -> Any:
    """`path` as a `kind`; StartupError names the file and the key that is missing or wrong."""
    try:
        return msgspec.convert(json.loads(path.read_text("utf-8")), kind)
    except OSError as e:
        raise StartupError(f"cannot read {path.name} in {path.parent}: {e.strerror}") from e
    except (msgspec.ValidationError, ValueError) as e:
        raise StartupError(f"{path}: {e}") from e


def read_model_config(folder: Path) -> ModelConfig:
    """config.json. Raises StartupError."""
    config: ModelConfig = read_json(folder / "config.json", ModelConfig)
    if config.talker_config.num_code_groups != config.talker_config.code_predictor_config.num_code_groups:
        raise StartupError(f"{folder}/config.json: talker and code predictor disagree on num_code_groups")
    return config


def read_generation_config(folder: Path) -> GenerationConfig:
    """generation_config.json. Raises StartupError."""
    config: GenerationConfig = read_json(folder / "generation_config.json", GenerationConfig)
    return config
