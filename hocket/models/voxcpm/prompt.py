"""The talker's prompt: a text id or a patch of a recording for each position.

    zero-shot      t(text) t(101)
    reference      t(103) a(recording) t(104) t(text) t(101)
    continuation   t(transcript + text) t(101) a(recording)
    both           t(103) a(recording) t(104) t(transcript + text) t(101) a(recording)

Layout as in voxcpm 2.0.3: model/voxcpm2.py `_generate_with_prompt_cache`.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import msgspec
import numpy as np

from hocket.models.voxcpm.config import CONTROL

AUDIO = -1  # in place of an id: a patch of a recording


class TalkerInput(msgspec.Struct, kw_only=True):
    """What the front end sends the talker."""

    ids: list[int]  # of transcript and text together
    reference: bool  # a recording before the text
    continued: bool  # a recording after the text, to go on from
    guidance: float
    steps: int
    temperature: float
    least: int  # patches made before a stop counts
    lora: str = ""


@dataclass(slots=True)
class TalkerPrompt:
    """Implements `hocket.core.Prompt`. Row i is the embedding of ids[i], or the next of the patches."""

    input: TalkerInput
    ids: np.ndarray  # int64 [rows], AUDIO for a patch
    patches: np.ndarray  # float32 [audio rows, patch, feat], in the order of their rows
    reference: tuple[int, int]  # rows of the recording before the text; (0, 0): none
    audio_from: int  # all rows from here on are patches, given ones and made ones
    lora: int  # 0: none
    variant: int
    row_keys: list[bytes]

    def frames_ready(self) -> int | None:
        return None


def build_prompt(
    i: TalkerInput, reference: np.ndarray | None, continued: np.ndarray | None, *, lora: int, variant: int
) -> TalkerPrompt:
    """Lay out the rows; recordings float32 [n, patch, feat] as the encoder gave them, or None."""
    ids: list[int] = []
    span = (0, 0)
    given = []
    if reference is not None:
        ids += [CONTROL["reference_start"], *[AUDIO] * len(reference), CONTROL["reference_end"]]
        span = (1, 1 + len(reference))
        given.append(reference)
    ids += [*i.ids, CONTROL["audio_start"]]
    audio_from = len(ids)
    if continued is not None:
        ids += [AUDIO] * len(continued)
        given.append(continued)
    patches = np.concatenate(given) if given else np.zeros((0, 0, 0), np.float32)
    return TalkerPrompt(
        input=i,
        ids=np.array(ids, np.int64),
        patches=patches,
        reference=span,
        audio_from=audio_from,
        lora=lora,
        variant=variant,
        row_keys=_row_keys(ids, patches, i.lora),
    )


def _row_keys(ids: list[int], patches: np.ndarray, lora: str) -> list[bytes]:
    """A patch is known by its values. The first row names the LoRA, under which all rows after it differ."""
    made = iter(hashlib.blake2b(p.tobytes(), digest_size=16).digest() for p in patches)
    keys = [next(made) if id == AUDIO else id.to_bytes(4, "little") for id in ids]
    keys[0] += lora.encode()
    return keys
