"""The AudioVAE against the published one, and its decoder against itself cut into chunks, in fp32."""

from __future__ import annotations

import math
from functools import cache
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from hocket.core import Chunk, ChunkKind, Item, Job, leaves
from hocket.errors import StartupError
from hocket.kernels import choice
from hocket.models.voxcpm.vae import VaeConfig, VaeConfigV2, VocoderProgram, decode
from hocket.models.voxcpm.vae_encoder import STAGE, EncoderInput, EncoderProgram, encode, patches_of
from hocket.models.voxcpm.vae_synthetic import random_vae, vae_shapes
from hocket.models.voxcpm.vae_weights import (
    decoder_weights,
    encoder_weights,
    load_vae_decoder,
    load_vae_encoder,
)
from hocket.runtime.one_shot import OneShotLimits, OneShotRunner
from hocket.runtime.state import State, allocate, reset, restore, snapshot
from hocket.runtime.streaming import StreamingLimits, StreamingRunner
from tests.models.voxcpm.vae_cases import CASES

GOLDEN = Path(__file__).parents[2] / "golden" / "voxcpm"
SAME = {"rtol": 0, "atol": 1e-6}  # fp32 rounding at a peak near 0.5, activations near 1
FRAMES = 28
each_case = pytest.mark.parametrize("name", CASES)


@cache
def golden(name: str) -> dict[str, np.ndarray]:
    with np.load(GOLDEN / f"vae_{name}.npz") as file:
        return dict(file)


@cache
def program_of(name: str, dtype: torch.dtype = torch.float32) -> VocoderProgram:
    case = CASES[name]
    return VocoderProgram(
        decoder_weights(random_vae(case.config, 0), case.config, dtype), case.config, case.patch_size
    )


@cache
def encoder_of(name: str) -> EncoderProgram:
    case = CASES[name]
    weights = encoder_weights(random_vae(case.config, 0), case.config, torch.float32)
    return EncoderProgram(weights, case.config, case.patch_size, torch.device("cpu"))


def new_state(program: VocoderProgram) -> State:
    return allocate(program.declare(), slots=5, device="cpu", poison=True)


def run(program: VocoderProgram, state: State, latents: Tensor, chunks: list[int], slot: int = 1) -> Tensor:
    """Decode latents [t, d] in chunks of so many latent frames -> [t * hop]."""
    slots = torch.tensor([slot])
    parts = [decode(program.weights, state.tensors, slots, part[None])[0] for part in latents.split(chunks)]
    return torch.cat(parts)


