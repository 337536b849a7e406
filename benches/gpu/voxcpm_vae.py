"""How long does VoxCPM2's vocoder take for so many patches of so many streams, and in which dtype is it true?

Regime: at one stream the launches (some 100 kernels) and 92 MB of half-precision weights; at many the traffic
of activations, 1.1 M values a patch and layer, beside 2.9 GFLOP. The ceiling printed is the larger of the
operations over 790 TFLOP/s (fp32: 67) and the bytes over 4.3 TB/s, with a residual unit reading and writing
its input once.

First, what it makes: the published wave of the small golden vocoder; kernels against twins and against fp32
twins at full size, as signal over difference; and a stream cut into patches against the whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benches.gpu.check import kernels
from benches.gpu.codec import step_kernels, step_ms
from benches.gpu.frame import ARITHMETIC, BANDWIDTH, event_ms
from hocket.models.voxcpm.vae import VaeConfig, VaeConfigV2, VocoderProgram
from hocket.models.voxcpm.vae_encoder import encode
from hocket.models.voxcpm.vae_synthetic import random_vae
from hocket.models.voxcpm.vae_weights import decoder_weights, encoder_weights
from hocket.runtime.state import allocate

GOLDEN = Path(__file__).parents[2] / "tests/golden/voxcpm/vae_2.npz"
TINY = VaeConfigV2(encoder_dim=8, decoder_dim=128, latent_dim=8)  # the golden one
GRID = ((1, 1), (1, 16), (1, 64), (4, 64))  # patches, streams
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
PATCH = 4  # latent frames
FLOP, VALUES, WEIGHTS = 2.88e9, 8.6e6, 45.8e6  # a patch; values moved for a patch; weights read once


def main(
    device: torch.device,
    report: Callable[[str], None],
    config: VaeConfig = VaeConfigV2(),  # noqa: B008  frozen
) -> dict[str, Any]:
    results: dict[str, Any] = {"golden fp32, largest difference": golden(device)}
    report(f"golden fp32: {results['golden fp32, largest difference']:.1e} from the published wave")
    tensors = random_vae(config, 0, device, exact=False)
    exact = sound(vocoder(tensors, config, torch.float32), device, "torch", 3)
    for name, dtype in DTYPES.items():
        program = vocoder(tensors, config, dtype)
        cut, whole = sound(program, device, "auto", 1), sound(program, device, "auto", 3)
        twin = sound(program, device, "torch", 3)
        results[f"{name} signal over difference, dB"] = levels = {
            "kernels from fp32": decibels(whole, exact),
            "twins from fp32": decibels(twin, exact),
            "kernels from twins": decibels(whole, twin),
            "cut from whole": decibels(cut, whole),
        }
        report(f"{name}: " + ", ".join(f"{key} {value:.1f} dB" for key, value in levels.items()))
    if device.type == "cuda":
        for name, dtype in DTYPES.items():
            results[name] = timed(vocoder(tensors, config, dtype), name, dtype, device, report)
        results["encoder fp32, ms for 10 s"] = encoder_ms(tensors, config, device)
    return results


def golden(device: torch.device) -> float:
    made = np.load(GOLDEN)
    program = vocoder(random_vae(TINY, 0), TINY, torch.float32, device)
    state = allocate(program.declare(), slots=3, device=device).tensors
    patches = torch.from_numpy(made["latents"]).to(device).unflatten(0, (-1, PATCH))[None]
    slots = torch.tensor([2], device=device)
    wave = torch.cat([program.step(state, slots, part)[0] for part in patches.split((1, 2, 4), dim=1)])
    return float(np.abs(wave.cpu().numpy() - made["wave"]).max())


def vocoder(
    tensors: dict[str, Tensor], config: VaeConfig, dtype: torch.dtype, device: torch.device | None = None
) -> VocoderProgram:
    if device is not None:
        tensors = {name: tensor.to(device) for name, tensor in tensors.items()}
    return VocoderProgram(decoder_weights(tensors, config, dtype), config, PATCH)


def sound(program: VocoderProgram, device: torch.device, which: str, patches: int) -> Tensor:
    """Six patches of five streams, so many patches at a time -> [5, samples]"""
    drawn = torch.randn(5, 6, PATCH, program.config.latent_dim, generator=torch.Generator().manual_seed(0))
    state = allocate(program.declare(), slots=8, device=device).tensors
    slots = torch.tensor([3, 1, 7, 2, 6], device=device)
    with kernels(which):
        return torch.cat(
            [program.step(state, slots, x) for x in drawn.to(device).split(patches, dim=1)], dim=1
        )


def decibels(x: Tensor, reference: Tensor) -> float:
    noise = (x.double() - reference.double()).square().mean().item()
    return 10 * math.log10(reference.double().square().mean().item() / noise) if noise else math.inf


def timed(
    program: VocoderProgram,
    name: str,
    dtype: torch.dtype,
    device: torch.device,
    report: Callable[[str], None],
) -> list[dict[str, Any]]:
    rows = []
    for n, b in GRID:
        ms = step_ms(program, latents(program, n, b, device))
        moved = (VALUES * n * b + WEIGHTS) * dtype.itemsize
        arithmetic = FLOP * n * b / (ARITHMETIC if dtype.itemsize == 2 else 67e12)
        ceiling = max(arithmetic, moved / BANDWIDTH) * 1e3
        rate = n * b * program.hop / program.rate_hz / ms * 1e3
        rows.append({"patches": n, "b": b, "ms": ms, "ceiling_ms": ceiling})
        report(
            f"vocoder {name} {n} patches x {b:3d}  {ms:7.3f} ms"
            f"  ceiling {ceiling:6.3f} ({ceiling / ms:4.0%})  {rate:7.0f} audio-s/s"
        )
    return rows


def latents(program: VocoderProgram, n: int, b: int, device: torch.device) -> Tensor:
    return torch.randn(b, n, PATCH, program.config.latent_dim, device=device)


def encoder_ms(tensors: dict[str, Tensor], config: VaeConfig, device: torch.device) -> float:
    weights = encoder_weights(tensors, config, torch.float32)
    samples = torch.randn(1, 10 * config.sample_rate, device=device) * 0.1
    return event_ms(lambda: encode(weights, config, samples), 5)


def breakdown(device: torch.device) -> list[tuple[str, float, int]]:
    """Kernels of one patch of 64 streams in fp16."""
    config = VaeConfigV2()
    program = vocoder(random_vae(config, 0, device, exact=False), config, torch.float16)
    return step_kernels(program, latents(program, 1, 64, device))
