"""Spectrograms of recordings, one above the other: picture.py OUT.png NAME=FILE.wav ..."""

import sys
import wave

import numpy as np
from matplotlib import pyplot as plt

_, out, *named = sys.argv
figure, axes = plt.subplots(len(named), 1, figsize=(9, 2.4 * len(named)), sharex=True, sharey=True, squeeze=False)
for each, (axis,) in zip(named, axes, strict=True):
    name, path = each.split("=", 1)
    with wave.open(path) as f:
        rate = f.getframerate()
        samples = np.frombuffer(f.readframes(f.getnframes()), "<i2") / 32768
    axis.specgram(samples + 1e-7, NFFT=1024, Fs=rate, noverlap=768, vmin=-120, vmax=-35, cmap="magma")
    axis.set_ylabel(f"{name}, Hz")
    axis.set_ylim(0, 8000)
axes[-1][0].set_xlabel("s")
figure.tight_layout()
figure.savefig(out, dpi=64)