def random_latents(seed: int, frames: int = FRAMES) -> Tensor:
    return torch.randn(frames, 8, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def program() -> VocoderProgram:
    return program_of("2")


@pytest.fixture(scope="module")
def latents() -> Tensor:
    return torch.from_numpy(golden("2")["latents"])


@pytest.fixture(scope="module")
def whole(program: VocoderProgram, latents: Tensor) -> Tensor:
    return run(program, new_state(program), latents, [FRAMES])


# --- the published model -----------------------------------------------------------------------


@each_case
def test_wave_is_the_published_one(name: str) -> None:
    program, made = program_of(name), golden(name)
    state, slots = new_state(program), torch.tensor([1])
    patches = torch.from_numpy(made["latents"]).unflatten(0, (-1, CASES[name].patch_size))
    wave = torch.cat([program.step(state.tensors, slots, patch[None, None])[0] for patch in patches])
    np.testing.assert_allclose(wave.numpy(), made["wave"], rtol=0, atol=1e-5)
    assert len(wave) == len(patches) * program.hop


@each_case
def test_continuation_is_the_published_one(name: str) -> None:
    """The published decode of a continuation has the prompt's last patches before what it returns."""
    program, made = program_of(name), golden(name)
    state, primer = new_state(program), CASES[name].config.primer_patches
    patches = torch.from_numpy(made["latents"]).unflatten(0, (-1, CASES[name].patch_size))[None]
    slots = torch.tensor([3])
    program.prime(state.tensors, slots, patches[:, :primer])
    wave = program.step(state.tensors, slots, patches[:, primer:])[0]
    np.testing.assert_allclose(wave.numpy(), made["wave"][primer * program.hop :], rtol=0, atol=1e-5)


@each_case
def test_latents_are_the_published_ones(name: str) -> None:
    program, made = encoder_of(name), golden(name)
    clip = made["clip"].astype(np.float32) / 32768
    (both,) = program.run([begin(program, reference=clip, prompt=clip)])
    assert sorted(both) == ["prompt", "reference"]
    for kind, patches in both.items():
        assert patches.dtype == np.float32
        assert len(patches) == patches_of(len(clip), program.config, program.patch_size)
        np.testing.assert_allclose(patches, made[kind], rtol=0, atol=1e-5)
    assert not np.allclose(both["prompt"], both["reference"], atol=0.1)


@pytest.mark.parametrize(
    ("config", "values", "hop", "rate_hz"),
    [
        (VaeConfigV2(), 161_856, 1920, 48000),
        (VaeConfig(), 116_160, 640, 16000),
        (
            VaeConfig(
                encoder_dim=64, encoder_rates=(2, 3, 6, 7, 7), decoder_dim=2048,
                decoder_rates=(7, 7, 6, 3, 2), sample_rate=44100,
            ),
            159_488, 1764, 44100,
        ),
    ],
    ids=["2", "0.5b", "1.5"],
)  # fmt: skip
def test_full_size_state(config: VaeConfig, values: int, hop: int, rate_hz: int) -> None:
    tensors = {name: torch.empty(shape, device="meta") for name, shape in vae_shapes(config).items()}
    program = VocoderProgram(decoder_weights(tensors, config, torch.float16), config, 4)
    declared = list(leaves(program.declare()))
    assert all(leaf.per_slot and leaf.fill == 0 and leaf.dtype is torch.float16 for leaf in declared)
    assert sum(math.prod(leaf.shape[1:]) for leaf in declared) == values
    assert (program.hop, program.rate_hz, program.lookahead) == (4 * hop, rate_hz, 0)
    assert program.flush(None, torch.tensor([1, 2])).shape == (2, 0)


# --- chunks ------------------------------------------------------------------------------------


@settings(max_examples=15, deadline=None)
@given(chunks=st.lists(st.integers(1, FRAMES), min_size=1, max_size=12))
def test_stream_equals_whole_wherever_it_is_cut(
    program: VocoderProgram, latents: Tensor, whole: Tensor, chunks: list[int]
) -> None:
    cuts = [0]
    for n in chunks:
        cuts.append(min(cuts[-1] + n, FRAMES))
    sizes = [b - a for a, b in pairwise(cuts) if b > a]
    wave = run(program, new_state(program), latents[: sum(sizes)], sizes)
    torch.testing.assert_close(wave, whole[: len(wave)], **SAME)


@each_case
@pytest.mark.parametrize("frames", [1, 2, 3, 5, 8])
def test_chunks_of_one_size_equal_whole(name: str, frames: int) -> None:
    program, latents = program_of(name), torch.from_numpy(golden(name)["latents"])
    whole = run(program, new_state(program), latents, [len(latents)])
    wave = run(program, new_state(program), latents, [len(part) for part in latents.split(frames)])
    torch.testing.assert_close(wave, whole, **SAME)


def test_nothing_looks_ahead(program: VocoderProgram, latents: Tensor, whole: Tensor) -> None:
    hop = program.config.decoder_hop
    for t in (1, 11, 27):
        other = torch.cat([latents[:t], random_latents(9)[t:]])
        wave = run(program, new_state(program), other, [FRAMES])
        torch.testing.assert_close(wave[: t * hop], whole[: t * hop], **SAME)
        assert not torch.allclose(wave[t * hop :], whole[t * hop :], atol=1e-2)


def test_a_frame_is_heard_for_twenty_more(program: VocoderProgram, latents: Tensor, whole: Tensor) -> None:
    other = latents.clone()
    other[2] += 3
    hop = program.config.decoder_hop
    change = (run(program, new_state(program), other, [FRAMES]) - whole).abs().unflatten(0, (-1, hop)).amax(1)
    assert not change[:2].any()
    assert change[22] > 0
    assert not change[23:].any()


@pytest.mark.parametrize(("dtype", "noise"), [(torch.bfloat16, 1e-2), (torch.float16, 1e-4)], ids=str)
def test_half_precision_keeps_the_signal(
    latents: Tensor, whole: Tensor, dtype: torch.dtype, noise: float
) -> None:
    program = program_of("2", dtype)
    wave = run(program, new_state(program), latents, [1, 2, 4, 8, 13])
    assert wave.dtype is torch.float32
    assert (wave - whole).square().mean() < noise * whole.square().mean()


@pytest.mark.skipif(not choice._AVAILABLE, reason="Triton is not installed")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_kernels_make_the_same_sound(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a vocoder with few samples a frame: Triton's interpreter takes its time."""
    config = VaeConfigV2(
        encoder_dim=4, encoder_rates=(2, 3), latent_dim=8, decoder_dim=128, decoder_rates=(3, 4),
        sample_rate=12000, out_sample_rate=24000,
    )  # fmt: skip
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tensors = {name: tensor.to(device) for name, tensor in random_vae(config, 0).items()}
    program = VocoderProgram(decoder_weights(tensors, config, dtype), config, 2)
    patches = random_latents(0, 12).unflatten(0, (2, 3, 2)).to(device)
    waves = []
    for which in ("torch", "triton"):
        monkeypatch.setattr(choice, "_WANTED", which)
        state = allocate(program.declare(), slots=5, device=device).tensors
        slots = torch.tensor([3, 1], device=device)
        waves.append(
            torch.cat([program.step(state, slots, part) for part in patches.split((1, 2), dim=1)], 1)
        )
    scale = 1 if dtype is torch.float32 else 1000
    torch.testing.assert_close(*waves, rtol=0, atol=2e-6 * scale)
    assert waves[0].std() > 0.05


# --- batches and slots -------------------------------------------------------------------------


def test_cold_and_warm_streams_share_a_batch(program: VocoderProgram, latents: Tensor, whole: Tensor) -> None:
    state, hop = new_state(program), program.config.decoder_hop
    run(program, state, latents[:17], [17], slot=3)
    late = random_latents(1)
    batch = torch.stack([latents[17:20], late[:3], torch.zeros(3, 8), latents[:3], latents[5:8]])
    slots = torch.tensor([3, 1, 0, 4, 0])  # 0: padding, twice
    pcm = decode(program.weights, state.tensors, slots, batch)
    torch.testing.assert_close(pcm[0], whole[17 * hop : 20 * hop], **SAME)
    torch.testing.assert_close(pcm[1], run(program, new_state(program), late[:3], [3]), **SAME)
    torch.testing.assert_close(pcm[3], whole[: 3 * hop], **SAME)
    torch.testing.assert_close(run(program, state, latents[20:], [8], slot=3), whole[20 * hop :], **SAME)


def test_slots_not_in_the_batch_do_not_change(program: VocoderProgram, latents: Tensor) -> None:
    state = new_state(program)
    run(program, state, latents[:9], [9], slot=2)
    before = snapshot(state, 2)
    run(program, state, latents, [FRAMES], slot=1)
    assert torch.equal(before, snapshot(state, 2))


def test_slot_starts_afresh_after_reset(program: VocoderProgram, latents: Tensor, whole: Tensor) -> None:
    state = new_state(program)
    run(program, state, random_latents(2), [20, 8])
    reset(state, torch.tensor([1]))
    torch.testing.assert_close(run(program, state, latents, [FRAMES]), whole, **SAME)


def test_primed_state_may_be_kept_for_another_slot(
    program: VocoderProgram, latents: Tensor, whole: Tensor
) -> None:
    state, patches = new_state(program), latents.unflatten(0, (-1, 4))[None]
    program.prime(state.tensors, torch.tensor([2]), patches[:, :3])
    primed = snapshot(state, 2)
    run(program, state, random_latents(3), [FRAMES], slot=2)  # the copy is not the slot
    run(program, state, random_latents(4), [FRAMES], slot=4)
    restore(state, [4], [primed])
    rest = run(program, state, latents[12:], [1, FRAMES - 13], slot=4)
    torch.testing.assert_close(rest, whole[3 * program.hop :], **SAME)


# --- the stages --------------------------------------------------------------------------------


def job(name: str = "j", **inputs: bytes) -> Job:
    return Job(id=name, route=("encoder", "vocoder"), inputs=inputs, seed=0, max_frames=1)


def arrived(**arrays: np.ndarray) -> dict[str, Chunk]:
    kind = ChunkKind.CONDITIONING
    return {"encoder": Chunk(job="j", source="encoder", index=0, kind=kind, arrays=dict(arrays))}


def begin(program: EncoderProgram, **recordings: np.ndarray) -> Item:
    asked = EncoderInput(**{name: x.astype(np.float32).tobytes() for name, x in recordings.items()})
    return program.begin(job(**{STAGE: msgspec.msgpack.encode(asked)}), {})


def test_prompt_primes_with_its_last_patches() -> None:
    prompt = random_latents(5, 40).unflatten(0, (-1, 4)).numpy()
    second, first = (program_of(name).begin(job(), arrived(prompt=prompt)) for name in ("2", "1.5"))
    assert second.prime is not None
    assert first.prime is not None
    assert np.array_equal(second.prime, prompt[-3:])
    assert np.array_equal(first.prime, prompt[-2:])
    same = program_of("2").begin(job(), arrived(prompt=prompt[-3:].copy(), reference=prompt))
    other = program_of("2").begin(job(), arrived(prompt=prompt[:-1]))
    assert second.prime_key == same.prime_key != other.prime_key


def test_short_prompt_primes_with_all_it_has() -> None:
    prompt = random_latents(5, 4).unflatten(0, (-1, 4)).numpy()
    started = program_of("2").begin(job(), arrived(prompt=prompt))
    assert started.prime is not None
    assert np.array_equal(started.prime, prompt)


def test_reference_alone_does_not_prime() -> None:
    reference = random_latents(5, 40).unflatten(0, (-1, 4)).numpy()
    assert program_of("2").begin(job(), arrived(reference=reference)).prime is None
    assert program_of("2").begin(job(), {}).prime is None


def test_recordings_do_not_depend_on_batch_mates() -> None:
    program, clip = encoder_of("2"), golden("2")["clip"].astype(np.float32) / 32768
    items = [
        begin(program, reference=x, prompt=y)
        for x, y in ((clip, -clip), (clip[::-1], clip), (-clip, clip[:-9]))
    ]
    assert len({item.bucket for item in items}) == 1
    for result, item in zip(program.run(items), items, strict=True):
        (alone,) = program.run([item])
        for kind in ("reference", "prompt"):
            np.testing.assert_allclose(result[kind], alone[kind], rtol=0, atol=1e-5)


def test_only_recordings_of_equal_length_share_a_batch() -> None:
    program, x = encoder_of("2"), np.zeros(6000)
    buckets = [
        begin(program, reference=x).bucket, begin(program, prompt=x).bucket,
        begin(program, reference=x, prompt=x).bucket, begin(program, reference=x[:5000]).bucket,
        begin(program, reference=x, prompt=x[:5000]).bucket,
    ]  # fmt: skip
    assert len(set(buckets)) == 5
    assert begin(program, reference=x[:5999]).bucket == buckets[0]


def test_results_are_kept_by_content() -> None:
    program, x = encoder_of("2"), np.linspace(-1, 1, 2000)
    key = begin(program, reference=x).cache_key
    assert begin(program, reference=x.copy()).cache_key == key
    assert len({key, begin(program, prompt=x).cache_key, begin(program, reference=x * 0.5).cache_key}) == 3


@each_case
def test_frames_of_the_encoder_do_not_look_ahead(name: str) -> None:
    program, c = encoder_of(name), CASES[name].config
    x = torch.from_numpy(golden(name)["clip"].astype(np.float32) / 32768)[None]
    whole = encode(program.weights, c, x)
    assert whole.shape == (1, -(-x.shape[1] // c.encoder_hop), c.latent_dim)
    for frames in (1, 3):
        part = encode(program.weights, c, x[:, : frames * c.encoder_hop])
        torch.testing.assert_close(part, whole[:, :frames], rtol=0, atol=1e-5)


@pytest.mark.parametrize(("samples", "patches"), [(1, 1), (2560, 1), (2561, 2), (25600, 10)])
def test_patches_cover_all_samples(samples: int, patches: int) -> None:
    assert patches_of(samples, VaeConfigV2(), 4) == patches


def test_stages_run_as_the_runtime_runs_them(latents: Tensor, whole: Tensor) -> None:
    """Two recordings through the encoder; a stream that goes on from one, beside one that starts afresh."""
    encoder, program, given = encoder_of("2"), program_of("2"), list[Chunk]()
    shot = OneShotRunner(STAGE, encoder, ChunkKind.CONDITIONING, OneShotLimits(), given.append)
    clip = golden("2")["clip"].astype(np.float32) / 32768
    shot.start(job("a", **{STAGE: msgspec.msgpack.encode(EncoderInput(prompt=clip.tobytes()))}), {})
    shot.tick(0.0)
    np.testing.assert_allclose(given[0].arrays["prompt"], golden("2")["prompt"], rtol=0, atol=1e-5)

    heard: dict[str, list[np.ndarray]] = {"a": [], "b": []}
    limits = StreamingLimits(slots=2)
    runner = StreamingRunner("vocoder", program, limits, torch.device("cpu"), lambda c: take(heard, c))
    patches = latents.unflatten(0, (-1, 4)).numpy()
    runner.start(job("a"), arrived(prompt=patches[:3]))
    runner.start(job("b"), {})
    for i in range(4):
        for name, first in (("a", 3), ("b", 0)):
            arrays = {"latents": patches[first + i : first + i + 1]}
            kind = ChunkKind.LATENTS
            runner.push(Chunk(job=name, source="talker", index=i, kind=kind, arrays=arrays, last=i == 3))
        runner.tick(0.01 * i)
    while runner.jobs():
        runner.tick(1.0)
    for name, first in (("a", 3), ("b", 0)):
        wave = torch.from_numpy(np.concatenate(heard[name]))
        torch.testing.assert_close(wave, whole[first * program.hop : (first + 4) * program.hop], **SAME)


def take(heard: dict[str, list[np.ndarray]], chunk: Chunk) -> None:
    heard[chunk.job].append(chunk.arrays["pcm"])


# --- files -------------------------------------------------------------------------------------


def tensors_of(layout: str) -> dict[str, Tensor]:
    made, out = random_vae(CASES["2"].config, 0), {}
    for name, tensor in made.items():
        stem, _, leaf = name.rpartition(".")
        if layout == "parametrized" and leaf in ("weight_g", "weight_v"):
            out[f"{stem}.parametrizations.weight.original{'gv'.index(leaf[-1])}"] = tensor
        elif layout == "plain" and leaf == "weight_v":
            length = tensor.double().flatten(1).square().sum(1).sqrt().view(-1, 1, 1)
            out[f"{stem}.weight"] = (made[f"{stem}.weight_g"] * tensor / length).float()
        elif layout != "plain" or leaf != "weight_g":
            out[name] = tensor
    return out


@pytest.mark.parametrize("layout", ["published", "parametrized", "plain"])
@pytest.mark.parametrize("file", ["pth", "pth flat", "safetensors"])
def test_every_layout_gives_the_same_sound(
    tmp_path: Path, layout: str, file: str, program: VocoderProgram, latents: Tensor, whole: Tensor
) -> None:
    tensors, config = tensors_of(layout), CASES["2"].config
    if file == "safetensors":
        save_file(tensors, tmp_path / "audiovae.safetensors")
        (tmp_path / "audiovae.pth").write_bytes(b"the other is preferred")
    else:
        torch.save(tensors if file == "pth flat" else {"state_dict": tensors}, tmp_path / "audiovae.pth")
    read = VocoderProgram(load_vae_decoder(tmp_path, config, "cpu", torch.float32), config, 4)
    torch.testing.assert_close(run(read, new_state(read), latents[:6], [6]), whole[: 6 * 1920], **SAME)
    x = torch.linspace(-1, 1, 1280).sin()[None]
    encoder = load_vae_encoder(tmp_path, config, "cpu", torch.float32)
    torch.testing.assert_close(
        encode(encoder, config, x), encode(encoder_of("2").weights, config, x), rtol=0, atol=1e-5
    )


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"neither audiovae\.safetensors nor audiovae\.pth"):
        load_vae_decoder(tmp_path, VaeConfigV2(), "cpu", torch.float32)


def test_broken_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "audiovae.pth").write_bytes(b"no archive")
    with pytest.raises(StartupError, match=r"audiovae\.pth"):
        load_vae_decoder(tmp_path, VaeConfigV2(), "cpu", torch.float32)


@pytest.mark.parametrize("file", ["pth", "safetensors"])
def test_missing_tensor_is_named(tmp_path: Path, file: str) -> None:
    tensors, config = tensors_of("published"), CASES["2"].config
    del tensors["decoder.model.2.block.3.block.1.bias"]
    if file == "safetensors":
        save_file(tensors, tmp_path / "audiovae.safetensors")
    else:
        torch.save({"state_dict": tensors}, tmp_path / "audiovae.pth")
    with pytest.raises(StartupError, match=rf"decoder\.model\.2\.block\.3\.block\.1\.bias.*audiovae\.{file}"):
        load_vae_decoder(tmp_path, config, "cpu", torch.float32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"decoder_rates": (8, 5, 6, 2, 2, 2)}, r"decoder_rates\[1\] is 5, but .* 6"),
        ({"decoder_dim": 64}, "decoder_dim is 64, but .* 128"),
        ({"latent_dim": 64}, "latent_dim is 64, but .* 8"),
        ({"sr_bin_boundaries": (1, 2, 3, 4)}, "4 output rates.*number 5"),
    ],
    ids=["rates", "width", "latents", "output rates"],
)
def test_weights_that_are_not_the_configs_are_refused(change: dict, message: str) -> None:
    c = CASES["2"].config
    config = msgspec.structs.replace(c, **change)
    with pytest.raises(StartupError, match=message):
        decoder_weights(random_vae(c, 0), config, torch.float32)


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        (VaeConfig, {"depthwise": False}, "depthwise is false"),
        (VaeConfig, {"use_noise_block": True}, "use_noise_block is true"),
        (VaeConfig, {"decoder_rates": [8, 8, 5, 3]}, "25 frames a second, decoder_rates take 16.6"),
        (VaeConfig, {"decoder_dim": 1000}, "decoder_dim is 1000"),
        (VaeConfigV2, {"cond_out_layer": True}, "cond_out_layer is true"),
        (VaeConfigV2, {"cond_type": "concat"}, "cond_type"),
        (VaeConfigV2, {"out_sample_rate": 44100}, "decoder_rates take 22.9"),
    ],
    ids=str,
)
def test_layouts_that_are_not_released_are_refused(kind: type[VaeConfig], change: dict, message: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=message):
        msgspec.convert(change, kind)


def test_defaults_are_the_released_ones() -> None:
    second, first = msgspec.convert({"cond_dim": 128}, VaeConfigV2), VaeConfig()
    assert (second.encoder_hop, second.decoder_hop, second.output_rate_hz, second.rate_row) == (
        640,
        1920,
        48000,
        3,
    )
    assert (first.encoder_hop, first.decoder_hop, first.output_rate_hz, first.rate_row) == (
        640,
        640,
        16000,
        None,
    )
    assert VaeConfigV2(sr_bin_boundaries=None).rate_row is None
