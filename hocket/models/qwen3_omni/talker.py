"""The Talker and its code predictor; see `hocket.nn.talker`. Here: what its prompts are made of.

The backbone's MLPs are mixtures of experts. Numerics follow transformers 5.17.0: models/qwen3_omni_moe
`Qwen3OmniMoeTalkerForConditionalGeneration`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from torch import Tensor

from hocket.core import Chunk, Job
from hocket.models.qwen3_omni.config import DecoderConfig, ModelConfig
from hocket.models.qwen3_omni.handoff import FIRST, INNER, NONE, TalkerInput, TalkerPrompt, open_prompt
from hocket.nn.moe import moe_layer
from hocket.nn.staging import to_device
from hocket.nn.talker import FrameTalker, Piece, TalkerShape, TalkerWeights, resize
from hocket.nn.transformer import Shape


@dataclass(frozen=True, slots=True)
class OmniTalkerWeights:
    """Weights of the Talker, and of the MLP that hidden rows of media go through."""

    talker: TalkerWeights
    hidden_fc1: tuple[Tensor, Tensor]
    hidden_fc2: tuple[Tensor, Tensor]


class TalkerProgram(FrameTalker):
    """Implements `hocket.core.AutoregressiveProgram`."""

    salt = 0x2545F4914F6CDD1D  # the Thinker draws with the job's seed as it is
    usual_variant = FIRST.variant | INNER.variant

    def __init__(self, config: ModelConfig, weights: OmniTalkerWeights) -> None:
        t, p = config.talker.text_config, config.talker.code_predictor_config
        shape = TalkerShape(
            outer=_shape(t),
            inner=_shape(p),
            theta=t.theta,
            inner_theta=p.theta,
            max_tokens=t.max_position_embeddings,
            pad=config.tts_pad_token_id,
            unending=0,
            sections=t.sections,
        )
        super().__init__(weights.talker, shape, moe_layer)
        self.config = config
        self._hidden = weights.hidden_fc1, weights.hidden_fc2

    def begin(self, job: Job, arrived: Mapping[str, Chunk]) -> TalkerPrompt:
        return open_prompt(self.config, msgspec.msgpack.decode(job.inputs["talker"], type=TalkerInput))

    def feed(self, prompt: TalkerPrompt, data: bytes) -> None:
        raise AssertionError("the text is the Thinker's")

    def take(self, prompt: TalkerPrompt, chunk: Chunk) -> None:
        prompt.take(chunk)

    def prompt_rows(self, pieces: Sequence[Piece]) -> Tensor:
        text = np.concatenate([p.text[start:stop] for p, start, stop in pieces])
        codec = np.concatenate([p.codec[start:stop] for p, start, stop in pieces])
        self.w.text.ensure(text)
        x = self.w.text.table[self._ids(text)]
        first, where, hidden = 0, [], []
        for p, start, stop in pieces:
            media = np.flatnonzero((p.media >= start) & (p.media < stop))
            if len(media):
                where.append(p.media[media] - start + first)
                hidden.append(p.hidden[media])
            first += stop - start
        if where:
            rows = to_device(np.concatenate(hidden), self.device).to(x.dtype)
            x[self._ids(np.concatenate(where))] = resize(rows, *self._hidden)
        added = np.flatnonzero(codec != NONE)
        if len(added):
            x.index_add_(0, self._ids(added), self.w.codec[self._ids(codec[added])])
        return x


def _shape(c: DecoderConfig) -> Shape:
    return Shape(c.num_attention_heads, c.num_key_value_heads, c.head_dim, c.rms_norm_eps)
