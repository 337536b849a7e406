"""Make tests/golden/qwen3_tts/ with the published Qwen3-TTS package.

The checkpoints are the tiny ones of hocket/models/qwen3_tts/synthetic.py, which the tests write again for
themselves; what is kept is what the reference makes of them: fp32, eager attention, greedy, one thread.

Environment (Python 3.11), apart from hocket's own because the package pins an old transformers:

    python -m venv oracle-venv
    oracle-venv/bin/pip install torch==2.13.0 numpy==2.4.6 transformers==4.57.3 accelerate==1.12.0 \\
        tokenizers==0.22.2 safetensors==0.8.0 librosa==0.11.0 soxr==1.1.0 soundfile==0.14.0 \\
        einops==0.8.2 onnxruntime sox msgspec
    oracle-venv/bin/pip install --no-deps qwen-tts==0.1.1
    PYTHONPATH=. HF_HUB_OFFLINE=1 oracle-venv/bin/python tests/oracles/qwen3_tts.py

An empty module stands in for torchaudio, which only the 25 Hz tokenizer uses: its weights are not published.

cases.json  per case: checkpoint (arguments of write_checkpoint), request, number of frames; versions used

<case>.npz
    codes      int16   [t, 16]    frames made; a budget of 14 tokens gives 13 frames
    wave       float32 [1920 t]   as the package returns it; a clone with a transcript may begin one sample
                                  early, because the package cuts the reference off by a rounded-down share
    rows       float32 [l, h]     input rows of the prefill
    trailing   float32 [n, h]     text rows added to the frames, one each; after them the pad row for ever
    hidden     float32 [t, h]     talker output from which each frame was drawn
    speaker    float32 [h]        clones only: the speaker vector
    ref_codes  int16   [r, 16]    clones with a transcript only: the recording's codes

codec.npz
    clip            int16   [47000]     24 kHz, to be divided by 32768
    clip_embedding  float32 [25, d]     encoder output before the codebooks
    clip_codes      int16   [25, 16]
    clip_mel        float32 [183, 128]
    clip_speaker    float32 [h]
    codes           int16   [200, 16]   random frames
    latent          float32 [200, c]    decoder, after its transformer
    wave            float32 [384000]    decoded in one pass, without the package's windows

Waves are rounded to 2^-16, half a step of 16-bit audio, which takes a third off the files.
"""

from __future__ import annotations

import argparse
import importlib.machinery
import importlib.metadata
import json
import sys
import tempfile
import time
import types
from pathlib import Path
from typing import Any

import librosa
import numpy as np
import torch
import transformers  # noqa: F401  must look for torchaudio before the stand-in is there

for _name in ("torchaudio", "torchaudio.compliance", "torchaudio.compliance.kaldi"):
    sys.modules[_name] = types.ModuleType(_name)
    sys.modules[_name].__spec__ = importlib.machinery.ModuleSpec(_name, None)

from qwen_tts import Qwen3TTSModel  # noqa: E402
from qwen_tts.core.models.modeling_qwen3_tts import mel_spectrogram  # noqa: E402

from hocket.models.qwen3_tts.synthetic import write_checkpoint  # noqa: E402

TESTS = Path(__file__).resolve().parents[1]
DATA, GOLDEN = TESTS / "data", TESTS / "golden" / "qwen3_tts"
PACKAGES = ["qwen-tts", "transformers", "torch", "numpy", "librosa", "soxr", "tokenizers"]
GREEDY = {"do_sample": False, "subtalker_dosample": False, "max_new_tokens": 14}
WEASELS = {"ref_audio": "weasels.wav", "ref_text": "Weasels have eaten our phone system."}

CUSTOM = {"size": "tiny", "variant": "custom_voice", "seed": 0}
DESIGN = {"size": "tiny", "variant": "voice_design", "seed": 0}
BASE = {"size": "tiny", "variant": "base", "seed": 0}
CUSTOM_SMALL = {"size": "tiny-0.6b", "variant": "custom_voice", "seed": 1}
BASE_SMALL = {"size": "tiny-0.6b", "variant": "base", "seed": 1}

