"""Talker weights: tensor names of model.safetensors and what is folded at load."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hocket.models.qwen3_tts.talker_config import BlockConfig, ModelConfig
from hocket.models.qwen3_tts.weights import open_tensors
from hocket.nn.transformer import LayerWeights

RESERVED = 1024  # the talker's last ids are control ids; of them only the end token may be drawn


class TextTable:
    """The projected embedding of each text id: table [vocab, d], filled row by row on first use.

    The projection depends on the id only, so it is done once per id. Where arithmetic is cheap
    (`ensure` of every id on a GPU at load) the table is complete before the first request; on a CPU
    a full table would cost seconds, and a request needs a few dozen rows.
    """

    def __init__(self, embedding: Tensor, fc1: tuple[Tensor, Tensor], fc2: tuple[Tensor, Tensor]) -> None:
        self.embedding, self.fc1, self.fc2 = embedding, fc1, fc2
        self.table = fc2[0].new_empty(embedding.shape[0], fc2[0].shape[0])
        self.known = np.zeros(embedding.shape[0], bool)

    def ensure(self, ids: Iterable[int]) -> None:
        wanted = np.unique(np.fromiter(ids, np.int64))
        wanted = wanted[~self.known[wanted]] if len(wanted) else wanted
        for part in np.array_split(wanted, -(-len(wanted) // 8192) or 1):
            if len(part):
                at = torch.from_numpy(part)
                x = self.embedding[at.to(self.embedding.device)].to(self.table)
                rows = F.linear(F.silu(F.linear(x, *self.fc1)), *self.fc2)
                self.table[at.to(self.table.device)] = rows
        self.known[wanted] = True


@dataclass(frozen=True, slots=True)
class TalkerWeights:
    layers: list[LayerWeights]
    norm: Tensor  # [d]
    head: Tensor  # [legal, d]  the codes that may be drawn, then the end token
    text: TextTable
    codec: Tensor  # [vocab, d]  codebook-0 embedding, control ids and speakers included
    codes: Tensor  # [books, inner vocab, d]  embedding of each codebook, summed into the next input
    inner_layers: list[LayerWeights]
    inner_norm: Tensor  # [d']
    inner_heads: Tensor  # [books - 1, inner vocab, d']
    inner_embed: Tensor  # [books - 1, inner vocab, d']  `codes` through the predictor's input projection
    projection: tuple[Tensor, Tensor] | None  # d -> d'; None where the widths are equal

    def project(self, h: Tensor) -> Tensor:
        return h if self.projection is None else F.linear(h, *self.projection)


def load_talker(folder: Path, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> TalkerWeights:
    tensors = open_tensors(folder)
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
    text = TextTable(
        tensors["talker.model.text_embedding.weight"].to(device if device.type == "cuda" else "cpu"),
        (get("text_projection.linear_fc1.weight"), get("text_projection.linear_fc1.bias")),
        (get("text_projection.linear_fc2.weight"), get("text_projection.linear_fc2.bias")),
    )
    if device.type == "cuda":
        text.ensure(range(t.text_vocab_size))
        text.embedding = text.embedding.new_empty(0)
    return TalkerWeights(
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


def _layers(get: Callable[[str], Tensor], prefix: str, c: BlockConfig) -> list[LayerWeights]:
    out = []
    for i in range(c.num_hidden_layers):

        def at(name: str, i: int = i) -> Tensor:
            return get(f"{prefix}layers.{i}.{name}.weight")

        out.append(
            LayerWeights(
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
