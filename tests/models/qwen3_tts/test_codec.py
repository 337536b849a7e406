"""The codec's decoder against the published one, and against itself cut into chunks, in fp32."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from hocket.core import Chunk, ChunkKind, Job, leaves
from hocket.errors import StartupError
from hocket.models.qwen3_tts.codec import CodecInput, CodecProgram, latents
from hocket.models.qwen3_tts.config import CODEC_FOLDER, load_codec_config
from hocket.models.qwen3_tts.weights import load_codec_decoder
from hocket.nn.checkpoint import open_tensors
from hocket.runtime.state import State, allocate, reset, restore, snapshot

FRAMES = 45  # several times the tiny transformer's window of 8
SAME = {"rtol": 0, "atol": 1e-5}  # fp32 rounding at a peak near 1
BASE = {"size": "tiny", "variant": "base", "seed": 0}
RAMPS = [[1, 2, 4, 8, 16, 14], [1, 1, 2, 4, 4, 8, 25], [4, 4, 8, 16, 13], [30, 1, 14], [1, 44], [9, 36]]


def load(folder: Path, dtype: torch.dtype) -> CodecProgram:
    folder = folder / CODEC_FOLDER
    return CodecProgram(load_codec_decoder(folder, "cpu", dtype), load_codec_config(folder))


@pytest.fixture(scope="module")
def program(checkpoint: Callable[..., Path]) -> CodecProgram:
    return load(checkpoint(**BASE), torch.float32)


@pytest.fixture(scope="module")
def codes() -> Tensor:
    return random_codes(0)


@pytest.fixture(scope="module")
def whole(program: CodecProgram, codes: Tensor) -> Tensor:
    return run(program, new_state(program), codes, [FRAMES])


def random_codes(seed: int, frames: int = FRAMES) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 2048, (frames, 16), dtype=np.int32))


def new_state(program: CodecProgram) -> State:
    return allocate(program.declare(), slots=5, device="cpu", poison=True)


def run(program: CodecProgram, state: State, codes: Tensor, chunks: list[int], slot: int = 1) -> Tensor:
    """Decode codes [t, 16] in chunks of so many frames -> [t * hop]."""
    slots = torch.tensor([slot])
    parts = [program.step(state.tensors, slots, part[None])[0] for part in codes.split(chunks)]
    return torch.cat(parts)


# --- the published decoder ---------------------------------------------------------------------

CASES = [
    "custom_full", "custom_streaming", "custom_streaming_long", "custom_dialect_auto",
    "custom_dialect_chinese", "custom_instruct", "design", "icl_streaming", "icl_full",
    "icl_streaming_short_text", "x_vector_streaming", "small_custom", "small_icl", "small_end",
]  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_wave_is_the_published_one(
    name: str, checkpoint: Callable[..., Path], cases: dict, golden: Callable[[str], dict[str, np.ndarray]]
) -> None:
    program, made = load(checkpoint(**cases[name]["checkpoint"]), torch.float32), golden(name)
    state = new_state(program)
    if "ref_codes" in made:  # the voice goes on from its reference, which is not heard
        primer = torch.from_numpy(made["ref_codes"].astype(np.int32))
        run(program, state, primer, [len(primer)])
    frames = torch.from_numpy(made["codes"].astype(np.int32))
    wave = run(program, state, frames, [1] * len(frames))
    assert len(made["wave"]) - len(wave) in (0, 1)
    np.testing.assert_allclose(wave.numpy(), made["wave"][-len(wave) :], rtol=0, atol=1e-4)


def test_long_decode_is_the_published_one(
    checkpoint: Callable[..., Path], golden: Callable[[str], dict[str, np.ndarray]]
) -> None:
    program, made = load(checkpoint(**BASE), torch.float32), golden("codec")
    frames = torch.from_numpy(made["codes"].astype(np.int32))
    wave = run(program, new_state(program), frames, [len(frames)])
    np.testing.assert_allclose(wave.numpy(), made["wave"], rtol=0, atol=1e-4)


def test_latents_are_the_published_ones(
    checkpoint: Callable[..., Path], golden: Callable[[str], dict[str, np.ndarray]]
) -> None:
    program, made = load(checkpoint(**BASE), torch.float32), golden("codec")
    codes = torch.from_numpy(made["codes"].astype(np.int32))[None]
    x = latents(program.weights, program.shape, new_state(program).tensors, torch.tensor([1]), codes)
    np.testing.assert_allclose(x[:, 0].numpy(), made["latent"], rtol=0, atol=1e-5)


# --- chunks ------------------------------------------------------------------------------------


@settings(max_examples=15, deadline=None)
@given(chunks=st.lists(st.integers(1, FRAMES), min_size=1, max_size=12))
def test_stream_equals_whole_wherever_it_is_cut(
    program: CodecProgram, codes: Tensor, whole: Tensor, chunks: list[int]
) -> None:
    total = min(sum(chunks), FRAMES)
    state, slots, at, parts = new_state(program), torch.tensor([1]), 0, []
    for n in chunks:
        if at < total:
            parts.append(program.step(state.tensors, slots, codes[None, at : at + n])[0])
            at += n
    torch.testing.assert_close(torch.cat(parts), whole[: total * program.hop], **SAME)


@pytest.mark.parametrize("frames", range(1, 31))
def test_chunks_of_one_size_equal_whole(
    program: CodecProgram, codes: Tensor, whole: Tensor, frames: int
) -> None:
    chunks = [len(part) for part in codes.split(frames)]
    torch.testing.assert_close(run(program, new_state(program), codes, chunks), whole, **SAME)


@pytest.mark.parametrize("chunks", RAMPS, ids=str)
def test_ramps_equal_whole(program: CodecProgram, codes: Tensor, whole: Tensor, chunks: list[int]) -> None:
    torch.testing.assert_close(run(program, new_state(program), codes, chunks), whole, **SAME)


def test_nothing_looks_ahead(program: CodecProgram, codes: Tensor, whole: Tensor) -> None:
    for t in (1, 11, 30):
        other = torch.cat([codes[:t], random_codes(9)[t:]])
        wave = run(program, new_state(program), other, [FRAMES])
        torch.testing.assert_close(wave[: t * program.hop], whole[: t * program.hop], **SAME)
        assert not torch.allclose(wave[t * program.hop :], whole[t * program.hop :], atol=1e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_keeps_the_signal(
    checkpoint: Callable[..., Path], codes: Tensor, whole: Tensor, dtype: torch.dtype
) -> None:
    program = load(checkpoint(**BASE), dtype)
    wave = run(program, new_state(program), codes, [1, 2, 4, 8, 30])
    assert wave.dtype is torch.float32
    assert (wave - whole).square().mean() < 0.1 * whole.square().mean()


# --- batches and slots -------------------------------------------------------------------------


def test_cold_and_warm_streams_share_a_batch(program: CodecProgram, codes: Tensor, whole: Tensor) -> None:
    state, hop = new_state(program), program.hop
    run(program, state, codes[:17], [17], slot=3)
    late = random_codes(1)
    batch = torch.stack(
        [codes[17:20], late[:3], torch.zeros(3, 16, dtype=torch.int32), codes[:3], codes[5:8]]
    )
    pcm = program.step(state.tensors, torch.tensor([3, 1, 0, 4, 0]), batch)  # 0: padding, twice
    torch.testing.assert_close(pcm[0], whole[17 * hop : 20 * hop], **SAME)
    torch.testing.assert_close(pcm[1], run(program, new_state(program), late[:3], [3]), **SAME)
    torch.testing.assert_close(pcm[3], whole[: 3 * hop], **SAME)
    torch.testing.assert_close(run(program, state, codes[20:], [25], slot=3), whole[20 * hop :], **SAME)


def test_slots_not_in_the_batch_do_not_change(program: CodecProgram, codes: Tensor) -> None:
    state = new_state(program)
    run(program, state, codes[:9], [9], slot=2)
    before = snapshot(state, 2)
    run(program, state, codes, [FRAMES], slot=1)
    assert torch.equal(before, snapshot(state, 2))


def test_slot_starts_afresh_after_reset(program: CodecProgram, codes: Tensor, whole: Tensor) -> None:
    state = new_state(program)
    run(program, state, random_codes(2), [20, 25])
    reset(state, torch.tensor([1]))
    torch.testing.assert_close(run(program, state, codes, [FRAMES]), whole, **SAME)


@pytest.mark.parametrize("primer_frames", [1, 5, 20, 40])
def test_primed_stream_equals_whole_without_the_reference(
    program: CodecProgram, codes: Tensor, whole: Tensor, primer_frames: int
) -> None:
    state, hop = new_state(program), program.hop
    program.prime(state.tensors, torch.tensor([2]), codes[None, :primer_frames])
    primed = snapshot(state, 2)
    run(program, state, random_codes(3), [FRAMES], slot=2)  # the copy is not the slot
    run(program, state, random_codes(4), [FRAMES], slot=4)
    restore(state, [4], [primed])
    rest = codes[primer_frames:]
    torch.testing.assert_close(
        run(program, state, rest, [1, len(rest) - 1], slot=4), whole[primer_frames * hop :], **SAME
    )


def test_state_is_all_per_slot(program: CodecProgram) -> None:
    assert all(leaf.per_slot and leaf.fill == 0 for leaf in leaves(program.declare()))


# --- the program -------------------------------------------------------------------------------


def job(prime: bool) -> Job:
    return Job(
        id="j",
        route=("codec",),
        inputs={"codec": msgspec.msgpack.encode(CodecInput(prime=prime))},
        seed=0,
        max_frames=1,
    )


def reference(codes: Tensor) -> dict[str, Chunk]:
    arrays = {"codes": codes.numpy()}
    return {
        "reference": Chunk(job="j", source="reference", index=0, kind=ChunkKind.CONDITIONING, arrays=arrays)
    }


def test_reference_primes_where_asked(program: CodecProgram, codes: Tensor) -> None:
    prompt = program.begin(job(prime=True), reference(codes))
    assert prompt.prime is not None
    assert np.array_equal(prompt.prime, codes.numpy())
    assert prompt.prime_key == program.begin(job(prime=True), reference(codes.clone())).prime_key
    assert prompt.prime_key != program.begin(job(prime=True), reference(codes[:-1])).prime_key


def test_reference_does_not_prime_where_not_asked(program: CodecProgram, codes: Tensor) -> None:
    assert program.begin(job(prime=False), reference(codes)).prime is None
    assert program.begin(job(prime=False), {}).prime is None


def test_nothing_is_withheld(program: CodecProgram) -> None:
    assert (program.hop, program.rate_hz, program.lookahead) == (1920, 24000, 0)
    assert program.flush(new_state(program).tensors, torch.tensor([1, 2])).shape == (2, 0)


# --- files -------------------------------------------------------------------------------------


@pytest.fixture
def folder(checkpoint: Callable[..., Path], tmp_path: Path) -> Path:
    """A codec's folder to spoil."""
    return Path(shutil.copytree(checkpoint(**BASE) / CODEC_FOLDER, tmp_path / "codec"))


