"""The codec's encoder and the reference stage against the published ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from hocket.core import Item, Job
from hocket.models.qwen3_tts.config import CODEC_FOLDER, EncoderConfig, load_codec_config
from hocket.models.qwen3_tts.encoder import EncoderWeights, embed, encode
from hocket.models.qwen3_tts.reference import ReferenceInput, ReferenceProgram, load_reference
from hocket.models.qwen3_tts.weights import load_codec_encoder

BASE = {"size": "tiny", "variant": "base", "seed": 0}
Golden = Callable[[str], dict[str, np.ndarray]]


@pytest.fixture(scope="module")
def folder(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint(**BASE)


@pytest.fixture(scope="module")
def config(folder: Path) -> EncoderConfig:
    return load_codec_config(folder / CODEC_FOLDER).encoder_config


@pytest.fixture(scope="module")
def weights(folder: Path) -> EncoderWeights:
    return load_codec_encoder(folder / CODEC_FOLDER, "cpu", torch.float32)


def clip(golden: Golden) -> Tensor:
    """[1, 47000]: 24.5 frames, so that every strided layer must complete its last step."""
    return torch.from_numpy(golden("codec")["clip"].astype(np.float32) / 32768)[None]


def test_embedding_is_the_published_one(
    weights: EncoderWeights, config: EncoderConfig, golden: Golden
) -> None:
    x = embed(weights, config, clip(golden))[:, 0]
    np.testing.assert_allclose(x.numpy(), golden("codec")["clip_embedding"], rtol=0, atol=1e-5)


def test_codes_are_the_published_ones(weights: EncoderWeights, config: EncoderConfig, golden: Golden) -> None:
    codes = encode(weights, config, clip(golden))
    assert codes.dtype is torch.int32
    assert np.array_equal(codes[0].numpy(), golden("codec")["clip_codes"])


@pytest.mark.parametrize(
    ("samples", "frames"), [(1, 1), (4, 1), (1919, 1), (1920, 1), (1921, 2), (3840, 2), (5000, 3)]
)
def test_frames_cover_all_samples(
    weights: EncoderWeights, config: EncoderConfig, samples: int, frames: int
) -> None:
    assert encode(weights, config, torch.zeros(1, samples)).shape == (1, frames, 16)


def test_whole_frames_do_not_look_ahead(folder: Path, config: EncoderConfig, golden: Golden) -> None:
    weights, x = load_codec_encoder(folder / CODEC_FOLDER, "cpu", torch.float64), clip(golden).double()
    whole = embed(weights, config, x)
    for frames in (1, 7, 20):
        torch.testing.assert_close(embed(weights, config, x[:, : frames * 1920]), whole[:frames])


def test_rows_do_not_depend_on_batch_mates(
    weights: EncoderWeights, config: EncoderConfig, golden: Golden
) -> None:
    x = clip(golden)
    batch = torch.cat([x, x.flip(1), 0.5 * x])
    codes = encode(weights, config, batch)
    assert all(torch.equal(codes[i : i + 1], encode(weights, config, batch[i : i + 1])) for i in range(3))


# --- the stage ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def program(folder: Path) -> ReferenceProgram:
    return load_reference(folder, torch.device("cpu"), torch.float32)


def begin(program: ReferenceProgram, samples: Tensor, codes: bool) -> Item:
    asked = ReferenceInput(samples=samples.numpy().tobytes(), codes=codes)
    inputs = {"reference": msgspec.msgpack.encode(asked)}
    return program.begin(Job(id="j", route=("reference",), inputs=inputs, seed=0, max_frames=1), {})


def test_codes_are_given_where_asked(program: ReferenceProgram, golden: Golden) -> None:
    x, made = clip(golden)[0], golden("codec")
    items = [begin(program, x, False), begin(program, x, True), begin(program, -x, True)]
    alone, both, other = program.run(items)
    assert sorted(alone) == ["speaker"]
    assert sorted(both) == ["codes", "speaker"]
    assert np.array_equal(both["codes"], made["clip_codes"])
    assert not np.array_equal(other["codes"], made["clip_codes"])
    for result in (alone, both):
        np.testing.assert_allclose(result["speaker"], made["clip_speaker"], rtol=0, atol=1e-6)
        assert result["speaker"].dtype == np.float32


def test_results_are_kept_by_content(program: ReferenceProgram) -> None:
    x = torch.linspace(-1, 1, 2000)
    key = begin(program, x, True).cache_key
    assert begin(program, x.clone(), True).cache_key == key
    assert begin(program, x, False).cache_key != key
    assert begin(program, x * 0.5, True).cache_key != key


def test_only_equal_lengths_share_a_batch(program: ReferenceProgram) -> None:
    assert begin(program, torch.zeros(2000), True).bucket == 2000
    assert begin(program, torch.zeros(2001), True).bucket == 2001
