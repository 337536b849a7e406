"""Where things of the user's own are kept, by the custom of each system."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def data_folder() -> Path:
    """The folder for what must outlive a cache. It may not exist."""
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "hocket"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support" / "hocket"
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "hocket"
