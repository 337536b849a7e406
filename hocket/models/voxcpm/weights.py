"""Reads VoxCPM checkpoints and LoRA folders. The files' tensor names appear here only.

A file is model.safetensors, or pytorch_model.bin as VoxCPM-0.5B ships. Scales by depth (`use_mup`) are folded
into the matrices in fp32 and rounded once.
"""

from __future__ import annotations

import dataclasses
import json
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from hocket.errors import StartupError
from hocket.models.voxcpm.config import ModelConfig, StackConfig
from hocket.models.voxcpm.patches import Diffusion, Encoder, time_tables
from hocket.models.voxcpm.stacks import Layer, Linear, Lora, Stack, in_float8, long_rope
from hocket.models.voxcpm.talker import TalkerWeights, rope_of
from hocket.nn.checkpoint import Reader, open_tensors
from hocket.nn.transformer import BlockWeights, Shape

LORA_FOLDER = "lora"  # beside the weights: one folder for each LoRA, named as requests name it


class Pickled(dict[str, Tensor]):
    """Tensors of a file that torch.save wrote. Raises StartupError for one that is not there."""

    def __init__(self, path: Path, device: torch.device | str) -> None:
        self.path = path
        try:
            content = torch.load(path, map_location=device, weights_only=True)
        except (OSError, RuntimeError, pickle.UnpicklingError) as e:
            raise StartupError(f"cannot read {path}: {e}") from e
        super().__init__(content.get("state_dict", content))

    def __missing__(self, name: str) -> Tensor:
        raise StartupError(f"tensor {name!r} is missing from {self.path}")


def open_model(folder: Path, device: torch.device | str) -> Mapping[str, Tensor]:
    """The transformer's tensors. Raises StartupError."""
    pickled = folder / "pytorch_model.bin"
    if pickled.exists() and not (folder / "model.safetensors").exists():
        return Pickled(pickled, device)
    return open_tensors(folder, device)


def load_talker(
    folder: Path, config: ModelConfig, device: torch.device, dtype: torch.dtype, *, float8: bool = False
) -> TalkerWeights:
    """All but the vocoder, with every LoRA under the folder's `lora`; float8: the diffusion's products, see
    `hocket.models.voxcpm.stacks.in_float8`. Raises StartupError."""
    adapters = read_loras(folder)
    parts = _Parts(Reader(open_model(folder, device), "", dtype), adapters, device)
    c, r = config, parts.r
    lm = c.lm_config
    factor, scale = rope_of(c, device)

    def tables(tokens: int) -> tuple[Tensor, Tensor]:
        position = torch.arange(tokens, device=device)
        return long_rope(c.shape.head_dim, lm.rope_theta, factor, scale, position)

    def stack(name: str, layers: int) -> Stack:
        return parts.stack(name, layers, c.shape, c.residual_scale(layers))

    def short(name: str, part: StackConfig) -> Stack:
        layers = part.num_layers
        return parts.stack(name, layers, c.stack_shape(part), c.residual_scale(layers), short=True)

    dit = "feat_decoder.estimator"
    mlps = [
        (parts.linear(f"{dit}.{mlp}.linear_1"), parts.linear(f"{dit}.{mlp}.linear_2"))
        for mlp in ("time_mlp", "delta_time_mlp")
    ]
    time, length = time_tables(mlps[0], mlps[1])
    drawing = short(f"{dit}.decoder", c.dit_config)
    weights = TalkerWeights(
        text=parts.scaled("base_lm.embed_tokens", c.embedding_scale),
        base=stack("base_lm", lm.num_hidden_layers),
        residual=stack("residual_lm", c.residual_lm_num_layers),
        grid_in=parts.linear("fsq_layer.in_proj"),
        grid_out=parts.linear("fsq_layer.out_proj"),
        fusion=parts.adapted("fusion_concat_proj") if c.v2 else None,
        to_mu=(parts.adapted("lm_to_dit_proj"), parts.adapted("res_to_dit_proj")),
        stop=parts.linear("stop_proj"),
        stop_head=r("stop_head.weight"),
        encoder=Encoder(
            parts.linear("feat_encoder.in_proj"),
            r("feat_encoder.special_token").flatten(),
            short("feat_encoder.encoder", c.encoder_config),
            parts.adapted("enc_to_lm_proj"),
            *tables(1 + c.patch_size),
        ),
        diffusion=Diffusion(
            parts.linear(f"{dit}.in_proj"),
            parts.linear(f"{dit}.cond_proj"),
            in_float8(drawing) if float8 else drawing,
            parts.linear(f"{dit}.out_proj"),
            time,
            length,
            *tables((3 if c.v2 else 1) + 2 * c.patch_size),
        ),
        loras=tuple(a.name for a in adapters),
        owner=parts.owner,
    )
    parts.check_all_used()
    return weights


