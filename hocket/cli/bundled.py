"""The voice that comes with hocket, for those who named no model."""

from __future__ import annotations

from pathlib import Path

import hocket
from hocket.errors import InvalidRequest

FOLDER = Path(hocket.__file__).parent / "bundled"
NAME = "bundled"  # to clients of a server


def bundled_model() -> str:
    """The folder of the checkpoint in the package. Raises InvalidRequest if this copy came without it."""
    if not (FOLDER / "model.safetensors").is_file():
        raise InvalidRequest(
            "this copy of hocket came without its own voice; name a folder or a model on a hub",
            param="--model",
        )
    return str(FOLDER)
