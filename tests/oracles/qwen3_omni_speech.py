"""Make tests/golden/qwen3_omni/speech*.npz with transformers' Qwen3-Omni: Talker and Code2Wav.

The checkpoint is the tiny one of hocket/models/qwen3_omni/synthetic.py, which the tests write again for
themselves; what is kept is what the reference makes of it: fp32, eager attention, greedy, one thread.

Environment (Python 3.11), as for tests/oracles/qwen3_omni.py:

    python -m venv oracle-venv
    oracle-venv/bin/pip install torch==2.13.0 torchvision transformers==5.17.0 safetensors==0.8.0 numpy
    PYTHONPATH=. HF_HUB_OFFLINE=1 oracle-venv/bin/python tests/oracles/qwen3_omni_speech.py

speech.json  per case: checkpoint (arguments of write_checkpoint), messages, options, how its text ended

speech_<case>.npz
    prompt     int32   [n]       ids the Thinker was given
    text       int32   [m]       ids it generated, the end token left out
    rows       float32 [l, h]    input rows of the Talker's prefill
    hidden     float32 [k, H]    Thinker output that the rows of media were made from, in prompt order
    positions  float32 [l, 3]    rotary positions of those rows
    codes      int16   [t, 16]
    wave       float32           one forward over all codes, not in windows; short cases only

speech_code2wav.npz
    codes      int16   [t, 16]   random frames
    wave       float32 [1920 t - 555]

Waves are rounded to 2^-18.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoProcessor, Qwen3OmniMoeForConditionalGeneration

from hocket.models.qwen3_omni.synthetic import write_checkpoint

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "qwen3_omni"
PLAIN: dict[str, Any] = {"size": "tiny", "seed": 0}
WAVED = 20  # frames up to which a case keeps its wave
HELLO = [{"role": "user", "content": "Hello there"}]
TURNS = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "One voice?"},
    {"role": "assistant", "content": "Two."},
    {"role": "user", "content": "And rests?"},
]
AUDIO, IMAGE, VIDEO = {"type": "audio"}, {"type": "image"}, {"type": "video"}


def asked(*parts: Any) -> list[dict[str, Any]]:
    """One user's message."""
    said = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return [{"role": "user", "content": said}]


# name: messages; tokens of text, and whether the Thinker ended there or was cut; frames; checkpoint
CASES: dict[str, dict[str, Any]] = {
    "text_1": {"messages": HELLO, "tokens": 1, "frames": 8},
    "text_7": {"messages": TURNS, "tokens": 7, "frames": 14},
    "text_7_cut": {"messages": TURNS, "tokens": 7, "cut": True, "frames": 12},
    # Of a text that is cut the last token is not spoken.
    "text_64": {"messages": HELLO, "tokens": 65, "cut": True, "frames": 70},
    "text_300": {"messages": TURNS, "tokens": 301, "cut": True, "frames": 306},
    "chelsie": {"messages": HELLO, "tokens": 3, "frames": 6, "speaker": "chelsie"},
    "audio": {"messages": asked("What is", AUDIO, "this?"), "tokens": 5, "frames": 8},
    "image": {"messages": asked(IMAGE, "Describe."), "tokens": 5, "frames": 8},
    # Here the Talker ends by itself, after three frames.
    "video": {"messages": asked(VIDEO, "What happens?"), "tokens": 4, "frames": 8},
    "mixed": {"messages": asked(IMAGE, "and", AUDIO, "?"), "tokens": 4, "frames": 8},
    "audio_in_video": {
        "messages": asked(VIDEO, "Who speaks?"), "tokens": 4, "frames": 8, "audio_in_video": True,
    },
}  # fmt: skip


def media(messages: list[dict[str, Any]], audio_in_video: bool) -> dict[str, Any]:
    """Deterministic sound and pictures for the parts of `messages`, as the processor takes them."""
    kinds = [
        part["type"]
        for message in messages
        for part in (message["content"] if not isinstance(message["content"], str) else [])
    ]
    given: dict[str, Any] = {}
    rng = np.random.default_rng(7)
    if "audio" in kinds or audio_in_video:
        clip = rng.normal(0, 0.2, 17_600).astype(np.float32)  # 1.1 s at 16 kHz
        given["audio"] = [clip]
    if "image" in kinds:
        given["images"] = [rng.integers(0, 256, (96, 64, 3), dtype=np.uint8)]
    if "video" in kinds:
        given["videos"] = [rng.integers(0, 256, (4, 64, 64, 3), dtype=np.uint8)]
    return given


