"""What a VoxCPM checkpoint's config.json says: VoxCPM2, VoxCPM1.5 and VoxCPM-0.5B.

Fields bear the file's own key names. A key without a default must be there; keys we do not read may be too.
Defaults are those of the published classes (voxcpm 2.0.3: model/voxcpm2.py, model/voxcpm.py), which leave
some keys out of a file. The two generations differ in how their halves meet; see `ModelConfig.v2`.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, Literal

import msgspec

from hocket.errors import StartupError
from hocket.models.voxcpm.vae import VaeConfig, VaeConfigV2
from hocket.nn.transformer import Shape

CONTROL = {"audio_start": 101, "reference_start": 103, "reference_end": 104}  # fixed in the published code


class RopeScaling(msgspec.Struct, frozen=True, kw_only=True):
    """LongRoPE (arXiv 2402.13753): one divisor of the angle for each pair of channels."""

    long_factor: tuple[float, ...]
    short_factor: tuple[float, ...]
    original_max_position_embeddings: int


class LmConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`lm_config`: the base LM; every other stack takes what is not its own from it."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling
    vocab_size: int
    scale_emb: float
    scale_depth: float
    use_mup: bool = True
    kv_channels: int | None = None


class StackConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`encoder_config`, `dit_config`: a short bidirectional stack."""

    hidden_dim: int = 1024
    ffn_dim: int = 4096
    num_heads: int = 16
    num_layers: int = 4
    kv_channels: int | None = None
    dit_mean_mode: Literal[False] = False


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """config.json."""

    lm_config: LmConfig
    encoder_config: StackConfig
    dit_config: StackConfig
    architecture: Literal["voxcpm", "voxcpm2"] = "voxcpm"
    patch_size: int
    feat_dim: int = 64
    residual_lm_num_layers: int
    residual_lm_no_rope: bool = False
    scalar_quantization_latent_dim: int
    scalar_quantization_scale: int = 9
    max_length: int

    @property
    def v2(self) -> bool:
        """VoxCPM2: both LMs' hidden states reach the diffusion as tokens of their own, the residual LM reads
        a projection of both inputs, and a recording may stand before the text. Before, they were added up."""
        return self.architecture == "voxcpm2"

    @property
    def shape(self) -> Shape:
        """Of base and residual LM."""
        lm = self.lm_config
        return self._shape(lm.hidden_size, lm.num_attention_heads, lm.kv_channels)

    def stack_shape(self, stack: StackConfig) -> Shape:
        """Of an encoder or diffusion layer."""
        return self._shape(stack.hidden_dim, stack.num_heads, stack.kv_channels)

    def _shape(self, hidden: int, heads: int, head_dim: int | None) -> Shape:
        lm = self.lm_config
        return Shape(heads, lm.num_key_value_heads, head_dim or hidden // heads, lm.rms_norm_eps)

    def residual_scale(self, layers: int) -> float:
        """By which a stack of so many layers multiplies what each adds."""
        return self.lm_config.scale_depth / math.sqrt(layers) if self.lm_config.use_mup else 1.0

    @property
    def embedding_scale(self) -> float:
        return self.lm_config.scale_emb if self.lm_config.use_mup else 1.0


def read_model_config(folder: Path) -> ModelConfig:
    """config.json. Raises StartupError naming the file and the key."""
    path = folder / "config.json"
    try:
        content: dict[str, Any] = json.loads(path.read_text("utf-8"))
        defaults = _DEFAULTS.get(content.get("architecture", "voxcpm"), {})
        config = msgspec.convert(defaults | content, ModelConfig)
    except OSError as e:
        raise StartupError(f"cannot read config.json in {folder}: {e.strerror}") from e
    except (msgspec.ValidationError, ValueError, AttributeError) as e:
        raise StartupError(f"{path}: {e}") from e
    lm, pairs = config.lm_config, config.shape.head_dim // 2
    for name in ("long_factor", "short_factor"):
        count = len(getattr(lm.rope_scaling, name))
        if count != pairs:
            raise StartupError(
                f"{path}: lm_config.rope_scaling.{name} holds {count} values, expected {pairs}"
            )
    for part in (config.encoder_config, config.dit_config):
        if config.stack_shape(part).head_dim != config.shape.head_dim:
            raise StartupError(
                f"{path}: encoder_config, dit_config and lm_config must have heads of one width"
            )
    return config


_DEFAULTS: dict[str, dict[str, Any]] = {
    "voxcpm": {
        "patch_size": 2, "residual_lm_num_layers": 6,
        "scalar_quantization_latent_dim": 256, "max_length": 4096,
    },
    "voxcpm2": {
        "patch_size": 4, "residual_lm_num_layers": 8,
        "scalar_quantization_latent_dim": 512, "max_length": 8192,
    },
}  # fmt: skip


def read_vae_config(folder: Path, config: ModelConfig) -> VaeConfig:
    """`audio_vae_config` of config.json, or the published class's values where there is none. Raises
    StartupError."""
    path = folder / "config.json"
    kind = VaeConfigV2 if config.v2 else VaeConfig
    try:
        content = json.loads(path.read_text("utf-8")).get("audio_vae_config")
        vae: VaeConfig = kind() if content is None else msgspec.convert(content, kind)
    except (OSError, ValueError) as e:
        raise StartupError(f"{path}: audio_vae_config: {e}") from e
    if vae.latent_dim != config.feat_dim:
        raise StartupError(
            f"{path}: feat_dim is {config.feat_dim}, but audio_vae_config.latent_dim is {vae.latent_dim}"
        )
    return vae
