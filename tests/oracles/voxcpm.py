"""Make the golden files of tests/golden/voxcpm with the published implementation.

Runs in an environment of its own (Python 3.11), because the package pins an old transformers:

    python -m venv voxcpm-venv
    voxcpm-venv/bin/pip install torch==2.13.0 numpy==2.4.6 transformers==4.57.3 safetensors==0.8.0 \\
        einops==0.8.2 pydantic==2.14.4 librosa==0.11.0 soundfile tokenizers sentencepiece tqdm msgspec
    voxcpm-venv/bin/pip install --no-deps voxcpm==2.0.3
    PYTHONPATH=. HF_HUB_OFFLINE=1 voxcpm-venv/bin/python tests/oracles/voxcpm.py

An empty module stands in for torchaudio, and another for the vocoder, whose golden files are made apart: but
for `whole`, recordings are given as latents, drawn for each case.

cases.json  per case: checkpoint (arguments of write_checkpoint), LoRA, request, patches made; versions used

<case>.npz
    ids        int32   [t]                 of transcript and text together
    reference  float32 [n, patch, feat]    recording before the text, where there is one
    prompt     float32 [m, patch, feat]    recording to go on from, where there is one
    noise      float32 [k, patch, feat]    drawn by the package for each patch
    latents    float32 [k, patch, feat]    patches made
    stops      float32 [k, 2]              stop logits

whole.npz   all stages, from recording to sound: noise, and wave float32 [k * 7680], rounded to 2^-16

times.npz   <dtype>_<steps> float32 [calls, d]  embedding of each time that an estimate is made for
"""

from __future__ import annotations

import importlib.machinery
import importlib.metadata
import json
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

sys.modules["torchaudio"] = types.ModuleType("torchaudio")
sys.modules["torchaudio"].__spec__ = importlib.machinery.ModuleSpec("torchaudio", None)

from safetensors.torch import load_file  # noqa: E402
from voxcpm.model import voxcpm as first  # noqa: E402
from voxcpm.model import voxcpm2 as second  # noqa: E402

from hocket.models.voxcpm.synthetic import write_checkpoint, write_lora  # noqa: E402

TESTS = Path(__file__).resolve().parents[1]
DATA, GOLDEN = TESTS / "data", TESTS / "golden" / "voxcpm"
PACKAGES = ["voxcpm", "transformers", "torch", "numpy", "tokenizers"]
ENDLESS = {"least": 50, "most": 7}  # as many patches as `most` says, whatever the stop logits are
SAID = "今天天气不错，"

V2: dict[str, Any] = {"size": "tiny"}
V1: dict[str, Any] = {"size": "tiny-0.5b"}
ALL, SOME = {"rank": 4, "seed": 1, "parts": "lm dit proj"}, {"rank": 3, "seed": 2, "parts": "lm"}

# name: checkpoint, LoRA, request. `reference` and `prompt` are numbers of patches.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any] | None, dict[str, Any]]] = {
    "zero_shot": (V2, None, {"text": "Hello 你好世界, the other voice.", **ENDLESS}),
    "design": (V2, None, {"text": "(a low voice)Over there.", **ENDLESS, "guidance": 1.5, "steps": 6}),
    "many_steps": (V2, None, {"text": "Rests, too.", "least": 50, "most": 2, "guidance": 3.0, "steps": 50}),
    "reference": (V2, None, {"text": "你好。", "reference": 5, **ENDLESS}),
    "continuation": (V2, None, {"text": "我们说话。", "said": SAID, "prompt": 6, **ENDLESS}),
    "both": (V2, None, {"text": "Each voice.", "said": "One two, ", "reference": 4, "prompt": 3, **ENDLESS}),
    "stops": (V2, None, {"text": "A short one.", "least": 2, "most": 40}),
    "mup": (V2 | {"use_mup": True}, None, {"text": "你好。", "said": SAID, "prompt": 2, **ENDLESS}),
    "lora_all": (V2, ALL, {"text": "Hello over there.", **ENDLESS}),
    "lora_some": (V2, SOME, {"text": "你好。", "reference": 3, **ENDLESS}),
    "first_zero_shot": (V1, None, {"text": "Hello 你好世界, the other voice.", **ENDLESS}),
    "first_continuation": (V1, None, {"text": "我们说话。", "said": SAID, "prompt": 6, **ENDLESS}),
    "first_mup": (V1 | {"use_mup": True}, None, {"text": "Over.", "said": SAID, "prompt": 5, **ENDLESS}),
}


