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

HERE = Path(__file__).parent
GOLDEN = HERE / "golden" / "qwen3_tts"
DATA = HERE / "data"
# Tests with processes, browsers or clocks of their own: one at a time, beside the others.
ALONE = (
    "bench/test_real_server.py",
    "cli",
    "engine",
    "models/qwen3_omni/test_parallel.py",
    "models/qwen3_omni/test_whole.py",
    "server/test_clients.py",
    "server/test_overload.py",
    "server/test_real_engine.py",
    "server/test_rounds.py",
    "server/test_voices.py",
    "test_docs.py",
    "web",
)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.pluginmanager.hasplugin("xdist"):
        return
    for item in items:
        if any(item.path.is_relative_to(HERE / place) for place in ALONE):
            item.add_marker(pytest.mark.xdist_group("alone"))


@pytest.fixture(scope="session", autouse=True)
def _few_threads() -> None:
    """Tiny models: a second thread costs more than it gives, and very much more where cores are busy."""
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"  # what workers go by


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