# name: checkpoint, request. `full`: the whole text stands in the prompt (the package's non_streaming_mode).
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "custom_full": (
        CUSTOM,
        {
            "text": "Each voice fills the other's rests.",
            "language": "English",
            "speaker": "Vivian",
            "full": True,
        },
    ),
    "custom_streaming": (
        CUSTOM,
        {"text": "Rests, too.", "language": "German", "speaker": "ryan", "full": False},
    ),
    "custom_streaming_long": (
        CUSTOM,
        {"text": "The text is longer than the audio.", "language": "auto", "speaker": "aiden", "full": False},
    ),
    "custom_dialect_auto": (
        CUSTOM,
        {"text": "你好世界。", "language": "Auto", "speaker": "eric", "full": True},
    ),
    "custom_dialect_chinese": (
        CUSTOM,
        {"text": "今天天气不错。", "language": "Chinese", "speaker": "dylan", "full": False},
    ),
    "custom_instruct": (
        CUSTOM,
        {
            "text": "Le silence aussi.",
            "language": "French",
            "speaker": "Serena",
            "instruct": "Speak slowly, almost whispering.",
            "full": True,
        },
    ),
    "design": (
        DESIGN,
        {
            "text": "Nobody has heard me before.",
            "language": "English",
            "instruct": "An old sailor with a warm, rough voice.",
            "full": True,
        },
    ),
    "icl_streaming": (
        BASE,
        {"text": "We will call them back.", "language": "English", "full": False, **WEASELS},
    ),
    "icl_full": (
        BASE,
        {"text": "We will call them back.", "language": "English", "full": True, **WEASELS},
    ),
    "icl_streaming_short_text": (  # the text ends within the reference's rows
        BASE,
        {"text": "Back soon.", "language": "Auto", "full": False, **WEASELS, "ref_text": "Weasels."},
    ),
    "x_vector_streaming": (
        BASE,
        {
            "text": "Please stay on the line.",
            "language": "English",
            "full": False,
            "ref_audio": "please_hold.wav",
        },
    ),
    "small_custom": (
        CUSTOM_SMALL,
        {
            "text": "Each voice fills the other's rests.",
            "language": "English",
            "speaker": "Vivian",
            "full": True,
        },
    ),
    "small_icl": (
        BASE_SMALL,
        {"text": "Phone us.", "language": "Italian", "full": False, **WEASELS},
    ),
}
# The same request as this case, with the end token winning where frame END_AT was drawn.
END_CASE, END_AT, END_FACTOR = "small_custom", 5, 1.1


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the golden files of Qwen3-TTS.")
    parser.add_argument("--only", help="names of cases, separated by commas; cases.json is then left alone")
    only = parser.parse_args().only
    wanted = set(only.split(",")) if only else {*CASES, "small_end", "codec"}
    torch.set_num_threads(1)
    GOLDEN.mkdir(parents=True, exist_ok=True)
    listed: dict[str, Any] = {}

    with tempfile.TemporaryDirectory() as folder:
        models = Models(Path(folder))
        for name, (checkpoint, request) in CASES.items():
            if name in wanted or (name == END_CASE and "small_end" in wanted):
                made = run(models, checkpoint, request)
                keep(name, made)
                listed[name] = {"checkpoint": checkpoint, "request": request, "frames": len(made["codes"])}
        if "small_end" in wanted:
            checkpoint, request = CASES[END_CASE]
            code = int(np.load(GOLDEN / f"{END_CASE}.npz")["codes"][END_AT, 0])
            ending = checkpoint | {"end_like": [code, END_FACTOR]}
            made = run(models, ending, request)
            assert len(made["codes"]) == END_AT, len(made["codes"])
            keep("small_end", made)
            listed["small_end"] = {"checkpoint": ending, "request": request, "frames": END_AT}
        if "codec" in wanted:
            keep("codec", run_codec(models[BASE]))

    if only is None:
        versions = {package: importlib.metadata.version(package) for package in PACKAGES}
        content = {
            "made_with": versions,
            "sampling": GREEDY | {"repetition_penalty": 1.05},
            "codec": {"checkpoint": BASE},
            "cases": listed,
        }
        (GOLDEN / "cases.json").write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", "utf-8")


