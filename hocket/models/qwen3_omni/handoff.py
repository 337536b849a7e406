"""What the Talker is told: its prompt from the users' turns, then the Thinker's tokens as they come.

Text crosses as token ids, four bytes each: the Talker reads no hidden state of text. Hidden rows cross for
audio, pictures and films in users' turns only. Source: transformers 5.17.0: models/qwen3_omni_moe
`Qwen3OmniMoeForConditionalGeneration.generate`, which does the same once the whole text is there.

    row        text part            codec part
    user …     id, or hidden row    -
    3 rows     <|im_start|> role \\n -
    4 rows     <tts_pad>            nothink, think_bos, think_eos, speaker
    1 row      <tts_text_bos>       pad
    1 row      first token          bos
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from hocket.core import NOTHING, Chunk, ChunkKind
from hocket.models.qwen3_omni.config import ModelConfig
from hocket.nn.talker import DrawInput

NONE = -1  # no codec part; as a text id: not known yet
HEAD = 9  # rows after the users' turns

# The published code's options of speech: config.json and generation_config.json do not say them.
FIRST = DrawInput(temperature=0.9, top_k=50, top_p=1.0)
INNER = DrawInput(temperature=1.0, top_k=50, top_p=0.8)
REPETITION_PENALTY = 1.05


class TalkerInput(msgspec.Struct, kw_only=True):
    """What the front end sends the Talker: ids and options."""

    user: bytes  # int32 [n]: the users' turns, media pads included
    role: list[int]  # ids that open the assistant's turn
    speaker: int  # row of the codec embedding
    positions: bytes = b""  # fp32 [n + HEAD, 3] of time, height, width; empty: rows are counted
    drops_cut: bool = False  # do not speak the last token of a text that was cut, as the published code
    first: DrawInput  # codebook 0
    inner: DrawInput  # codebooks after it
    repetition_penalty: float


@dataclass(slots=True)
class TalkerPrompt:
    """Implements `hocket.nn.talker.FramePrompt`. Row i is text[i] + codec[i]."""

    input: TalkerInput
    end: int  # id that is read when the text has ended
    text: np.ndarray  # int64 [rows]; the last is NONE until the first token is there
    codec: np.ndarray  # int64 [rows], NONE where there is none
    media: np.ndarray  # int64 [m]: rows whose text part is a hidden row
    row_keys: list[bytes]  # of the right number from the beginning, of the right content when complete
    positions: np.ndarray | None
    hidden: np.ndarray | None = None  # [m, d], in the order of `media`
    trailing: list[int] = field(default_factory=list)
    text_open: bool = True
    written: int = 0
    held: list[int] = field(default_factory=list)  # with `drops_cut`: the newest token

    @property
    def draws(self) -> tuple[DrawInput, DrawInput]:
        return self.input.first, self.input.inner

    @property
    def repetition_penalty(self) -> float:
        return self.input.repetition_penalty

    @property
    def variant(self) -> int:
        return self.input.first.variant | self.input.inner.variant

    @property
    def complete(self) -> bool:
        """The rows before the first frame are all there."""
        return self.text[-1] != NONE and (self.hidden is not None or not len(self.media))

    def frames_ready(self) -> int | None:
        if self.text[-1] == NONE and not self.text_open:
            return NOTHING
        if not self.complete:
            return 0
        return len(self.trailing) + 1 if self.text_open else None

    def take(self, chunk: Chunk) -> None:
        """Read what the Thinker made: hidden rows of media, or tokens."""
        if chunk.kind is ChunkKind.ROWS:
            self.hidden = chunk.arrays["rows"]
            assert len(self.hidden) == len(self.media), "one hidden row for each medium's row"
        else:
            self._hear(chunk.arrays["tokens"][:, 0].tolist(), chunk.last, chunk.finish_reason == "length")
        if self.complete and not self.row_keys[-1]:
            self.row_keys[:] = _row_keys(self)

    def _hear(self, ids: list[int], last: bool, cut: bool) -> None:
        if self.input.drops_cut:
            ids = [*self.held, *ids]
            kept = ids[-1:] if cut or not last else []
            ids, self.held = ids[: len(ids) - len(kept)], kept
        if ids and self.text[-1] == NONE:
            self.text[-1] = ids.pop(0)
        self.trailing += ids
        if last:
            self.trailing.append(self.end)
            self.text_open = False


def open_prompt(c: ModelConfig, i: TalkerInput) -> TalkerPrompt:
    """Lay out the rows; media and the first token are still to come."""
    t, media = c.talker, c.thinker_config
    user = np.frombuffer(i.user, np.int32).astype(np.int64)
    assert len(i.role) == 3, "the head has three rows for the assistant's role"
    text = [*i.role, *[c.tts_pad_token_id] * 4, c.tts_bos_token_id, NONE]
    tags = [t.codec_nothink_id, t.codec_think_bos_id, t.codec_think_eos_id, i.speaker]
    codec = [*[NONE] * 3, *tags, t.codec_pad_id, t.codec_bos_id]
    pads = [media.audio_token_id, media.image_token_id, media.video_token_id]
    rows = len(user) + HEAD
    positions = np.frombuffer(i.positions, np.float32).reshape(rows, 3) if i.positions else None
    return TalkerPrompt(
        input=i,
        end=c.tts_eos_token_id,
        text=np.array([*user, *text], np.int64),
        codec=np.array([*[NONE] * len(user), *codec], np.int64),
        media=np.flatnonzero(np.isin(user, pads)),
        row_keys=[b""] * rows,
        positions=positions,
    )


def _row_keys(p: TalkerPrompt) -> list[bytes]:
    keys = [row.tobytes() for row in np.stack([p.text, p.codec], axis=1)]
    if p.positions is not None:
        keys = [key + place.tobytes() for key, place in zip(keys, p.positions, strict=True)]
    if p.hidden is not None:
        for at, row in zip(p.media, p.hidden, strict=True):
            keys[at] += hashlib.blake2b(row.tobytes(), digest_size=16).digest()
    return keys


def user_turns(c: ModelConfig, ids: Sequence[int] | np.ndarray) -> np.ndarray:
    """Which ids of a prompt the Talker is given: bool [n], true from a user's <|im_start|> to the next."""
    ids = np.asarray(ids)
    at = np.arange(len(ids))
    turn = np.maximum.accumulate(np.where(ids == c.im_start_token_id, at, 0))
    role = ids[np.minimum(turn + 1, len(ids) - 1)]
    given: np.ndarray = role == c.user_token_id
    return given


