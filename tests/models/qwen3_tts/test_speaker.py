"""The speaker encoder against the published one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from hocket.errors import StartupError
from hocket.models.qwen3_tts.config import load_speaker_config
from hocket.models.qwen3_tts.speaker import FFT, TOP_HZ, SpeakerWeights, log_mel, speaker_vector
from hocket.models.qwen3_tts.weights import load_speaker_encoder
from hocket.nn.mel import mel_filters

BASE = {"size": "tiny", "variant": "base", "seed": 0}
Golden = Callable[[str], dict[str, np.ndarray]]


@pytest.fixture(scope="module")
def weights(checkpoint: Callable[..., Path]) -> SpeakerWeights:
    return load_speaker_encoder(checkpoint(**BASE), "cpu", torch.float32)


def clip(golden: Golden) -> Tensor:
    return torch.from_numpy(golden("codec")["clip"].astype(np.float32) / 32768)[None]


def test_mel_is_the_published_one(weights: SpeakerWeights, golden: Golden) -> None:
    mel = log_mel(clip(golden), weights.filters)[:, 0]
    np.testing.assert_allclose(mel.numpy(), golden("codec")["clip_mel"], rtol=0, atol=1e-5)


def test_vector_is_the_published_one(weights: SpeakerWeights, golden: Golden) -> None:
    published = golden("codec")["clip_speaker"]
    vector = speaker_vector(weights, clip(golden))[0].numpy()
    np.testing.assert_allclose(vector, published, rtol=0, atol=1e-6 * np.abs(published).max())


def test_rows_do_not_depend_on_batch_mates(weights: SpeakerWeights, golden: Golden) -> None:
    x = clip(golden)
    batch = torch.cat([x, x.flip(1), 0.5 * x])
    single = torch.cat([speaker_vector(weights, row[None]) for row in batch])
    torch.testing.assert_close(speaker_vector(weights, batch), single, rtol=0, atol=1e-5)


def test_a_twentieth_of_a_second_is_enough(weights: SpeakerWeights) -> None:
    assert speaker_vector(weights, torch.zeros(1, 1280)).isfinite().all()


def test_filters_are_triangles_of_one_area() -> None:
    filters = mel_filters(24000, FFT, 128, TOP_HZ)
    bin_hz = 24000 / FFT
    peaks = filters.argmax(1) * bin_hz
    assert filters.shape == (128, FFT // 2 + 1)
    assert (np.diff(peaks) >= 0).all()
    assert peaks[-1] < TOP_HZ
    assert filters[64:].sum(1) * bin_hz == pytest.approx(1.0, abs=0.05)  # a few bins each


def test_checkpoint_without_speaker_encoder_is_refused(checkpoint: Callable[..., Path]) -> None:
    with pytest.raises(StartupError, match="speaker_encoder_config"):
        load_speaker_config(checkpoint(size="tiny", variant="custom_voice", seed=0))
