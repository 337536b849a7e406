"""The listener's clock: how much audio a stream has in hand, and how large its next chunk may be.

A listener starts to play at the first audio and plays in real time. Slack is the audio delivered
minus the time since then: a stream with slack can wait, one without is about to fall silent.
"""

from __future__ import annotations

from dataclasses import dataclass

CHUNK_FRAMES = (1, 2, 4, 8, 16, 32)  # sizes a codec step is made for; few, so that streams share a batch
MARGIN_S = 0.25  # audio left when the next chunk should be ready; covers scheduling and the network


@dataclass(slots=True)
class PlaybackClock:
    """What one listener has been given, and since when it plays. All in seconds."""

    delivered_s: float = 0.0
    started_at: float | None = None
    worst_underrun_s: float = 0.0

    def deliver(self, seconds: float, now: float) -> None:
        """Count audio given to the listener at time `now`, in seconds of any monotonic clock."""
        if self.started_at is None:
            self.started_at = now
        self.worst_underrun_s = max(self.worst_underrun_s, -self.slack(now))
        self.delivered_s += seconds

    def slack(self, now: float) -> float:
        """Seconds of audio in hand; 0 before the first audio, negative while the listener waits."""
        return 0.0 if self.started_at is None else self.delivered_s - (now - self.started_at)


def chunk_frames(
    pending: int,
    *,
    ended: bool,
    first: int,
    slack_s: float | None,
    frame_s: float,
    largest: int,
    pace_s: float | None = None,
) -> int:
    """Frames the codec should decode now for a stream with `pending` frames; 0 to wait for more.

    first: size wanted for the first chunk. slack_s: None before the first chunk. pace_s: how long a frame of
    this stream has taken to come so far, None when that is not known. The size wanted grows with slack, as
    far as waiting for that many frames, at half the speed seen or in real time, whichever is faster, leaves
    half of the slack in hand, or `MARGIN_S`. What is decoded is a size of `CHUNK_FRAMES` no larger than
    `pending`; at the end of a stream nothing is waited for.
    """
    if pending == 0:
        return 0
    if slack_s is None:
        wanted = max(1, first)
    else:
        wait_s = frame_s if pace_s is None else min(frame_s, 2 * pace_s)
        wanted = max(1, int((slack_s - min(MARGIN_S, slack_s / 2)) / max(wait_s, 1e-6)))
    wanted = min(wanted, largest)
    if pending < wanted and not ended:
        return 0
    limit = min(pending, largest) if ended else min(pending, max(wanted, 1))
    return max(n for n in CHUNK_FRAMES if n <= limit)


def counted_frames(pending: int, *, ended: bool, first: int, decoded: int, largest: int) -> int:
    """As `chunk_frames`, but a function of the `decoded` frames alone, whatever the clock says.

    Rounding in a codec depends on how many frames share a step, so equal samples to the last bit need
    equal chunks. A quarter of what was decoded, 8 frames at most, leaves no listener waiting as long as
    a frame takes no more than 0.8 of its duration.
    """
    wanted = min(max(1, decoded // 4), 8) if decoded else max(1, first)
    wanted = min(wanted, largest)
    if pending == 0 or (pending < wanted and not ended):
        return 0
    return max(n for n in CHUNK_FRAMES if n <= min(wanted, pending))