def talker_positions(
    c: ModelConfig, ids: np.ndarray, positions: np.ndarray | None, given: np.ndarray, in_step: bool
) -> np.ndarray | None:
    """Rotary positions of the Talker's rows, fp32 [n + HEAD, 3]; None where they count the rows.

    ids [m], positions [m, 3] of the Thinker's prompt; given bool [m]: rows that the Talker has too. What is
    left out leaves no gap. in_step: films are heard too, in step with their frames; the published code then
    gives the Talker counted positions for them.
    """
    if positions is None:
        return None
    t = c.thinker_config
    media = np.isin(ids, [t.audio_token_id, t.image_token_id, t.video_token_id])
    places: list[np.ndarray] = []
    following = np.float32(0)
    rows = np.flatnonzero(given)
    edges = np.flatnonzero((np.diff(rows) > 1) | (np.diff(media[rows].astype(int)) != 0)) + 1
    for run in np.split(rows, edges):
        counted = not media[run[0]] or (in_step and len(np.unique(ids[run])) > 1)
        own = (
            np.repeat(np.arange(len(run))[:, None], 3, 1)
            if counted
            else positions[run] - positions[run].min()
        )
        places.append((own + following).astype(np.float32))
        following = places[-1].max() + np.float32(1)
    head = np.repeat(np.arange(HEAD)[:, None], 3, 1) + following
    made = np.concatenate([*places, head.astype(np.float32)])
    return None if (made == np.arange(len(made))[:, None]).all() else made
