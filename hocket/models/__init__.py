"""One folder per model family. A family is found by name; nothing imports it but its own files."""

from __future__ import annotations

import importlib
import json
import pkgutil
from importlib.metadata import entry_points
from pathlib import Path
from typing import cast

from hocket.core import Family
from hocket.errors import StartupError


def known_families() -> list[str]:
    """Names of the families in the tree and of those installed under the group `hocket.models`."""
    inside = [m.name for m in pkgutil.iter_modules(__path__) if m.ispkg]
    return sorted({*inside, *(e.name for e in entry_points(group="hocket.models"))})


def family_of(folder: Path) -> str:
    """The family name in a checkpoint's config.json (`model_type`, or `architecture`); a version or
    kind that is written behind a family's name is for the family to read."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as e:
        raise StartupError(f"cannot read {path}: {e}; a model folder holds a config.json") from e
    name = str(config.get("model_type") or config.get("architecture") or "")
    known = known_families()
    for family in (name, name.rstrip("0123456789"), name.removesuffix("_moe")):
        if family in known:
            return family
    raise StartupError(f"{path}: model_type {name!r} is not served; known: {', '.join(known)}")


def load_family(name: str) -> Family:
    """The family `name`. Raises StartupError when there is none."""
    for entry in entry_points(group="hocket.models"):
        if entry.name == name:
            return cast(Family, entry.load())
    if name not in known_families():
        raise StartupError(f"model family {name!r} is not known; known: {', '.join(known_families())}")
    return cast(Family, importlib.import_module(f"hocket.models.{name}.family").FAMILY)
