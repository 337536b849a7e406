"""The talker and its code predictor; see `hocket.nn.talker`. Here: what its prompts are made of.

Numerics follow qwen-tts 0.1.1: core/models/modeling_qwen3_tts.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
from torch import Tensor

from hocket.core import Chunk, Job
from hocket.kernels.frame import embed_codes_torch as embed_codes
from hocket.models.qwen3_tts.config import BlockConfig, ModelConfig
from hocket.models.qwen3_tts.prompt import FRAME, SPEAKER, TalkerInput, TalkerPrompt, TextUpdate, build_prompt
from hocket.nn.staging import to_device
from hocket.nn.talker import FrameTalker, Piece, TalkerShape, TalkerWeights
from hocket.nn.transformer import Shape, decoder_layer

FIRST_IDS_WITHOUT_END = 2  # the reference generates with min_new_tokens = 2


class TalkerProgram(FrameTalker):
    """Implements `hocket.core.AutoregressiveProgram`."""

    def __init__(self, config: ModelConfig, weights: TalkerWeights) -> None:
        t, p = config.talker_config, config.talker_config.code_predictor_config
        shape = TalkerShape(
            outer=_shape(t),
            inner=_shape(p),
            theta=t.rope_theta,
            inner_theta=p.rope_theta,
            max_tokens=t.max_position_embeddings,
            pad=config.tts_pad_token_id,
            unending=FIRST_IDS_WITHOUT_END,
        )
        super().__init__(weights, shape, decoder_layer)
        self.config = config

    def begin(self, job: Job, arrived: Mapping[str, Chunk]) -> TalkerPrompt:
        i = msgspec.msgpack.decode(job.inputs["talker"], type=TalkerInput)
        speaker = np.frombuffer(i.speaker_vector, np.float32) if i.speaker_vector else None
        reference = None
        if i.cloned:
            voice = arrived["reference"].arrays
            speaker = voice["speaker"]
            reference = voice["codes"] if i.continued else None
        return build_prompt(self.config, i, speaker, reference)

    def feed(self, prompt: TalkerPrompt, data: bytes) -> None:
        update = msgspec.msgpack.decode(data, type=TextUpdate)
        prompt.trailing.extend(update.ids)
        if update.closed:
            prompt.trailing.append(self.config.tts_eos_token_id)
            prompt.text_open = False

    def take(self, prompt: TalkerPrompt, chunk: Chunk) -> None:
        raise AssertionError("the reference stage is done before the talker starts")

    def prompt_rows(self, pieces: Sequence[Piece]) -> Tensor:
        text = np.concatenate([p.text[start:stop] for p, start, stop in pieces])
        codec = np.concatenate([p.codec[start:stop] for p, start, stop in pieces])
        self.w.text.ensure(text)
        preset = np.flatnonzero(codec >= 0)
        ids, at, added = self._ids(np.concatenate([text, preset, codec[preset]])).split(
            [len(text), len(preset), len(preset)]
        )
        x = self.w.text.table[ids]
        x.index_add_(0, at, self.w.codec[added])
        vectors = np.flatnonzero(codec == SPEAKER)
        if len(vectors):
            speakers = np.stack([p.speaker for p, start, stop in pieces if SPEAKER in p.codec[start:stop]])
            x.index_add_(0, self._ids(vectors), to_device(speakers, self.device).to(x))
        frames = np.flatnonzero(codec == FRAME)
        if len(frames):
            given = np.concatenate([_reference(*piece) for piece in pieces])
            x.index_add_(0, self._ids(frames), embed_codes(self._ids(given), self.w.codes))
        return x


def _reference(prompt: TalkerPrompt, start: int, stop: int) -> np.ndarray:
    """Codes of the reference frames among some rows of a prompt."""
    first = np.count_nonzero(prompt.codec[:start] == FRAME)
    return prompt.reference[first : first + np.count_nonzero(prompt.codec[start:stop] == FRAME)]


def _shape(c: BlockConfig) -> Shape:
    return Shape(c.num_attention_heads, c.num_key_value_heads, c.head_dim, c.rms_norm_eps)