# --- LoRA --------------------------------------------------------------------------------------


class _LoraConfig(msgspec.Struct, frozen=True, kw_only=True):
    r: int = 8
    alpha: float = 16


class _LoraFile(msgspec.Struct, frozen=True, kw_only=True):
    lora_config: _LoraConfig


@dataclass(frozen=True, slots=True)
class Adapter:
    """One LoRA folder: matrices by module path and side, and what they are scaled by."""

    name: str
    rank: int
    scale: float
    tensors: dict[str, Tensor]


def lora_names(folder: Path) -> tuple[str, ...]:
    """The LoRAs that lie beside a checkpoint, in the order in which they are loaded."""
    return tuple(sorted(p.parent.name for p in (folder / LORA_FOLDER).glob("*/lora_config.json")))


def read_loras(folder: Path) -> list[Adapter]:
    """Every LoRA under `folder`/lora, on the CPU. Raises StartupError."""
    return [_read_lora(folder / LORA_FOLDER / name) for name in lora_names(folder)]


def _read_lora(folder: Path) -> Adapter:
    path = folder / "lora_config.json"
    try:
        file = msgspec.convert(json.loads(path.read_text("utf-8")), _LoraFile)
    except (OSError, ValueError, msgspec.ValidationError) as e:
        raise StartupError(f"{path}: {e}") from e
    tensors: Mapping[str, Tensor]
    if (folder / "lora_weights.safetensors").exists():
        try:
            tensors = load_file(folder / "lora_weights.safetensors")
        except SafetensorError as e:
            raise StartupError(f"cannot read {folder}/lora_weights.safetensors: {e}") from e
    else:
        tensors = Pickled(folder / "lora_weights.ckpt", "cpu")
    c = file.lora_config
    for name, tensor in tensors.items():
        side = name.rpartition(".")[2]
        if side not in ("lora_A", "lora_B"):
            raise StartupError(
                f"{folder}: {name!r} is no LoRA tensor; expected names that end in .lora_A or .lora_B"
            )
        if tensor.shape[0 if side == "lora_A" else 1] != c.r:
            raise StartupError(
                f"{folder}: {name} is of shape {list(tensor.shape)}, but lora_config.r is {c.r}"
            )
    return Adapter(folder.name, c.r, c.alpha / c.r, dict(tensors))


def _stacked(r: Reader, *names: str) -> Tensor:
    """Matrices of one input in one, fp32."""
    return torch.cat([r.wide(f"{name}.weight") for name in names])


