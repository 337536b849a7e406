"""What the checkpoint's files say about the Thinker with its two towers, the Talker and Code2Wav.

Fields bear the files' own key names. A key without a default must be there; keys we do not read may be too.
Lists whose values follow from the weights' shapes are not read at all. Thinking and Captioner checkpoints
have no `talker_config` and no `code2wav_config`.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, Literal

import msgspec

from hocket.errors import StartupError

# --- positions ---------------------------------------------------------------------------------


class Rope(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary options as either generation of files has them; see `_WithRope`."""

    rope_theta: float | None = None  # in `rope_parameters` only
    mrope_section: tuple[int, int, int] | None = None
    rope_type: Literal["default"] = "default"


class _WithRope(msgspec.Struct, frozen=True, kw_only=True):
    """Files as first published give `rope_theta` beside `rope_scaling`; files saved again by transformers 5
    give both in `rope_parameters`."""

    rope_theta: float | None = None
    rope_scaling: Rope | None = None
    rope_parameters: Rope | None = None

    @property
    def theta(self) -> float:
        """Raises StartupError if neither form says it."""
        newer = self.rope_parameters.rope_theta if self.rope_parameters else None
        theta = newer if newer is not None else self.rope_theta
        if theta is None:
            raise StartupError("config.json gives neither rope_theta nor rope_parameters.rope_theta")
        return theta

    @property
    def sections(self) -> tuple[int, int, int]:
        """How many of the rotary frequencies follow time, height and width. Raises StartupError."""
        for rope in (self.rope_parameters, self.rope_scaling):
            if rope is not None and rope.mrope_section is not None:
                return rope.mrope_section
        raise StartupError("config.json gives no mrope_section in rope_scaling or rope_parameters")


# --- Thinker -----------------------------------------------------------------------------------


class AudioConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`thinker_config.audio_config`: mel features to embeddings."""

    num_mel_bins: int
    d_model: int
    encoder_layers: int
    encoder_attention_heads: int
    encoder_ffn_dim: int
    downsample_hidden_size: int
    output_dim: int
    n_window: int  # half a chunk, in mel frames
    n_window_infer: int  # mel frames within which attention sees everything
    max_source_positions: int
    activation_function: Literal["gelu"]
    scale_embedding: Literal[False]

    @property
    def chunk(self) -> int:
        """Mel frames that are convolved together."""
        return 2 * self.n_window

    @property
    def chunk_tokens(self) -> int:
        """Positions that a whole chunk takes."""
        return _thrice_halved(self.chunk)

    def tokens(self, frames: int) -> int:
        """Positions that so many mel frames of one recording take."""
        return frames // self.chunk * self.chunk_tokens + _thrice_halved(frames % self.chunk)


def _thrice_halved(frames: int) -> int:
    for _ in range(3):
        frames = (frames + 1) // 2
    return frames


class VisionConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`thinker_config.vision_config`: patches to embeddings."""

    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    in_channels: int
    patch_size: int
    temporal_patch_size: int
    spatial_merge_size: int
    out_hidden_size: int
    num_position_embeddings: int
    deepstack_visual_indexes: tuple[int, ...]
    hidden_act: Literal["gelu_pytorch_tanh"]

    @property
    def patch_values(self) -> int:
        """Numbers in a patch."""
        return self.in_channels * self.temporal_patch_size * self.patch_size**2


class DecoderConfig(_WithRope, frozen=True, kw_only=True):
    """Widths of a stack of decoder layers."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    hidden_act: Literal["silu"]
    attention_bias: Literal[False]
    tie_word_embeddings: Literal[False] = False


class MoeConfig(DecoderConfig, frozen=True, kw_only=True):
    """A stack whose MLPs are mixtures of experts."""

    moe_intermediate_size: int
    num_experts: int
    num_experts_per_tok: int
    norm_topk_prob: Literal[True]
    decoder_sparse_step: Literal[1] = 1  # every layer is a mixture
    mlp_only_layers: tuple[()] = ()


class ThinkerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`thinker_config`."""

    text_config: MoeConfig
    audio_config: AudioConfig
    vision_config: VisionConfig
    audio_token_id: int
    image_token_id: int
    video_token_id: int
    audio_start_token_id: int
    position_id_per_seconds: int  # positions that a second of film or sound takes


# --- Talker and Code2Wav -----------------------------------------------------------------------


class PredictorConfig(DecoderConfig, frozen=True, kw_only=True):
    """`talker_config.code_predictor_config`: the codes of a frame after the first."""

    intermediate_size: int
    num_code_groups: int


class TalkerTextConfig(MoeConfig, frozen=True, kw_only=True):
    """`talker_config.text_config`: the Talker's backbone."""

    intermediate_size: int  # inner width of the two projections
    shared_expert_intermediate_size: int


class TalkerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`talker_config`."""

    text_config: TalkerTextConfig
    code_predictor_config: PredictorConfig
    num_code_groups: int
    thinker_hidden_size: int
    accept_hidden_layer: int  # decoder layers of the Thinker before the hidden rows of media are taken
    spatial_merge_size: int
    position_id_per_seconds: int
    codec_pad_id: int
    codec_bos_id: int
    codec_eos_token_id: int
    codec_nothink_id: int
    codec_think_bos_id: int
    codec_think_eos_id: int
    speaker_id: dict[str, int]


class Code2WavConfig(_WithRope, frozen=True, kw_only=True):
    """`code2wav_config`: codes to waveform."""

    codebook_size: int
    num_quantizers: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    sliding_window: int
    rms_norm_eps: float
    hidden_act: Literal["silu"]
    attention_bias: Literal[False]
    decoder_dim: int
    upsample_rates: tuple[int, ...]
    upsampling_ratios: tuple[int, ...]

    @property
    def head_dim(self) -> int:
        """Channels of an attention head."""
        return self.hidden_size // self.num_attention_heads

    @property
    def hop(self) -> int:
        """Samples a frame."""
        return math.prod(self.upsampling_ratios) * math.prod(self.upsample_rates)


# --- files -------------------------------------------------------------------------------------


class Size(msgspec.Struct, frozen=True, kw_only=True):
    """Pixels of an image, in files saved again by transformers 5."""

    shortest_edge: int
    longest_edge: int


class MediaConfig(msgspec.Struct, frozen=True, kw_only=True):
    """preprocessor_config.json: what pixels and samples are before the towers see them."""

    feature_size: int
    sampling_rate: Literal[16000]
    hop_length: Literal[160]
    n_fft: Literal[400]
    image_mean: tuple[float, float, float]
    image_std: tuple[float, float, float]
    rescale_factor: float = 1 / 255
    patch_size: int
    temporal_patch_size: int
    merge_size: int
    min_pixels: int | None = None
    max_pixels: int | None = None
    size: Size | None = None

    @property
    def pixels(self) -> tuple[int, int]:
        """Least and most pixels of an image. Raises StartupError if neither form says it."""
        if self.min_pixels is not None and self.max_pixels is not None:
            return self.min_pixels, self.max_pixels
        if self.size is not None:
            return self.size.shortest_edge, self.size.longest_edge
        raise StartupError("preprocessor_config.json gives neither min_pixels and max_pixels nor size")


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """config.json."""

    model_type: Literal["qwen3_omni_moe"]
    thinker_config: ThinkerConfig
    im_start_token_id: int
    im_end_token_id: int
    system_token_id: int
    user_token_id: int
    assistant_token_id: int
    tts_pad_token_id: int
    tts_bos_token_id: int
    tts_eos_token_id: int
    enable_audio_output: bool = True
    talker_config: TalkerConfig | None = None
    code2wav_config: Code2WavConfig | None = None

    @property
    def speaks(self) -> bool:
        """Whether the checkpoint can make sound."""
        return self.enable_audio_output and self.talker_config is not None

    @property
    def talker(self) -> TalkerConfig:
        """The Talker's part. Raises StartupError for a checkpoint without one."""
        if self.talker_config is None:
            raise StartupError("config.json has no talker_config: this checkpoint only writes text")
        return self.talker_config

    @property
    def code2wav(self) -> Code2WavConfig:
        """The codec's part. Raises StartupError for a checkpoint without one."""
        if self.code2wav_config is None:
            raise StartupError("config.json has no code2wav_config: this checkpoint only writes text")
        return self.code2wav_config


def read_json(path: Path) -> Any:
    """The content of `path`. Raises StartupError."""
    try:
        return json.loads(path.read_text("utf-8"))
    except OSError as e:
        raise StartupError(f"cannot read {path.name} in {path.parent}: {e.strerror}") from e
    except ValueError as e:
        raise StartupError(f"{path}: {e}") from e


def read_model_config(folder: Path) -> ModelConfig:
    """config.json, its parts checked against each other. Raises StartupError."""
    path = folder / "config.json"
    content = read_json(path)
    try:
        stack = content["talker_config"]["text_config"]
        if "num_local_experts" in stack:  # what transformers 5 saves num_experts as, in this part only
            stack.setdefault("num_experts", stack["num_local_experts"])
    except (KeyError, TypeError):
        pass  # no Talker, or not what it should be: said below
    try:
        config = msgspec.convert(content, ModelConfig)
    except msgspec.ValidationError as e:
        raise StartupError(f"{path}: {e}") from e
    t = config.thinker_config
    _check(
        path, "thinker_config.audio_config.output_dim", t.audio_config.output_dim, t.text_config.hidden_size
    )
    _check(
        path,
        "thinker_config.vision_config.out_hidden_size",
        t.vision_config.out_hidden_size,
        t.text_config.hidden_size,
    )
    stacks: list[tuple[str, MoeConfig]] = [("thinker_config", t.text_config)]
    if config.talker_config is not None:
        k = config.talker_config
        stacks.append(("talker_config", k.text_config))
        _check(path, "talker_config.thinker_hidden_size", k.thinker_hidden_size, t.text_config.hidden_size)
        _check(
            path,
            "talker_config.code_predictor_config.num_code_groups",
            k.code_predictor_config.num_code_groups,
            k.num_code_groups,
        )
        _check(
            path,
            "talker_config.code_predictor_config.hidden_size",
            k.code_predictor_config.hidden_size,
            k.text_config.hidden_size,
        )
        layers, maps = t.text_config.num_hidden_layers, len(t.vision_config.deepstack_visual_indexes)
        if not maps < k.accept_hidden_layer <= layers:
            raise StartupError(
                f"{path}: talker_config.accept_hidden_layer is {k.accept_hidden_layer}; it must lie after the"
                f" {maps} layers that take deepstack maps and within the Thinker's {layers}"
            )
    for name, stack in stacks:
        _check(path, f"{name}.text_config: sum of mrope_section", sum(stack.sections), stack.head_dim // 2)
    return config


def read_media_config(folder: Path) -> MediaConfig:
    """preprocessor_config.json. Raises StartupError."""
    path = folder / "preprocessor_config.json"
    try:
        return msgspec.convert(read_json(path), MediaConfig)
    except msgspec.ValidationError as e:
        raise StartupError(f"{path}: {e}") from e


def _check(path: Path, name: str, found: int, wanted: int) -> None:
    if found != wanted:
        raise StartupError(f"{path}: {name} is {found}, but the other parts need {wanted}")