class Models:
    """The reference models of the checkpoints asked for, each written and loaded once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.loaded: dict[str, Qwen3TTSModel] = {}

    def __getitem__(self, checkpoint: dict[str, Any]) -> Qwen3TTSModel:
        key = json.dumps(checkpoint)
        if key not in self.loaded:
            path = write_checkpoint(self.folder / str(len(self.loaded)), **checkpoint)
            self.loaded[key] = Qwen3TTSModel.from_pretrained(
                str(path), dtype=torch.float32, attn_implementation="eager"
            )
        return self.loaded[key]


def run(models: Models, checkpoint: dict[str, Any], request: dict[str, Any]) -> dict[str, Any]:
    """What the package makes of one request, and what it passed between its parts on the way."""
    model = models[checkpoint]
    talker_generate, generate = model.model.talker.generate, model.model.generate
    made: dict[str, Any] = {}

    def watch_talker(**arguments: Any) -> Any:
        made["rows"] = arguments["inputs_embeds"][0].numpy()
        made["trailing"] = arguments["trailing_text_hidden"][0].numpy()
        return talker_generate(**arguments)

    def watch(**arguments: Any) -> Any:
        codes, hidden = generate(**arguments)
        made["codes"], made["hidden"] = codes[0].numpy().astype(np.int16), hidden[0].numpy()
        return codes, hidden

    arguments = {k: v for k, v in request.items() if k in ("text", "language", "speaker", "instruct")}
    arguments |= GREEDY | {"non_streaming_mode": request["full"]}
    method = {
        "custom_voice": model.generate_custom_voice,
        "voice_design": model.generate_voice_design,
        "base": model.generate_voice_clone,
    }[checkpoint["variant"]]
    if checkpoint["variant"] == "base":
        (prompt,) = model.create_voice_clone_prompt(
            str(DATA / request["ref_audio"]),
            request.get("ref_text"),
            x_vector_only_mode="ref_text" not in request,
        )
        arguments["voice_clone_prompt"] = [prompt]
        made["speaker"] = prompt.ref_spk_embedding.numpy()
        if prompt.ref_code is not None:
            made["ref_codes"] = prompt.ref_code.numpy().astype(np.int16)
    model.model.talker.generate, model.model.generate = watch_talker, watch
    try:
        waves, rate = method(**arguments)
    finally:
        model.model.talker.generate, model.model.generate = talker_generate, generate
    assert rate == 24000
    made["wave"] = waves[0]
    return made


@torch.inference_mode()
def run_codec(model: Qwen3TTSModel) -> dict[str, Any]:
    codec = model.model.speech_tokenizer.model
    seen: dict[str, torch.Tensor] = {}
    codec.encoder.downsample.register_forward_hook(lambda *a: seen.update(embedding=a[-1]))
    codec.decoder.pre_transformer.register_forward_hook(
        lambda *a: seen.update(latent=a[-1].last_hidden_state)
    )

    voice, rate = librosa.load(DATA / "weasels.wav", sr=None)
    clip = np.round(librosa.resample(voice, orig_sr=rate, target_sr=24000)[:47000] * 32768).astype(np.int16)
    wave = clip.astype(np.float32) / 32768
    clip_codes = model.model.speech_tokenizer.encode(wave, sr=24000).audio_codes[0]
    mel = mel_spectrogram(torch.from_numpy(wave)[None], 1024, 128, 24000, 256, 1024, 0, 12000)[0].T

    codes = np.random.Generator(np.random.PCG64(0)).integers(0, 2048, (200, 16))
    decoded = codec.decoder(torch.from_numpy(codes).T[None])[0, 0]
    return {
        "clip": clip,
        "clip_embedding": seen["embedding"][0].T.numpy(),
        "clip_codes": clip_codes.numpy().astype(np.int16),
        "clip_mel": mel.numpy(),
        "clip_speaker": model.model.extract_speaker_embedding(wave, 24000).numpy(),
        "codes": codes.astype(np.int16),
        "latent": seen["latent"][0].numpy(),
        "wave": decoded.numpy(),
    }


def keep(name: str, made: dict[str, Any]) -> None:
    made["wave"] = (np.round(made["wave"] * 2**16) / 2**16).astype(np.float32)
    np.savez_compressed(GOLDEN / f"{name}.npz", **dict(sorted(made.items())))
    print(
        f"{time.process_time():6.1f} s  {name}  " + "  ".join(f"{k}{list(v.shape)}" for k, v in made.items())
    )
    print(
        f"{'':10}codes {made['codes'][:, 0].tolist()[:14]}  peak {np.abs(made['wave']).max():.3f}", flush=True
    )


if __name__ == "__main__":
    main()
