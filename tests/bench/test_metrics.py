from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hocket.bench.metrics import (
    Heard,
    Trace,
    Window,
    blocks,
    columns,
    heard,
    spread,
    steady,
    summarise,
    whole,
)

# (arrivals, seconds of sound) -> TTFP, smooth start, underruns, silence, longest silence
HEARD = {
    "one packet": ([0.5], [2.0], Heard(0.5, 0.5, 0, 0.0, 0.0)),
    "always in time": ([0.1, 0.2, 0.3], [1.0, 1.0, 1.0], Heard(0.1, 0.1, 0, 0.0, 0.0)),
    "just in time": ([0.25, 0.75, 1.25], [0.5, 0.5, 0.5], Heard(0.25, 0.25, 0, 0.0, 0.0)),
    "late once": ([0.5, 2.0, 2.5], [0.5, 2.0, 1.0], Heard(0.5, 1.5, 1, 1.0, 1.0)),
    "late twice": ([0.5, 1.5, 3.0], [0.5, 0.5, 0.5], Heard(0.5, 2.0, 2, 1.5, 1.0)),
    "a silence is waited out once": ([0.0, 1.0, 1.25], [0.5, 0.5, 0.5], Heard(0.0, 0.5, 1, 0.5, 0.5)),
    "first chunk of one frame, the next 25 later": (
        [0.0625, 0.5625, 1.0],
        [0.0625, 2.0, 2.0],
        Heard(0.0625, 0.5, 1, 0.4375, 0.4375),
    ),
    "below what anyone hears": ([0.0, 0.5001220703125], [0.5, 0.5], Heard(0.0, 2**-13, 0, 2**-13, 2**-13)),
}


@pytest.mark.parametrize(("times", "audio_s", "result"), HEARD.values(), ids=HEARD)
def test_listener_hears(times: list[float], audio_s: list[float], result: Heard) -> None:
    assert heard(times, audio_s) == result


packets = st.lists(st.tuples(st.integers(0, 50), st.integers(1, 50)), min_size=1, max_size=20)


def played(times: list[float], audio_s: list[float], delay: float) -> list[float]:
    """The silences of a player that begins after `delay`, sample clock in hand."""
    at, silences = delay, []
    for time, seconds in zip(times, audio_s, strict=True):
        if time > at:
            silences.append(time - at)
            at = time
        at += seconds
    return silences


@given(packets)
def test_smooth_start_is_the_least_delay_without_a_silence(steps: list[tuple[int, int]]) -> None:
    times = np.cumsum([step for step, _ in steps]) / 64
    audio_s = [seconds / 64 for _, seconds in steps]
    one = heard(times, audio_s)
    assert played(list(times), audio_s, one.smooth_start_s) == []
    assert played(list(times), audio_s, one.smooth_start_s - 1 / 64)
    silences = played(list(times), audio_s, one.ttfp_s)
    assert (one.underruns, one.silence_s) == (len(silences), sum(silences))
    assert one.longest_silence_s == max(silences, default=0.0)


def test_percentile_is_a_value_that_occurred() -> None:
    found = spread(range(1, 102))
    assert (found.n, found.mean, found.p50, found.p90, found.p99, found.max) == (101, 51, 51, 91, 100, 101)
    assert spread([3.0, 1.0]).p99 == 3.0
    assert spread([]) is None


def trace(due: float, *packets: tuple[float, int], ended: float, client: int = 0, **more: object) -> Trace:
    """Packets of (time after due, samples of 1 kHz mono)."""
    times, samples = [due + t for t, _ in packets], [2 * n for _, n in packets]
    return Trace(due, due, client, 10, times, samples, 2000.0, ended, **more)


