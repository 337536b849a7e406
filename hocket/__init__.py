"""hocket: a serving engine for multi-stage speech models.

The names below load what they need when they are first used: `import hocket` alone is instant.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hocket import errors
    from hocket.core import Chat, Media, Message, Reference, Sampling, SpeechRequest
    from hocket.engine.blocking import Engine
    from hocket.engine.client import AsyncEngine

# OpenMP's threads spin while they wait, by default. On a machine that does anything else at all, a frame of
# some 2,000 small operations then takes ten times as long (docs/decisions/0012). Read when torch is loaded,
# so it is set here, before.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "0")

__version__ = "0.1.0"
__all__ = [
    "AsyncEngine",
    "Chat",
    "Engine",
    "Media",
    "Message",
    "Reference",
    "Sampling",
    "SpeechRequest",
    "__version__",
    "errors",
]

_HOMES = {
    "AsyncEngine": "hocket.engine.client",
    "Chat": "hocket.core",
    "Engine": "hocket.engine.blocking",
    "Media": "hocket.core",
    "Message": "hocket.core",
    "Reference": "hocket.core",
    "Sampling": "hocket.core",
    "SpeechRequest": "hocket.core",
}


def __getattr__(name: str) -> Any:
    if name == "errors":
        return importlib.import_module("hocket.errors")
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'hocket' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *_HOMES, "errors"]