class Capture:
    """Wraps the reference's parts, to keep what passes between them."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.kept: dict[str, Any] = {}
        talk, decode = model.talker.generate, model.code2wav.chunked_decode
        index = model.talker.get_rope_index

        def generate(**fields: Any) -> Any:
            self.kept["rows"] = fields["inputs_embeds"][0]
            return talk(**fields)

        def chunked_decode(codes: Any, **fields: Any) -> Any:
            self.kept["codes"] = codes[0].T
            return decode(codes, **fields)

        def get_rope_index(ids: Any, *more: Any) -> Any:
            positions, delta = index(ids, *more)
            self.kept["positions"] = positions[:, 0].T
            return positions, delta

        def project(module: Any, given: Any, _: Any) -> None:
            self.kept["hidden"] = given[0]

        model.talker.generate, model.code2wav.chunked_decode = generate, chunked_decode
        model.talker.get_rope_index = get_rope_index
        model.talker.hidden_projection.register_forward_hook(project)


def rounded(wave: torch.Tensor) -> np.ndarray:
    """float32, on a grid of 2^-18."""
    return (torch.round(wave.double() * 2**18) / 2**18).float().numpy()


def text_of(model: Any, inputs: Any, case: dict[str, Any], options: dict[str, Any]) -> tuple[list[int], int]:
    """Greedy text of the wanted length, and the id that ends it; -1 if it is cut.

    Random weights end nowhere by themselves. The end is the first id behind the wanted length that did not
    come before.
    """
    limit = case["tokens"] + (0 if case.get("cut") else 60)
    sequence = model.thinker.generate(
        **inputs, max_new_tokens=limit, eos_token_id=-1, do_sample=False, **options
    )
    made = sequence[0, inputs["input_ids"].shape[1] :].tolist()
    if case.get("cut"):
        return made, -1
    length = next(n for n in range(case["tokens"], limit) if made[n] not in made[:n])
    return made[:length], made[length]


def run(folder: Path, case: dict[str, Any]) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """-> arrays, and what speech.json says of the case"""
    model = Qwen3OmniMoeForConditionalGeneration.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    # Prompts that mix pictures and sound crash in the Talker otherwise (transformers 5.17.0).
    model.talker.config.audio_config = model.config.thinker_config.audio_config
    processor = AutoProcessor.from_pretrained(folder)
    capture = Capture(model)
    in_video = case.get("audio_in_video", False)
    prompt = processor.apply_chat_template(case["messages"], add_generation_prompt=True, tokenize=False)
    options = {"use_audio_in_video": True} if in_video else {}
    inputs = processor(text=prompt, return_tensors="pt", **options, **media(case["messages"], in_video))
    made, end = text_of(model, inputs, case, options)
    tokens = len(made) + (0 if case.get("cut") else 1)
    _, wave = model.generate(
        **inputs, **options, speaker=case.get("speaker", "ethan"), thinker_max_new_tokens=tokens,
        thinker_eos_token_id=end, thinker_do_sample=False, talker_do_sample=False,
        talker_max_new_tokens=case["frames"] + 1,
    )  # fmt: skip
    kept = capture.kept
    codes = kept["codes"]
    arrays = {
        "prompt": inputs["input_ids"][0].numpy().astype(np.int32),
        "text": np.array(made, np.int32),
        "rows": kept["rows"].float().numpy(),
        "positions": kept["positions"].float().numpy(),
        "codes": codes.numpy().astype(np.int16),
    }
    if "hidden" in kept:
        arrays["hidden"] = kept["hidden"].numpy()
    if len(codes) <= WAVED:
        whole = model.code2wav(codes.T[None])[0, 0]
        assert len(whole) == wave.shape[-1] == 1920 * len(codes) - 555
        assert 0.01 < whole.abs().max() < 1, "the clamp hides what comes before it"
        arrays["wave"] = rounded(whole)
    return arrays, {**case, "end": end, "ended": len(codes) < case["frames"]}


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("only", nargs="*", help="cases to make; by default all")
    only = parser.parse_args().only
    torch.set_num_threads(1)
    GOLDEN.mkdir(parents=True, exist_ok=True)
    index_file = GOLDEN / "speech.json"
    index = json.loads(index_file.read_text("utf-8")) if index_file.exists() else {"cases": {}}
    with tempfile.TemporaryDirectory() as room:
        folder = write_checkpoint(Path(room) / "plain", **PLAIN)
        for name, case in CASES.items():
            if only and name not in only:
                continue
            arrays, said = run(folder, case)
            np.savez_compressed(GOLDEN / f"speech_{name}.npz", **arrays)
            index["cases"][name] = {"checkpoint": PLAIN, **said}
            print(name, {key: value.shape for key, value in arrays.items()}, flush=True)
        if not only or "code2wav" in only:
            model = Qwen3OmniMoeForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
            codes = np.random.default_rng(3).integers(0, 2048, (60, 16))
            wave = model.code2wav(torch.from_numpy(codes.T)[None])[0, 0]
            np.savez_compressed(
                GOLDEN / "speech_code2wav.npz", codes=codes.astype(np.int16), wave=rounded(wave)
            )
    versions = {name: importlib.metadata.version(name) for name in ("transformers", "torch", "numpy")}
    index_file.write_text(json.dumps({**index, "versions": versions}, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
