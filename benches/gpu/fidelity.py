"""How far is half precision from fp32, in logits and in sound?

Logits     one frame of the talker and its predictor on the same random weights and state, every code given
           (teacher forcing), bf16 against fp32: for each codebook the largest and the root-mean-square
           difference, the divergence of what would be drawn from (temperature 0.9), and the share of rows
           with the same best token. Bound by bf16's 8 bits of mantissa: about 1 % of the logits' deviation.
Sound      the codec in chunks as they are streamed, in fp32, fp16 and bf16, against one fp32 step over the
           whole: largest difference, signal to noise, log-spectral distance; and steps at the seams of chunks
           beside those of the whole decode at the same places.

    python -m benches.gpu.fidelity --out FILE [--size tiny]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benches.gpu.frame import states
from benches.gpu.model import Model
from hocket.kernels.draw import DrawOptions, Repetition
from hocket.models.qwen3_tts.codec import CodecProgram
from hocket.models.qwen3_tts.talker import TalkerProgram
from hocket.nn import talker as talker_module
from hocket.runtime.state import allocate

CHUNKS = (1, 1, 2, 4, 8, 16, 32, 32, 32)
ROWS = 16
CONTEXT_BLOCKS = 32


def forced_logits(program: TalkerProgram, state: Any, slots: Tensor, codes: Tensor) -> list[Tensor]:
    """fp32 logits [b, v] of every codebook when row i draws codes[i]."""
    program.w.text.ensure([program.config.tts_pad_token_id])
    seen: list[Tensor] = []

    def draw(
        logits: Tensor, o: DrawOptions, slots: Tensor, key: Tensor, variant: int, out: Tensor,
        table: Tensor | None = None, repetition: Repetition | None = None,
    ) -> Tensor | None:  # fmt: skip
        out.copy_(codes[:, len(seen)])
        seen.append(logits.float())
        return None if table is None else table[out]

    program.whole = program.clustered = None  # they draw by themselves
    kept, talker_module.draw_code = talker_module.draw_code, draw
    try:
        program.step(state, slots, CONTEXT_BLOCKS * 16, 0)
    finally:
        talker_module.draw_code = kept
    return seen


def logits(model: Model) -> list[dict[str, float]]:
    """One row a codebook."""
    slots = torch.arange(1, ROWS + 1, device=model.device)
    full = model.talker(torch.float32)
    state = states(full, ROWS)
    kv, x = state.cache.kv.bfloat16(), state.x.bfloat16()
    state.cache.kv.copy_(kv)
    state.x.copy_(x)
    books = full.books
    codes = torch.randint(64, (ROWS, books), device=model.device)
    exact = forced_logits(full, state, slots, codes)
    del full, state
    half = model.talker(torch.bfloat16)
    state = states(half, ROWS)
    state.cache.kv.copy_(kv)
    state.x.copy_(x)
    rows = []
    for book, (a, b) in enumerate(zip(exact, forced_logits(half, state, slots, codes), strict=True)):
        p, q = (torch.log_softmax(each / 0.9, dim=-1) for each in (a, b))
        rows.append(
            {
                "codebook": book,
                "deviation": a.std().item(),
                "largest": (a - b).abs().max().item(),
                "rms": (a - b).square().mean().sqrt().item(),
                "divergence": (p.exp() * (p - q)).sum(-1).mean().item(),
                "same_best": (a.argmax(-1) == b.argmax(-1)).float().mean().item(),
            }
        )
    return rows


def spectral_distance_db(a: Tensor, b: Tensor) -> float:
    """Log-spectral distance of waves [s, samples], in dB: 1024 points, hop 256, 60 dB down to the floor."""
    window = torch.hann_window(1024, device=a.device)
    x, y = (torch.stft(w, 1024, 256, window=window, return_complex=True).abs() for w in (a, b))
    floor = x.amax() * 1e-3
    x, y = (20 * s.clamp(min=floor).log10() for s in (x, y))
    return (x - y).square().mean(dim=1).sqrt().mean().item()


def sound(model: Model) -> dict[str, Any]:
    """Streamed against whole, 8 streams of the frames of `CHUNKS`."""
    total, streams = sum(CHUNKS), 8
    codes = torch.randint(2048, (streams, total, 16), dtype=torch.int32, device=model.device)
    slots = torch.arange(1, streams + 1, device=model.device)

    def decode(program: CodecProgram, chunks: tuple[int, ...]) -> Tensor:
        state = allocate(program.declare(), slots=streams + 1, device=model.device).tensors
        parts, at = [], 0
        for n in chunks:
            parts.append(program.step(state, slots, codes[:, at : at + n]).float().clone())
            at += n
        return torch.cat(parts, dim=1)

    program = model.codec(torch.float32)
    whole = decode(program, (total,))
    edges = torch.tensor(CHUNKS, device=model.device).cumsum(0)[:-1] * program.hop
    found: dict[str, Any] = {"peak": whole.abs().max().item(), "rms": whole.square().mean().sqrt().item()}
    for name, dtype in (("fp32", torch.float32), ("fp16", torch.float16), ("bf16", torch.bfloat16)):
        streamed = decode(program if dtype == torch.float32 else model.codec(dtype), CHUNKS)
        noise = (streamed - whole).square().mean().sqrt()
        step, expected = ((w[:, edges] - w[:, edges - 1]).abs().mean().item() for w in (streamed, whole))
        found[name] = {
            "largest": (streamed - whole).abs().max().item(),
            "snr_db": 20 * torch.log10(whole.square().mean().sqrt() / noise).item(),
            "spectral_distance_db": spectral_distance_db(whole, streamed),
            "step_at_seams": step,
            "step_of_the_whole_there": expected,
        }
    return found


def main() -> None:
    p = argparse.ArgumentParser(prog="python -m benches.gpu.fidelity", description=__doc__.partition("\n")[0])
    p.add_argument("--size", default="1.7b")
    p.add_argument("--out", type=Path)
    a = p.parse_args()
    model = Model(a.size, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    found = {"sound": sound(model), "logits": logits(model)}
    for name, value in found["sound"].items():
        print(name, value)
    for row in found["logits"]:
        print("  ".join(f"{key} {value:.4g}" for key, value in row.items()))
    if a.out:
        a.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
