import pytest
from hypothesis import given
from hypothesis import strategies as st

from hocket.runtime.playback import CHUNK_FRAMES, MARGIN_S, PlaybackClock, chunk_frames, counted_frames

FRAME_S = 0.08


def frames(pending: int, slack_s: float | None, *, ended: bool = False, first: int = 0) -> int:
    return chunk_frames(pending, ended=ended, first=first, slack_s=slack_s, frame_s=FRAME_S, largest=32)


@pytest.mark.parametrize(
    ("pending", "slack_s", "ended", "first", "expected"),
    [
        pytest.param(1, None, False, 0, 1, id="the first frame goes out at once"),
        pytest.param(3, None, False, 4, 0, id="unless more were asked for"),
        pytest.param(4, None, False, 4, 4, id="and they are there"),
        pytest.param(1, 0.1, False, 0, 1, id="no slack: what is there goes out"),
        pytest.param(7, -1.0, False, 0, 1, id="behind: smallest chunk, soonest sound"),
        pytest.param(5, 1.0, False, 0, 0, id="slack: wait for a larger chunk"),
        pytest.param(10, 1.0, False, 0, 8, id="slack: the larger chunk is there"),
        pytest.param(3, 9.0, True, 0, 2, id="at the end nothing is waited for"),
        pytest.param(0, 9.0, True, 0, 0, id="nothing to decode"),
        pytest.param(99, 9.0, False, 0, 32, id="never more than a step is made for"),
    ],
)
def test_chunk_size(pending: int, slack_s: float | None, ended: bool, first: int, expected: int) -> None:
    assert frames(pending, slack_s, ended=ended, first=first) == expected


@given(st.integers(0, 200), st.none() | st.floats(-5, 60), st.booleans(), st.integers(0, 40))
def test_chunk_is_made_of_pending_frames_and_of_a_known_size(
    pending: int, slack_s: float | None, ended: bool, first: int
) -> None:
    count = frames(pending, slack_s, ended=ended, first=first)
    assert count <= pending
    assert count in (0, *CHUNK_FRAMES)
    if ended and pending:
        assert count > 0


@given(st.floats(0, 30), st.integers(1, 64))
def test_waiting_at_real_time_speed_never_runs_a_listener_dry(slack_s: float, pending: int) -> None:
    """Frames come at the slowest tolerable speed, one each frame time: the wait leaves the margin."""
    waited = 0.0
    while not frames(pending, slack_s - waited):
        waited += FRAME_S
        pending += 1
    assert waited == 0 or slack_s - waited >= MARGIN_S - FRAME_S


@given(st.floats(0, 30), st.integers(1, 64), st.floats(0.001, 1))
def test_waiting_at_half_the_speed_seen_leaves_half_of_the_slack(
    slack_s: float, pending: int, pace_s: float
) -> None:
    waited, wait_s = 0.0, min(FRAME_S, 2 * pace_s)
    left = min(MARGIN_S, slack_s / 2)
    while not chunk_frames(
        pending, ended=False, first=0, slack_s=slack_s - waited, frame_s=FRAME_S, largest=32, pace_s=pace_s
    ):
        waited += wait_s
        pending += 1
    assert waited == 0 or slack_s - waited >= left - wait_s


def test_a_fast_talker_has_its_chunks_grow_from_the_second_on() -> None:
    """10 ms a frame: 16 frames in five chunks, where trust in real time alone gives five of one frame."""
    made, heard, now, sizes = 1, 0, 0.0, []
    while sum(sizes) < 30:
        slack = 0.08 * heard - now if heard else None
        count = chunk_frames(
            made - heard, ended=False, first=0, slack_s=slack, frame_s=FRAME_S, largest=8, pace_s=0.01
        )
        if count:
            sizes.append(count)
            heard += count
        else:
            now += 0.01
            made += 1
    assert sizes[:5] == [1, 1, 2, 4, 8]


def test_slack_is_audio_in_hand() -> None:
    clock = PlaybackClock()
    assert clock.slack(5.0) == 0
    clock.deliver(0.08, 10.0)
    clock.deliver(1.0, 10.5)
    assert clock.slack(11.0) == pytest.approx(0.08)
    assert clock.worst_underrun_s == pytest.approx(0.42)


def counted(arrivals: list[int], first: int) -> list[int]:
    """Chunks of a stream whose frames come in the groups `arrivals`, decoded as soon as they may be."""
    sizes: list[int] = []
    pending = 0
    for n, group in enumerate(arrivals, 1):
        pending += group
        while count := counted_frames(
            pending, ended=n == len(arrivals), first=first, decoded=sum(sizes), largest=32
        ):
            sizes.append(count)
            pending -= count
    return sizes


@given(st.lists(st.integers(0, 12), min_size=1, max_size=30), st.integers(0, 9))
def test_counted_chunks_do_not_depend_on_when_frames_come(arrivals: list[int], first: int) -> None:
    total = sum(arrivals)
    assert counted(arrivals, first) == counted([total], first) == counted([1] * total + [0], first)


@given(st.integers(1, 300))
def test_counted_chunks_leave_nobody_waiting_at_four_fifths_of_real_time(total: int) -> None:
    heard_until = 0.0
    made = 0
    for size in counted([total], 0):
        made += size
        at = 0.8 * made  # frame durations since the start
        if heard_until:
            assert at <= heard_until + 1e-9
            heard_until += size
        else:
            heard_until = at + size
