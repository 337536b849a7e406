"""What many tests share: tiny checkpoints in the official layout, and the golden files made from them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when kernels are defined: before hocket's imports

from hocket.models.qwen3_tts.synthetic import write_checkpoint

GOLDEN = Path(__file__).parent / "golden" / "qwen3_tts"
DATA = Path(__file__).parent / "data"


@pytest.fixture(scope="session", autouse=True)
def _few_threads() -> None:
    torch.set_num_threads(1)  # tiny models: a second thread costs more than it gives


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Make a tiny checkpoint once per set of options: `checkpoint(variant="base")`."""
    made: dict[str, Path] = {}

    def make(**options: Any) -> Path:
        key = json.dumps(options, sort_keys=True)
        if key not in made:
            if options.get("end_like") is not None:
                options["end_like"] = tuple(options["end_like"])
            made[key] = write_checkpoint(tmp_path_factory.mktemp("checkpoint") / "model", **options)
        return made[key]

    return make


@pytest.fixture(scope="session")
def cases() -> dict[str, Any]:
    """The golden cases: checkpoint options, request and frame count by name."""
    content: dict[str, Any] = json.loads((GOLDEN / "cases.json").read_text("utf-8"))
    return content["cases"]


@pytest.fixture(scope="session")
def golden() -> Callable[[str], dict[str, np.ndarray]]:
    def load(name: str) -> dict[str, np.ndarray]:
        with np.load(GOLDEN / f"{name}.npz") as file:
            return dict(file)

    return load