WHOLE = {
    "said": "Weasels have eaten our phone system.",
    "text": " Over there.",
    "recording": "weasels.wav",
    **ENDLESS,
}


class NoVocoder(torch.nn.Module):
    """What the model asks of its vocoder; latents pass through."""

    chunk_size, decode_chunk_size, sample_rate, out_sample_rate = 640, 1920, 16000, 48000

    def __init__(self, latent_dim: int) -> None:
        super().__init__()
        self.latent_dim = latent_dim

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        return latents[:, :1]


def load(folder: Path, lora: Path | None) -> Any:
    config = json.loads((folder / "config.json").read_text("utf-8"))
    module = second if config["architecture"] == "voxcpm2" else first
    kind = module.VoxCPM2Model if module is second else module.VoxCPMModel
    adapter = None
    if lora is not None:
        adapter = module.LoRAConfig(
            **json.loads((lora / "lora_config.json").read_text("utf-8"))["lora_config"]
        )
    parsed = module.VoxCPMConfig.model_validate(config | {"audio_vae_config": None})
    tokenizer = transformers.LlamaTokenizerFast.from_pretrained(folder)
    model = kind(parsed, tokenizer, NoVocoder(parsed.feat_dim), adapter, device="cpu")
    missing, unexpected = model.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
    assert not unexpected, unexpected
    assert all(".lora_" in name for name in missing), missing
    if lora is not None:
        _, skipped = model.load_lora_weights(str(lora))
        assert not skipped, skipped
    return model.eval()


def run(model: Any, request: dict[str, Any], seed: int) -> dict[str, np.ndarray]:
    """The package's own generation, with what it draws and decides on the way recorded."""
    g = torch.Generator().manual_seed(seed)
    shape = (model.config.patch_size, model.config.feat_dim)
    cache: dict[str, Any] = {}
    if "reference" in request:
        cache["ref_audio_feat"] = torch.randn(request["reference"], *shape, generator=g)
    if "prompt" in request:
        cache |= {
            "prompt_text": request["said"],
            "audio_feat": torch.randn(request["prompt"], *shape, generator=g),
        }
    if cache:
        mode = "continuation" if "ref_audio_feat" not in cache else "reference"
        cache["mode"] = "ref_continuation" if len(cache) == 3 else mode
    noise, stops = [], []
    draw = torch.randn

    def recorded(*a: Any, **k: Any) -> torch.Tensor:
        noise.append(draw(*a, **k, generator=g))
        return noise[-1]

    hook = model.stop_head.register_forward_hook(lambda _, __, out: stops.append(out[0].clone()))
    torch.randn = recorded
    try:
        _, _, latents = next(
            model._generate_with_prompt_cache(
                request["text"], cache or None, min_len=request["least"], max_len=request["most"],
                inference_timesteps=request.get("steps", 10), cfg_value=request.get("guidance", 2.0),
            )
        )  # fmt: skip
    finally:
        torch.randn = draw
        hook.remove()
    out = {
        "ids": np.array(model.text_tokenizer(request.get("said", "") + request["text"]), np.int32),
        "noise": torch.cat(noise).transpose(1, 2).numpy(),
        "latents": latents.reshape(-1, *shape)[
            -len(noise) :
        ].numpy(),  # the first package puts prompt patches in front
        "stops": torch.stack(stops).numpy(),
    }
    if "reference" in request:
        out["reference"] = cache["ref_audio_feat"].numpy()
    if "prompt" in request:
        out["prompt"] = cache["audio_feat"].numpy()
    assert len(out["noise"]) == len(out["latents"]) == len(out["stops"])
    return out


