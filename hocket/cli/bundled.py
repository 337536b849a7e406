"""A model for those who named none: tiny, made on the spot, and without a trained voice."""

from __future__ import annotations

import importlib
import os
import shutil
import sys
import tempfile
from pathlib import Path

import hocket
from hocket.cli.report import note

MAX_FRAMES = 64  # its voice does not know when to stop
OVERRIDES = {"threads": "1"}  # so small that a second thread costs more than it gives


def sample_model() -> Path:
    """The folder of the sample model, written to the user's cache the first time."""
    # TODO(0.2): a small trained model that comes with the package.
    note("no --model given: a tiny untrained model speaks, so this is noise and not a voice")
    folder = _cache() / f"sample-{hocket.__version__}"
    if not folder.is_dir():
        synthetic = importlib.import_module("hocket.models.qwen3_tts.synthetic")
        folder.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix="sample-", dir=folder.parent))
        synthetic.write_checkpoint(made, size="tiny", variant="custom_voice")
        try:
            made.rename(folder)
        except OSError:  # another process was faster
            shutil.rmtree(made)
            if not folder.is_dir():
                raise
    return folder


def _cache() -> Path:
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or str(Path.home() / "AppData" / "Local")
    else:
        base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "hocket"
