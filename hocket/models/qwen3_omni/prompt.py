"""What a job tells the Thinker and the two towers, and the rows of the Thinker's prompt."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
import numpy as np

from hocket.models.qwen3_omni.config import ModelConfig
from hocket.models.qwen3_omni.handoff import user_turns
from hocket.models.qwen3_omni.stops import StopTexts
from hocket.nn.sampler import NARROW, NUCLEUS, WIDE

# Step variants, beside WIDE and NUCLEUS, which say more of LIMITED.
PENALTY = 4  # some row has a repetition penalty
NOISY = 8  # some row is not greedy
LIMITED = 16  # some row has top-k or top-p
MAX_STOPS = 4  # ids that end one request's text


class Clip(msgspec.Struct, kw_only=True):
    """A recording in the prompt."""

    samples: bytes  # float32 [n], 16 kHz, mono
    key: bytes  # hash of the samples
    tokens: int  # positions that it takes


class Picture(msgspec.Struct, kw_only=True):
    """An image or a film in the prompt, scaled to whole patches."""

    frames: bytes  # uint8 [t, 3, h, w]; an image has one frame
    shape: tuple[int, int, int]  # t, h, w in pixels
    key: bytes  # hash of frames and shape
    grid: tuple[int, int, int]  # t, h, w in patches
    tokens: int  # positions that it takes


class AudioInput(msgspec.Struct):
    """What a job tells the audio tower: its recordings, in the order of the prompt."""

    clips: list[Clip]


class VisionInput(msgspec.Struct):
    """What a job tells the vision tower: images and films, in the order of the prompt."""

    pictures: list[Picture]


class ThinkerInput(msgspec.Struct, kw_only=True):
    """What a job tells the Thinker: ids, positions and options, no rows."""

    ids: bytes  # int32 [n]
    positions: bytes = b""  # float32 [n, 3]: time, height, width; none: 0, 1, 2, …
    audio: list[tuple[bytes, int]] = []  # key and tokens of each recording, in the order of its pads
    vision: list[tuple[bytes, int]] = []  # of each image and film
    stops: list[int]  # ids that end the text; at most MAX_STOPS
    stop_texts: list[str] = []  # and strings
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0  # over prompt and text


@dataclass(slots=True)
class ThinkerPrompt:
    """Implements `hocket.core.Prompt`. Row i is the embedding of ids[i], or a row of media under its pad."""

    input: ThinkerInput
    ids: np.ndarray  # int64 [n]
    positions: np.ndarray | None  # float32 [n, 3]; None: 0, 1, 2, …
    audio_at: np.ndarray  # int64: rows that take a row of `audio`, in order
    audio: np.ndarray | None  # [len(audio_at), d]; see hocket.nn.staging.from_host
    vision_at: np.ndarray
    vision: np.ndarray | None  # [1 + maps, len(vision_at), d]  rows, then deepstack maps
    handed: np.ndarray  # int64: rows whose hidden state the Talker reads
    row_keys: list[bytes] = field(default_factory=list)
    variant: int = 0
    stop_texts: StopTexts | None = None

    @property
    def delta(self) -> float:
        """What a row's place in the sequence is raised by, from the last row on, to give its position."""
        if self.positions is None:
            return 0.0
        return float(self.positions.max()) + 1 - len(self.ids)

    def frames_ready(self) -> int | None:
        return None


def build_prompt(
    c: ModelConfig, i: ThinkerInput, audio: np.ndarray | None, vision: np.ndarray | None
) -> ThinkerPrompt:
    """Lay out the rows. audio [n_a, d] and vision [1 + maps, n_v, d] as the towers gave them."""
    t = c.thinker_config
    ids = np.frombuffer(i.ids, np.int32).astype(np.int64)
    positions = np.frombuffer(i.positions, np.float32).reshape(-1, 3).copy() if i.positions else None
    audio_at = np.flatnonzero(ids == t.audio_token_id)
    vision_at = np.flatnonzero((ids == t.image_token_id) | (ids == t.video_token_id))
    pads = [t.audio_token_id, t.image_token_id, t.video_token_id]
    for at, kept, rows in ((audio_at, i.audio, audio), (vision_at, i.vision, vision)):
        given = 0 if rows is None else rows.shape[-2]
        assert len(at) == sum(tokens for _, tokens in kept) == given, "pads and rows of media go together"
    prompt = ThinkerPrompt(
        input=i,
        ids=ids,
        positions=positions,
        audio_at=audio_at,
        audio=audio,
        vision_at=vision_at,
        vision=vision,
        handed=np.flatnonzero(user_turns(c, ids) & np.isin(ids, pads)),
    )
    prompt.row_keys = _row_keys(prompt)
    prompt.variant = _variant(i)
    return prompt


def _row_keys(p: ThinkerPrompt) -> list[bytes]:
    """All that a row is made of: its id; its position where that says more; for media, what stands there."""
    keys = [id.tobytes() for id in p.ids.astype(np.int32)]
    if p.positions is not None:
        keys = [key + place.tobytes() for key, place in zip(keys, p.positions, strict=True)]
    for at, kept in ((p.audio_at, p.input.audio), (p.vision_at, p.input.vision)):
        rows = iter(at)
        for key, tokens in kept:
            for k in range(tokens):
                keys[next(rows)] += key + k.to_bytes(4, "little")
    return keys


def _variant(i: ThinkerInput) -> int:
    penalty = PENALTY if i.repetition_penalty != 1 else 0
    if i.temperature == 0:
        return penalty
    if i.top_k == 0 and i.top_p >= 1:
        return penalty | NOISY
    wide, nucleus = (0 if 0 < i.top_k <= NARROW else WIDE), (NUCLEUS if i.top_p < 1 else 0)
    return penalty | NOISY | LIMITED | wide | nucleus