def test_missing_tensor_is_named(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["decoder.pre_conv.conv.bias"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(StartupError, match=r"decoder\.pre_conv\.conv\.bias.*codec/model\.safetensors"):
        load_codec_decoder(folder, "cpu", torch.float32)


def test_missing_file_is_named(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(StartupError, match=r"codec/model\.safetensors"):
        open_tensors(folder)


def test_files_may_be_split(folder: Path) -> None:
    tensors = open_tensors(folder)
    names = sorted(tensors)
    where = {name: f"model-{1 + (i % 2)}.safetensors" for i, name in enumerate(names)}
    for file in set(where.values()):
        save_file({n: tensors[n].contiguous() for n in names if where[n] == file}, folder / file)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    split = open_tensors(folder)
    assert sorted(split) == names
    assert all(torch.equal(split[n], tensors[n]) for n in names)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sliding_window": None}, "sliding_window"),
        ({"upsample_rates": [8, 5, 4, 2]}, "1920.*1280"),
        ({"num_quantizers": 8}, "encoder_valid_num_quantizers is 16"),
        ({"hidden_act": "relu"}, "hidden_act"),
    ],
    ids=["key missing", "rates", "codebooks", "activation"],
)
def test_config_is_checked(folder: Path, change: dict, message: str) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["decoder_config"] |= change
    config["decoder_config"] = {k: v for k, v in config["decoder_config"].items() if v is not None}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(StartupError, match=message):
        load_codec_config(folder)