class _Parts:
    """Modules by name, each with the LoRAs that touch it."""

    def __init__(self, r: Reader, adapters: list[Adapter], device: torch.device) -> None:
        self.r, self.adapters, self.device = r, adapters, device
        owner = [place for place, a in enumerate(adapters, 1) for _ in range(a.rank)]
        self.owner = torch.tensor(owner, dtype=torch.int64, device=device)
        self._unused = {(a.name, name) for a in adapters for name in a.tensors}

    def check_all_used(self) -> None:
        """Raises StartupError for a LoRA tensor that belongs to nothing that can have one."""
        for lora, name in sorted(self._unused):
            raise StartupError(f"LoRA {lora!r}: {name} belongs to no matrix that takes a LoRA here")

    def scaled(self, name: str, scale: float) -> Tensor:
        """A matrix times `scale`, rounded once."""
        if scale == 1:
            return self.r(f"{name}.weight")
        return self.r.round(self.r.wide(f"{name}.weight") * scale)

    def linear(self, name: str) -> Linear:
        return Linear(self.r(f"{name}.weight"), self.r(f"{name}.bias"))

    def adapted(self, name: str) -> Linear:
        """A projection that may have LoRAs."""
        w = self.linear(name)
        return dataclasses.replace(w, lora=self._lora([(name, w.weight.shape[0])], w.weight.shape[1]))

    def stack(self, name: str, layers: int, shape: Shape, scale: float, short: bool = False) -> Stack:
        """See `hocket.models.voxcpm.stacks` for what is folded where."""
        made = [self._layer(f"{name}.layers.{i}", shape, scale, short) for i in range(layers)]
        return Stack(made, self.r(f"{name}.norm.weight"), shape)

    def _layer(self, name: str, s: Shape, scale: float, short: bool) -> Layer:
        r = self.r.under(name)
        norm_in, norm_mlp = r.wide("input_layernorm.weight"), r.wide("post_attention_layernorm.weight")
        names = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        w = BlockWeights(
            norm_in=r.round(torch.ones_like(norm_in) if short else norm_in),
            qkv=r.round(_stacked(r, *names) * norm_in) if short else r.stacked(*names),
            out=self.scaled(f"{name}.self_attn.o_proj", scale),
            norm_mlp=None,
            gate_up=r.round(_stacked(r, "mlp.gate_proj", "mlp.up_proj") * norm_mlp),
            down=self.scaled(f"{name}.mlp.down_proj", scale),
        )
        d = w.qkv.shape[1]
        heads = [("q", s.heads), ("k", s.kv_heads), ("v", s.kv_heads)]
        qkv = self._lora([(f"{name}.self_attn.{x}_proj", n * s.head_dim) for x, n in heads], d)
        if qkv is not None and short:
            qkv = dataclasses.replace(qkv, down=r.round(qkv.down.float() * norm_in))
        out = [(f"{name}.self_attn.o_proj", d)]
        return Layer(w, qkv, self._lora(out, s.heads * s.head_dim, scale))

    def _lora(self, targets: list[tuple[str, int]], width: int, scale: float = 1.0) -> Lora | None:
        """The LoRAs of stacked matrices (name, rows) of one input of `width`; `scale`: as the matrix's."""
        if not self.adapters:
            return None
        ranks = sum(a.rank for a in self.adapters)
        down = torch.zeros(len(targets) * ranks, width)
        up = torch.zeros(sum(rows for _, rows in targets), len(targets) * ranks)
        column, row = 0, 0
        for name, rows in targets:
            for a in self.adapters:
                if f"{name}.lora_A" in a.tensors:
                    here = slice(column, column + a.rank)
                    self._copy(down[here], a, f"{name}.lora_A")
                    self._copy(up[row : row + rows, here], a, f"{name}.lora_B", a.scale * scale)
                column += a.rank
            row += rows
        return Lora(down.to(self.device, self.r.dtype), up.to(self.device, self.r.dtype))

    def _copy(self, where: Tensor, a: Adapter, name: str, scale: float = 1.0) -> None:
        if name not in a.tensors or a.tensors[name].shape != where.shape:
            found: Any = list(a.tensors[name].shape) if name in a.tensors else "missing"
            raise StartupError(f"LoRA {a.name!r}: {name} is {found}, expected {list(where.shape)}")
        self._unused.discard((a.name, name))
        where.copy_(a.tensors[name].float() * scale)
