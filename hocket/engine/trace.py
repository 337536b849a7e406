"""What a worker spends its time on, by PyTorch's profiler: a file for https://ui.perfetto.dev."""

from __future__ import annotations

import torch
from torch.profiler import ProfilerActivity, profile

from hocket.errors import RequestFailed


class Tracer:
    """Records the thread that calls it, and the device that this thread drives. One recording at a time."""

    def __init__(self, device: torch.device) -> None:
        self._activities = [ProfilerActivity.CPU]
        if device.type == "cuda":
            self._activities.append(ProfilerActivity.CUDA)
        self._running: profile | None = None

    def start(self) -> None:
        """Raises RequestFailed if a recording runs."""
        if self._running is not None:
            raise RequestFailed("a recording is running already", code="profile_running")
        running = profile(activities=self._activities)
        running.start()
        self._running = running

    def stop(self, file: str) -> None:
        """End the recording and write it, as a Chrome trace. Raises RequestFailed if none runs."""
        running, self._running = self._running, None
        if running is None:
            raise RequestFailed("no recording is running", code="profile_not_running")
        running.stop()
        running.export_chrome_trace(file)