def test_window_leaves_out_the_first_burst_and_the_last_stragglers() -> None:
    runs = [
        trace(10.0 + n + 0.5 * c, (0.5, 1000), ended=11.0 + n + 0.5 * c, client=c)
        for c in (0, 1)
        for n in range(4)
    ]
    window = steady(runs, 10.0, 14.0, 2)
    assert (window.start_s, window.end_s) == (1.5, 4.0)
    found = summarise(runs, columns(runs, 10.0), 10.0, window)
    assert found.requests == 5  # due at 1.5, 2, 2.5, 3 and 3.5 s
    assert found.req_s == 6 / 2.5  # ended at 1.5, 2, 2.5, … 4 s
    assert found.audio_s_per_s == 6 / 2.5  # packets at 1.5, 2, … 4 s
    assert found.in_flight == 2.0
    everything = summarise(runs, columns(runs, 10.0), 10.0, whole(runs, 10.0))
    assert (everything.requests, everything.req_s) == (8, 8 / 4.5)


def test_request_that_a_timer_sent_early_is_counted() -> None:
    runs = [trace(9.875, (0.5, 1000), ended=11.0), trace(10.0, (0.5, 1000), ended=11.0)]
    found = summarise(runs, columns(runs, 10.0), 10.0, whole(runs, 10.0))
    assert (found.requests, found.req_s) == (2, 2 / 1.125)


def test_short_run_is_taken_whole() -> None:
    runs = [trace(10.0, (0.5, 1000), ended=11.0, client=c) for c in range(3)]
    window = steady(runs, 10.0, 11.0, 3)
    assert (window.start_s, window.end_s) == (0.0, 1.0)
    assert window.rule.startswith("too short")


def test_summary_of_known_packets() -> None:
    runs = [
        trace(0.0, (0.25, 500), (1.0, 500), ended=1.0),  # 0.25 s silent
        trace(1.0, (0.5, 500), (0.75, 1500), ended=2.0),
        trace(2.0, (0.25, 500), (0.8125, 500), ended=3.0, client=1),  # 0.0625 s silent: continuous
        trace(3.0, ended=3.5, client=2, failure="HTTP 503", retry_after_s=2.0),
        trace(3.0, ended=3.5, client=2, failure="HTTP 503", retry_after_s=5.0),
        trace(3.25, (0.5, 10), ended=3.75, client=3, failure="cut short"),
    ]
    found = summarise(runs, columns(runs, 0.0), 0.0, Window(0.0, 4.0, ""))
    assert found.requests == 3
    assert found.failures == {"HTTP 503": 2, "cut short": 1}
    assert found.retry_after_s == (2.0, 5.0)
    assert (found.req_s, found.audio_s_per_s) == (0.75, 1.0)
    assert (found.ttfp.mean, found.ttfp.p50, found.ttfp.max) == (1000 / 3, 250.0, 500.0)
    assert found.smooth_start.max == 500.0
    assert (found.gap.n, found.gap.p50, found.gap.max) == (3, 562.5, 750.0)
    assert found.e2e.mean == 1000.0
    assert found.rtf.mean == pytest.approx((1 + 1 / 2 + 1) / 3)
    assert (found.underruns, found.underrun_share) == (2, 2 / 3)
    assert (found.silence.max, found.longest_silence.max) == (250.0, 250.0)
    assert found.continuity == 2 / 3
    assert found.listeners_served == 1  # of four: one heard a gap, two failed
    assert found.packets_each == 2.0


def test_blocks_hold_what_arrived_in_them() -> None:
    runs = [trace(0.0, (0.25, 500), (1.25, 500), (2.5, 250), ended=2.5)]
    audio, ended = blocks(runs, 0.0, Window(0.0, 3.0, ""), 3)
    assert (audio.tolist(), ended.tolist()) == ([0.5, 0.5, 0.25], [0, 0, 1])


def test_nothing_measured_is_described_without_nan() -> None:
    found = summarise([], columns([], 0.0), 0.0, whole([], 0.0))
    assert found.ttfp is None
    assert not math.isnan(found.req_s)
