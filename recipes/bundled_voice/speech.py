"""The teachers' speech on the training device, growing as shards appear."""

import json
import zlib
from pathlib import Path

import numpy as np
import torch
from teachers import LABEL_HZ, RATE
from torch import Tensor

FRAME = 1920
PHONES_PER_FRAME = FRAME // (RATE // LABEL_HZ)


class Speech:
    """All utterances, one after another: samples and, once they are given, codes."""

    def __init__(self, folder: Path, device, hours: float, part: tuple[int, int] = (0, 1)):
        """part (i, n): of the shards, only every n-th, chosen by name."""
        self.folder, self.device, self.part, self.seen = folder, device, part, set()
        self.wave = torch.zeros(int(hours * 3600 * RATE), dtype=torch.int16, device=device)
        # The phone and the phoneme character at every 20 ms.
        self.label, self.mark = (torch.zeros(int(hours * 3600 * LABEL_HZ), dtype=kind, device=device) for kind in (torch.int8, torch.int16))
        self.codes: Tensor | None = None
        self.samples = self.labels = self.frames = 0
        self.start, self.length, self.label_start, self.label_length, self.frame_start, self.rows = [], [], [], [], [], []

    def refresh(self) -> list[int]:
        """Read new shards. -> the new utterances"""
        before = len(self.rows)
        for path in sorted(self.folder.glob("*.npz")):
            if path.name in self.seen or zlib.crc32(path.name.encode()) % self.part[1] != self.part[0]:
                continue
            with np.load(path) as f:
                wave, label, mark = f["wave"], f["label"], f["mark"]
                if self.samples + len(wave) > len(self.wave) or self.labels + len(label) > len(self.label):
                    break
                self.seen.add(path.name)
                self.wave[self.samples : self.samples + len(wave)] = torch.from_numpy(wave).to(self.device)
                self.label[self.labels : self.labels + len(label)] = torch.from_numpy(label).to(self.device)
                self.mark[self.labels : self.labels + len(mark)] = torch.from_numpy(mark).to(self.device)
                for n, m, row in zip(f["samples"], f["labels"], json.loads(str(f["rows"])), strict=True):
                    self.start.append(self.samples), self.length.append(int(n))
                    self.label_start.append(self.labels), self.label_length.append(int(m))
                    self.frame_start.append(self.frames), self.rows.append(row)
                    self.samples, self.labels, self.frames = self.samples + int(n), self.labels + int(m), self.frames + -(-int(n) // FRAME)
        if len(self.rows) > before:
            voices: dict[str, int] = {}
            for row, n in zip(self.rows, self.length, strict=True):
                voices[row[1]] = voices.get(row[1], 0) + n
            self.voices = {v: round(n / RATE / 3600, 2) for v, n in voices.items()}
            weight = [n / voices[row[1]] ** 0.6 for row, n in zip(self.rows, self.length, strict=True)]
            as_tensor = lambda x, kind: torch.tensor(x, dtype=kind, device=self.device)
            self.tensors = [
                as_tensor(x, torch.int64) for x in (self.start, self.length, self.label_start, self.label_length, self.frame_start)
            ]
            self.weight = as_tensor(weight, torch.float64).cumsum(0)
        return list(range(before, len(self.rows)))

    def keep(self, codes: dict[int, Tensor]) -> None:
        """Take the codes int16 [frames, books] of new utterances."""
        if self.codes is None:
            books = next(iter(codes.values())).shape[1]
            self.codes = torch.zeros(len(self.wave) * 21 // (20 * FRAME), books, dtype=torch.int16, device=self.device)
        for i, c in codes.items():
            self.codes[self.frame_start[i] : self.frame_start[i] + len(c)] = c

    def draw(self, b: int, frames: int) -> tuple[Tensor, Tensor]:
        """b utterances by their length, and a first frame in each such that `frames` fit if they can. -> int64 [b] each"""
        i = torch.searchsorted(self.weight, torch.rand(b, device=self.device, dtype=torch.float64) * self.weight[-1])
        i = i.clamp(max=len(self.weight) - 1)
        room = ((self.tensors[1][i] + FRAME - 1) // FRAME - frames).clamp(min=0)
        return i, (torch.rand(b, device=self.device) * (room + 1)).long()

    def crop(self, i: Tensor, first: Tensor, frames: int) -> Tensor:
        """-> fp32 [b, 1920 frames] from frame `first`; zeros past the end."""
        start, length = self.tensors[0][i][:, None], self.tensors[1][i][:, None]
        at = first[:, None] * FRAME + torch.arange(frames * FRAME, device=self.device)
        inside = (at >= 0) & (at < length)
        return self.wave[start + at.clamp(min=0).minimum(length - 1)].float() / 32768 * inside

    def phones(self, i: Tensor, first: Tensor, frames: int) -> Tensor:
        """-> int64 [b, 4 frames]; -1 past the end."""
        start, length = self.tensors[2][i][:, None], self.tensors[3][i][:, None]
        at = first[:, None] * PHONES_PER_FRAME + torch.arange(frames * PHONES_PER_FRAME, device=self.device)
        return torch.where(at < length, self.label[start + at.minimum(length - 1)].long(), -1)

    def crop_codes(self, i: Tensor, first: Tensor, frames: int) -> Tensor:
        """-> int16 [b, frames, books]; past the end, the last frame again."""
        last = (self.tensors[1][i] - 1) // FRAME
        at = (first[:, None] + torch.arange(frames, device=self.device)).minimum(last[:, None])
        return self.codes[self.tensors[4][i][:, None] + at]