def whole(folder: Path, request: dict[str, Any]) -> dict[str, np.ndarray]:
    """Speech in a recorded voice, with all files of the checkpoint as the package loads them."""
    model = second.VoxCPM2Model.from_local(str(folder), optimize=False, device="cpu")
    recording = str(DATA / request["recording"])
    noise, draw, g = [], torch.randn, torch.Generator().manual_seed(99)

    def recorded(*a: Any, **k: Any) -> torch.Tensor:
        noise.append(draw(*a, **k, generator=g))
        return noise[-1]

    torch.randn = recorded
    try:
        wave = model.generate(
            request["text"], prompt_text=request["said"],
            prompt_wav_path=recording, reference_wav_path=recording,
            min_len=request["least"], max_len=request["most"],
        )  # fmt: skip
    finally:
        torch.randn = draw
    rounded = (wave.flatten() * 65536).round() / 65536
    return {"noise": torch.cat(noise).transpose(1, 2).numpy(), "wave": rounded.numpy()}


def times(model: Any) -> dict[str, np.ndarray]:
    """Embeddings of the times that the solver asks for, with the model in each dtype."""
    out = {}
    estimator = model.feat_decoder.estimator
    for dtype in (torch.float32, torch.bfloat16):
        solver = model.feat_decoder.to(dtype)
        for steps in (4, 10, 50):
            asked: list[torch.Tensor] = []

            def estimate(x: Any, mu: Any, t: Any, cond: Any, dt: Any, asked: Any = asked) -> torch.Tensor:
                time = estimator.time_mlp(estimator.time_embeddings(t).to(x.dtype))
                asked.append(time[0] + estimator.delta_time_mlp(estimator.time_embeddings(dt).to(x.dtype))[0])
                return torch.zeros_like(x)

            solver.estimator = torch.nn.Module()
            solver.estimator.forward = estimate
            mu, cond = torch.zeros(1, 2, dtype=dtype), torch.zeros(1, solver.in_channels, 4, dtype=dtype)
            solver(mu=mu, n_timesteps=steps, patch_size=4, cond=cond, cfg_value=2.0)
            solver.estimator = estimator
            out[f"{str(dtype).removeprefix('torch.')}_{steps}"] = torch.stack(asked).detach().float().numpy()
    return out


def main() -> None:
    torch.set_num_threads(1)
    GOLDEN.mkdir(parents=True, exist_ok=True)
    described: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for seed, (name, (checkpoint, lora, request)) in enumerate(CASES.items()):
            folder = write_checkpoint(Path(scratch) / name, **checkpoint)
            adapter = None
            if lora is not None:
                adapter = write_lora(
                    folder / "lora" / "x", json.loads((folder / "config.json").read_text()), **lora
                )
            model = load(folder, adapter)
            arrays = run(model, request, seed)
            np.savez_compressed(GOLDEN / f"{name}.npz", **arrays)
            described[name] = {"checkpoint": checkpoint, "lora": lora, "request": request}
            print(name, len(arrays["latents"]), np.abs(arrays["latents"]).max(), arrays["stops"].argmax(1))
            if name == "zero_shot":
                np.savez_compressed(GOLDEN / "times.npz", **times(model))
        made = write_checkpoint(Path(scratch) / "whole", **V2)
        arrays = whole(made, WHOLE)
        np.savez_compressed(GOLDEN / "whole.npz", **arrays)
        print("whole", len(arrays["noise"]), arrays["wave"].shape, np.abs(arrays["wave"]).max())
    versions = {package: importlib.metadata.version(package) for package in PACKAGES}
    content = {"versions": versions, "cases": described, "whole": WHOLE}
    (GOLDEN / "cases.json").write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", "utf-8")


if __name__ == "__main__":
    main()
