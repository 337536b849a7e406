"""A Qwen3-TTS checkpoint of random weights, made where it is used: only its configs are written to disk."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import mkdtemp

import torch
from torch import Tensor

from hocket.core import Job, Sampling, SpeechRequest
from hocket.models.qwen3_tts import synthetic, weights
from hocket.models.qwen3_tts.codec import CodecProgram
from hocket.models.qwen3_tts.config import CODEC_FOLDER, load_codec_config, read_model_config
from hocket.models.qwen3_tts.frontend import QwenTtsFrontEnd
from hocket.models.qwen3_tts.talker import TalkerProgram
from hocket.nn.synthetic import fill

FRAMES = 137  # of every utterance: the work of the published comparison
TEXT = "Each voice fills the other's rests, and so the line goes on."


class RandomTensors(Mapping[str, Tensor]):
    """Tensors drawn when asked for, as `synthetic` draws them."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], device: torch.device) -> None:
        self._shapes, self._device = shapes, device

    def __getitem__(self, name: str) -> Tensor:
        x = fill(name, self._shapes[name], 0, torch.float32, self._device, False)
        if name == "talker.codec_head.weight":
            x[synthetic.CODEC_END] = 0  # far below the 50 best of 2048: never drawn
        return x

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


class Model:
    """Programs and jobs of one size on one device."""

    def __init__(self, size: synthetic.Size, device: torch.device) -> None:
        self.size, self.device = size, device
        self.folder = Path(mkdtemp())
        synthetic.write_checkpoint(self.folder, size="tiny")
        self._config = synthetic.model_config(size, "custom_voice", synthetic.token_ids(self.folder))
        self._codec_config = synthetic.codec_config(size)
        for path, value in ((self.folder, self._config), (self.folder / CODEC_FOLDER, self._codec_config)):
            (path / "config.json").write_text(json.dumps(value))
        self.front = QwenTtsFrontEnd(self.folder)

    def talker(self, dtype: torch.dtype = torch.bfloat16) -> TalkerProgram:
        tensors = RandomTensors(synthetic.model_shapes(self._config), self.device)
        config = read_model_config(self.folder)
        kept = weights.open_tensors
        weights.open_tensors = lambda folder, device: tensors  # type: ignore[assignment]
        try:
            return TalkerProgram(config, weights.load_talker(self.folder, config, self.device, dtype))
        finally:
            weights.open_tensors = kept

    def codec(self, dtype: torch.dtype = torch.bfloat16) -> CodecProgram:
        shapes = synthetic.codec_shapes(self._codec_config)
        tensors = {
            name: fill(name, shape, 0, torch.float32, self.device, False)
            for name, shape in shapes.items()
            if name.startswith("decoder.")
        }
        synthetic._tame(tensors, blocks=len(self._codec_config["decoder_config"]["upsample_rates"]))
        kept = weights.open_tensors
        weights.open_tensors = lambda folder, device: tensors  # type: ignore[assignment]
        try:
            folder = self.folder / CODEC_FOLDER
            return CodecProgram(
                weights.load_codec_decoder(folder, self.device, dtype), load_codec_config(folder)
            )
        finally:
            weights.open_tensors = kept

    def job(self, seed: int, frames: int = FRAMES, temperature: float | None = None) -> Job:
        return self.front.prepare(
            SpeechRequest(
                text=TEXT[: 20 + seed % 40],
                voice="ryan",
                language="English",
                max_frames=frames + 1,
                seed=seed,
                sampling=Sampling(temperature=temperature),
            )
        )
