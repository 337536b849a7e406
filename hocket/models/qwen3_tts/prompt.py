"""The talker's prompt: which text id and which codec id each row of the prefill adds up.

Every row is a text-side vector plus a codec-side vector. This module works with ids only; the
talker turns them into vectors. Layout as in qwen-tts 0.1.1: core/models/modeling_qwen3_tts.py
`generate` and inference/qwen3_tts_model.py.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import msgspec
import numpy as np

from hocket.models.qwen3_tts.config import ModelConfig
from hocket.nn.talker import DrawInput

NONE = -1  # no text, or no codec part
SPEAKER = -2  # codec part is the speaker vector
FRAME = -3  # codec part is the sum of a reference frame's code embeddings


class TalkerInput(msgspec.Struct, kw_only=True):
    """What the front end sends the talker: token ids and options, no vectors."""

    instruct: list[int]
    role: list[int]
    tags: list[int]  # codec ids: think block with the language, or nothink
    speaker: int | None  # row of the codec embedding
    body: list[int]
    ref_body: list[int]
    speaker_vector: bytes = b""  # float32, given by the client
    cloned: bool = False  # the speaker vector comes from the reference stage
    continued: bool = False  # ... and its codes too: the model goes on from the recording
    text_first: bool = False
    text_open: bool = False
    first: DrawInput  # codebook 0
    inner: DrawInput  # codebooks after it
    repetition_penalty: float


class TextUpdate(msgspec.Struct, kw_only=True):
    """Text ids that arrived later; see `TalkerProgram.feed`."""

    ids: list[int]
    closed: bool


@dataclass(slots=True)
class TalkerPrompt:
    """Implements `hocket.core.Prompt`. Row i is text[i] + codec[i]; see NONE, SPEAKER, FRAME."""

    input: TalkerInput
    text: np.ndarray  # int64 [rows]
    codec: np.ndarray  # int64 [rows]
    reference: np.ndarray  # int64 [reference frames, codebooks], in the order of the FRAME rows
    speaker: np.ndarray | None  # float32 [d]
    trailing: list[int]  # text ids added from the second frame on, one a frame
    text_open: bool
    row_keys: list[bytes] = field(default_factory=list)
    variant: int = 0
    written: int = 0  # of `trailing`, to the slot
    positions: None = None

    @property
    def draws(self) -> tuple[DrawInput, DrawInput]:
        return self.input.first, self.input.inner

    @property
    def repetition_penalty(self) -> float:
        return self.input.repetition_penalty

    def frames_ready(self) -> int | None:
        return len(self.trailing) + 1 if self.text_open else None


def build_prompt(
    c: ModelConfig, i: TalkerInput, speaker: np.ndarray | None, reference: np.ndarray | None
) -> TalkerPrompt:
    """Lay out the rows (sheet names: A instruction, B role, C tags, D content).

    speaker float32 [d] or None; reference int [frames, codebooks] or None.
    """
    t = c.talker_config
    pad, bos, eos = c.tts_pad_token_id, c.tts_bos_token_id, c.tts_eos_token_id
    rows: list[tuple[int, int]] = [(id, NONE) for id in (*i.instruct, *i.role)]

    voice = [SPEAKER] if speaker is not None else [] if i.speaker is None else [i.speaker]
    tags = [*i.tags, *voice, t.codec_pad_id]
    rows += [(pad, id) for id in tags[:-1]] + [(bos, tags[-1])]

    content = [*i.ref_body, *i.body] if reference is not None else list(i.body)
    if not i.text_open:
        content.append(eos)
    frames = [t.codec_bos_id] + ([FRAME] * len(reference) if reference is not None else [])
    if i.text_first:
        rows += [(id, t.codec_pad_id) for id in content] + [(pad, id) for id in frames]
        trailing: list[int] = []
    else:
        # With open text fewer ids than frames may be here: those rows must wait, so the front end
        # opens a text only with a prompt that its first ids can fill.
        padded = content + [pad] * (len(frames) - len(content))
        rows += list(zip(padded, frames, strict=False))
        trailing = content[len(frames) :]

    text, codec = np.array(rows, dtype=np.int64).T
    prompt = TalkerPrompt(
        input=i,
        text=text,
        codec=codec,
        reference=np.zeros((0, t.num_code_groups), np.int64)
        if reference is None
        else reference.astype(np.int64),
        speaker=speaker,
        trailing=trailing,
        text_open=i.text_open,
    )
    prompt.row_keys = _row_keys(prompt)
    prompt.variant = i.first.variant | i.inner.variant
    return prompt


def _row_keys(p: TalkerPrompt) -> list[bytes]:
    keys = [row.tobytes() for row in np.stack([p.text, p.codec], axis=1)]
    if p.speaker is not None:
        row = int(np.flatnonzero(p.codec == SPEAKER)[0])
        keys[row] += hashlib.blake2b(p.speaker.tobytes(), digest_size=16).digest()
    for at, frame in zip(np.flatnonzero(p.codec == FRAME), p.reference, strict=True):
        keys[at] += frame.tobytes()
    return keys
