"""What a cloned voice is made of: a recording's speaker vector and, if it is to be continued, its codes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from pathlib import Path

import msgspec
import numpy as np
import torch
from torch import Tensor

from hocket.core import Chunk, Item, Job
from hocket.models.qwen3_tts.config import CODEC_FOLDER, EncoderConfig, load_codec_config
from hocket.models.qwen3_tts.encoder import EncoderWeights, encode
from hocket.models.qwen3_tts.speaker import SpeakerWeights, speaker_vector
from hocket.models.qwen3_tts.weights import load_codec_encoder, load_speaker_encoder


class ReferenceInput(msgspec.Struct):
    """What a job tells the reference encoder."""

    samples: bytes  # float32 [n], 24 kHz, mono; n >= 1280
    codes: bool  # whether codes are wanted beside the speaker vector


class ReferenceProgram:
    """The stage that reads reference recordings: `hocket.core.OneShotProgram`."""

    def __init__(
        self, speaker: SpeakerWeights, encoder: EncoderWeights, config: EncoderConfig, device: torch.device
    ) -> None:
        self.speaker, self.encoder, self.config, self.device = speaker, encoder, config, device

    def begin(self, job: Job, arrived: Mapping[str, Chunk]) -> Item:
        """Recordings share a batch only at equal length: padding would change the last frame."""
        asked = msgspec.msgpack.decode(job.inputs["reference"], type=ReferenceInput)
        key = blake2b(asked.samples, digest_size=16, person=b"codes" if asked.codes else b"speaker").digest()
        return Item(value=asked, bucket=len(asked.samples) // 4, cache_key=key)

    @torch.inference_mode()
    def run(self, items: Sequence[Item]) -> list[dict[str, np.ndarray]]:
        """{"speaker": float32 [enc_dim]} for each, with "codes": int32 [t, codebooks] where asked for."""
        asked: list[ReferenceInput] = [item.value for item in items]
        speakers = speaker_vector(self.speaker, self._samples(asked)).float().cpu().numpy()
        results: list[dict[str, np.ndarray]] = [{"speaker": vector} for vector in speakers]
        continued = [i for i, a in enumerate(asked) if a.codes]
        if continued:
            codes = encode(self.encoder, self.config, self._samples([asked[i] for i in continued]))
            for i, c in zip(continued, codes.cpu().numpy(), strict=True):
                results[i]["codes"] = c
        return results

    def _samples(self, asked: Sequence[ReferenceInput]) -> Tensor:
        """float32 [b, n]"""
        return torch.from_numpy(np.stack([np.frombuffer(a.samples, np.float32) for a in asked])).to(
            self.device
        )


def load_reference(folder: Path, device: torch.device, dtype: torch.dtype) -> ReferenceProgram:
    """folder: the model's. `dtype` is the speaker encoder's; the codec's encoder is always fp32, since
    a rounding error before the nearest-entry search turns into another code and then into another voice.

    Asked for fp32, the speaker encoder runs in float64: it is run once a voice, and rounding in fp32 moves
    the vector by 1.4e-6, twice as far as the published one is from the exact result.
    """
    codec = folder / CODEC_FOLDER
    exact = torch.float64 if dtype is torch.float32 else dtype
    return ReferenceProgram(
        load_speaker_encoder(folder, device, exact),
        load_codec_encoder(codec, device, torch.float32),
        load_codec_config(codec).encoder_config,
        device,
    )
