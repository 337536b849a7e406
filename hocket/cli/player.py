"""Sound to the loudspeaker, through a player that the machine already has."""

from __future__ import annotations

import shutil
import subprocess
from types import TracebackType

from hocket.errors import InvalidRequest

# Each reads raw mono 16-bit PCM from its standard input.
_PLAYERS = {
    "paplay": ["--raw", "--format=s16le", "--channels=1", "--rate={rate}"],
    "aplay": ["-q", "-t", "raw", "-f", "S16_LE", "-c", "1", "-r", "{rate}"],
    "play": ["-q", "-t", "raw", "-e", "signed", "-b", "16", "-c", "1", "-r", "{rate}", "-"],
    "ffplay": ["-loglevel", "error", "-nodisp", "-autoexit", "-f", "s16le", "-ar", "{rate}", "-i", "-"],
}


def find_player() -> str | None:
    """The name of a player that is installed."""
    return next((name for name in _PLAYERS if shutil.which(name)), None)


class Player:
    """Plays what is written to it. A context manager, which ends when all has been heard."""

    def __init__(self, rate_hz: int) -> None:
        name = find_player()
        if name is None:
            raise InvalidRequest(f"--play needs one of {', '.join(_PLAYERS)}; install one, or use -o FILE")
        command = [name, *(part.format(rate=rate_hz) for part in _PLAYERS[name])]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE)

    def write(self, pcm: bytes) -> None:
        """Play 16-bit samples after those before."""
        assert self._process.stdin is not None
        self._process.stdin.write(pcm)
        self._process.stdin.flush()

    def __enter__(self) -> Player:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        if kind is None:
            self._process.stdin.close()
        else:
            self._process.kill()
        self._process.wait()
