"""What the checkpoint's files say about the talker, the codec and the speaker encoder.

Fields bear the files' own key names. A key without a default must be there; keys we do not read may be too.
Lists whose values follow from the weights' shapes (kernel sizes, widths) are not read at all.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, Literal

import msgspec

from hocket.errors import StartupError

CODEC_FOLDER = "speech_tokenizer"  # inside a model's folder; the codec is also published alone


class DecoderConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Codes to waveform."""

    codebook_size: int
    codebook_dim: int
    num_quantizers: int
    latent_dim: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    hidden_act: Literal["silu"]
    rms_norm_eps: float
    rope_theta: float
    sliding_window: int
    decoder_dim: int
    upsampling_ratios: tuple[int, ...]
    upsample_rates: tuple[int, ...]

    @property
    def hop(self) -> int:
        """Samples a frame."""
        return math.prod(self.upsampling_ratios) * math.prod(self.upsample_rates)


class EncoderConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Waveform to codes. `sliding_window` is not read: the published encoder attends to everything before."""

    upsampling_ratios: tuple[int, ...]  # the encoder downsamples by them, last first
    num_residual_layers: Literal[1]
    pad_mode: Literal["constant"]
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    hidden_act: Literal["gelu"]
    norm_eps: float
    rope_theta: float
    num_semantic_quantizers: Literal[1]
    num_quantizers: int


class CodecConfig(msgspec.Struct, frozen=True, kw_only=True):
    """speech_tokenizer/config.json"""

    model_type: Literal["qwen3_tts_tokenizer_12hz"]
    input_sample_rate: int
    output_sample_rate: int
    encode_downsample_rate: int  # samples a frame, both ways
    decode_upsample_rate: int
    encoder_valid_num_quantizers: int
    decoder_config: DecoderConfig
    encoder_config: EncoderConfig


class SpeakerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """config.json's `speaker_encoder_config`. Released files give enc_dim and sample_rate only; the other
    values are those of the class in qwen-tts 0.1.1: core/models/configuration_qwen3_tts.py."""

    enc_dim: int
    sample_rate: int
    mel_dim: int = 128
    enc_channels: tuple[int, ...] = (512, 512, 512, 512, 1536)
    enc_dilations: tuple[int, ...] = (1, 2, 3, 4, 1)
    enc_res2net_scale: int = 8


class _WithSpeaker(msgspec.Struct, frozen=True, kw_only=True):
    speaker_encoder_config: SpeakerConfig


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
    """`talker_config` of config.json: the backbone, and ids with a meaning."""

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
    """config.json."""

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


def load_codec_config(folder: Path) -> CodecConfig:
    """folder: the codec's own, see CODEC_FOLDER. Raises StartupError."""
    path = folder / "config.json"
    config: CodecConfig = read_json(path, CodecConfig)
    hop, decoder = config.decode_upsample_rate, config.decoder_config
    if decoder.hop != hop:
        raise StartupError(
            f"{path}: decode_upsample_rate is {hop}, but the product of upsampling_ratios and upsample_rates"
            f" is {decoder.hop}"
        )
    if config.encoder_valid_num_quantizers != decoder.num_quantizers:
        raise StartupError(
            f"{path}: encoder_valid_num_quantizers is {config.encoder_valid_num_quantizers},"
            f" but decoder_config.num_quantizers is {decoder.num_quantizers}"
        )
    return config


def load_speaker_config(folder: Path) -> SpeakerConfig:
    """folder: the model's. Raises StartupError if the checkpoint has no speaker encoder."""
    holder: _WithSpeaker = read_json(folder / "config.json", _WithSpeaker)
    return holder.speaker_encoder_config
