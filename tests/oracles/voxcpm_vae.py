"""Make tests/golden/voxcpm/vae_*.npz with the published VoxCPM package: its AudioVAE in fp32, one thread.

The weights are those of hocket/models/voxcpm/vae_synthetic.py, which the tests draw again for themselves; the
configs are `CASES` of tests/models/voxcpm/vae_cases.py.

Environment (Python 3.11), apart from hocket's own because the package's full list of dependencies is long:

    python -m venv oracle-venv
    oracle-venv/bin/pip install torch==2.13.0 numpy==2.4.6 transformers==4.57.3 safetensors==0.8.0 \\
        einops==0.8.2 pydantic==2.14.4 librosa==0.11.0 soundfile==0.14.0 sentencepiece==0.2.3 tqdm msgspec
    oracle-venv/bin/pip install --no-deps voxcpm==2.0.3
    PYTHONPATH=. HF_HUB_OFFLINE=1 oracle-venv/bin/python -P tests/oracles/voxcpm_vae.py

An empty module stands in for torchaudio, which only prompts of the first generation use.

vae_<case>.npz
    clip        int16   [n]          at the config's sample_rate, to be divided by 32768; not whole patches
    reference   float32 [p, s, d]    latents of the clip padded at its end; s frames a patch
    prompt      float32 [p, s, d]    ... and at its beginning
    latents     float32 [t, d]       drawn
    wave        float32 [t * hop]    decoded in one pass

Waves are rounded to 2^-20, which takes a quarter off the files.
"""

from __future__ import annotations

import importlib.machinery
import sys
import tempfile
import types
from pathlib import Path

import librosa
import numpy as np
import soundfile
import torch
import transformers  # noqa: F401  must look for torchaudio before the stand-in is there

sys.modules["torchaudio"] = types.ModuleType("torchaudio")
sys.modules["torchaudio"].__spec__ = importlib.machinery.ModuleSpec("torchaudio", None)

from voxcpm.model.voxcpm2 import VoxCPM2Model  # noqa: E402
from voxcpm.modules.audiovae import AudioVAE, AudioVAEConfig, AudioVAEConfigV2, AudioVAEV2  # noqa: E402

from hocket.models.voxcpm.vae import VaeConfigV2  # noqa: E402
from hocket.models.voxcpm.vae_synthetic import random_vae  # noqa: E402
from tests.models.voxcpm.vae_cases import CASES, Case  # noqa: E402

TESTS = Path(__file__).resolve().parents[1]
DATA, GOLDEN = TESTS / "data", TESTS / "golden" / "voxcpm"


def main() -> None:
    torch.set_num_threads(1)
    GOLDEN.mkdir(parents=True, exist_ok=True)
    for name, case in CASES.items():
        run(name, case)


@torch.inference_mode()
def run(name: str, case: Case) -> None:
    c = case.config
    values = {field: getattr(c, field) for field in c.__struct_fields__}
    if isinstance(c, VaeConfigV2):
        vae = AudioVAEV2(AudioVAEConfigV2(**values))
    else:
        vae = AudioVAE(AudioVAEConfig(**values))
    vae.load_state_dict(random_vae(c, seed=0))
    vae.eval()

    voice, rate = librosa.load(DATA / "weasels.wav", sr=None)
    voice = librosa.resample(voice, orig_sr=rate, target_sr=c.sample_rate)
    clip = np.round(voice[c.sample_rate // 2 :][: case.samples] * 32768).astype(np.int16)
    latents = np.random.Generator(np.random.PCG64(0)).standard_normal((case.frames, c.latent_dim))
    z = torch.from_numpy(latents.astype(np.float32))
    # Both generations pad alike; the second's function also says on which side.
    model = types.SimpleNamespace(
        _encode_sample_rate=c.sample_rate, patch_size=case.patch_size, chunk_size=vae.chunk_size,
        audio_vae=vae, device="cpu",
    )  # fmt: skip
    made = {"clip": clip, "latents": z.numpy(), "wave": vae.decode(z.t()[None])[0, 0].numpy()}
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/clip.wav"
        soundfile.write(path, clip, c.sample_rate, subtype="PCM_16")
        for kind, side in (("reference", "right"), ("prompt", "left")):
            made[kind] = VoxCPM2Model._encode_wav(model, path, side).contiguous().numpy()
    vae.double()
    wide = vae.decode(z.double().t()[None])[0, 0].numpy()
    samples = torch.from_numpy(clip / 32768.0)[None]
    mu = vae.encode(samples, c.sample_rate)[0].t().numpy()
    same = len(clip) // vae.chunk_size  # frames before the padding, which is not the same
    errors = (
        np.abs(made["wave"] - wide),
        np.abs(made["reference"].reshape(-1, c.latent_dim)[:same] - mu[:same]),
    )
    peak, wave, latent = np.abs(made["wave"]).max(), errors[0].max(), errors[1].max()
    print(f"{name}: peak {peak:.3f}; fp32 from float64: wave {wave:.1e}, latents {latent:.1e}")
    made["wave"] = (np.round(made["wave"] * 2**20) / 2**20).astype(np.float32)
    np.savez_compressed(GOLDEN / f"vae_{name}.npz", **dict(sorted(made.items())))


if __name__ == "__main__":
    main()
