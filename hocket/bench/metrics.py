"""What a listener hears, computed from when each packet came and how much sound it held.

Pure functions over times and bytes: no clock is read here. Terms are defined in docs/bench.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]

CONTINUOUS_S = 0.1  # a listener who waits no longer than this in all heard it in one go
AUDIBLE_S = 0.001  # shorter silences are not counted: a sound card's buffer covers them
BLOCKS = 12  # equal parts of the window, the units that are drawn again for an interval


@dataclass(slots=True)
class Trace:
    """What the client saw of one request. Times are readings of one monotonic clock, in seconds."""

    due: float  # when it should have been sent, and no later than it was
    sent: float
    client: int = 0
    words: int = 0
    times: list[float] = field(default_factory=list)  # a packet's arrival
    sizes: list[int] = field(default_factory=list)  # its bytes of sound, headers left out
    bytes_per_s: float = 48_000.0
    ended: float = 0.0
    failure: str = ""  # its kind, in a word or two; empty: none
    detail: str = ""
    retry_after_s: float | None = None

    @property
    def audio_s(self) -> float:
        return sum(self.sizes) / self.bytes_per_s


@dataclass(slots=True, frozen=True)
class Heard:
    """One utterance from the listener's chair, who starts to play at the first packet."""

    ttfp_s: float
    smooth_start_s: float  # least delay after which playing never runs dry
    underruns: int
    silence_s: float  # of all underruns; what a player that never stops calls its worst underrun
    longest_silence_s: float


def heard(times: ArrayLike, audio_s: ArrayLike) -> Heard:
    """What playing packets that came at `times` after the request, of `audio_s` seconds each, is like.

    The player stops when it has no sound and goes on at the next packet. Both [n], n > 0; times ascend.
    """
    arrived = np.asarray(times, np.float64)
    before = np.concatenate([[0.0], np.cumsum(np.asarray(audio_s, np.float64))[:-1]])
    # Playing that began at d reaches a packet at d + before: d must be no less than arrived - before.
    delay = np.maximum.accumulate(arrived - before)
    silences = np.diff(delay)
    return Heard(
        ttfp_s=float(arrived[0]),
        smooth_start_s=float(delay[-1]),
        underruns=int((silences >= AUDIBLE_S).sum()),
        silence_s=float(delay[-1] - delay[0]),
        longest_silence_s=float(silences.max(initial=0.0)),
    )


class Spread(msgspec.Struct):
    """Mean, percentiles and largest of some figures. A percentile is one that occurred: the nearest rank."""

    n: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float


def spread(values: ArrayLike) -> Spread | None:
    """None where there is nothing to describe."""
    found = np.asarray(values, np.float64)
    if not found.size:
        return None
    p50, p90, p99 = np.percentile(found, (50, 90, 99), method="nearest")
    return Spread(len(found), float(found.mean()), float(p50), float(p90), float(p99), float(found.max()))


class Columns(msgspec.Struct):
    """The successful requests of a level, a list for each figure, in the order in which they were due."""

    due_s: list[float]  # since the level began
    ttfp_s: list[float]
    smooth_start_s: list[float]
    e2e_s: list[float]
    audio_s: list[float]
    worst_gap_s: list[float]
    underruns: list[int]
    silence_s: list[float]
    longest_silence_s: list[float]
    packets: list[int]
    send_lag_s: list[float]  # sent later than due, by the client's own fault
    client: list[int]

    def array(self, name: str) -> Floats:
        return np.asarray(getattr(self, name), np.float64)


def columns(traces: Sequence[Trace], began: float) -> Columns:
    """What each request that succeeded was like, one row a request in the order they were due; times in
    seconds from `began`.
    """
    rows = []
    for trace in sorted((t for t in traces if not t.failure), key=lambda t: t.due):
        times = np.asarray(trace.times) - trace.due
        one = heard(times, np.asarray(trace.sizes) / trace.bytes_per_s)
        rows.append(
            (
                trace.due - began,
                one.ttfp_s,
                one.smooth_start_s,
                trace.ended - trace.due,
                trace.audio_s,
                float(np.diff(times).max(initial=0.0)),
                one.underruns,
                one.silence_s,
                one.longest_silence_s,
                len(times),
                trace.sent - trace.due,
                trace.client,
            )
        )
    return (
        Columns(*map(list, zip(*rows, strict=True)))
        if rows
        else Columns(*([] for _ in Columns.__struct_fields__))
    )


class Window(msgspec.Struct):
    """The part of a level that is looked at, in seconds since it began."""

    start_s: float
    end_s: float
    rule: str

    @property
    def length_s(self) -> float:
        return self.end_s - self.start_s

    def holds(self, at_s: float) -> bool:
        return self.start_s <= at_s <= self.end_s


def whole(traces: Sequence[Trace], began: float) -> Window:
    """From the first request to the last byte: what a stopwatch would say."""
    dues, ends = zip(*((trace.due, trace.ended) for trace in traces), strict=True) if traces else ([], [])
    # A timer may go off a little early, and a request be due before its level began.
    start = min(began, *dues) if dues else began
    end = max(ends, default=began)
    return Window(start - began, end - began, "everything, ramp-up and ramp-down included")


def steady(traces: Sequence[Trace], began: float, until: float, clients: int) -> Window:
    """Without ramp-up and ramp-down, or everything where too little would be left.

    It opens when each client's first request has ended (with arrivals, which have no clients: when the
    first has), so that the burst at the start has passed. It closes at `until`, when the first client found
    no more work: the load falls from then on.
    """
    first: dict[int, Trace] = {}
    for trace in sorted(traces, key=lambda t: t.due):
        first.setdefault(trace.client, trace)
    start = max((trace.ended for trace in first.values()), default=began)
    inside = sum(start <= trace.due <= until for trace in traces)
    if inside < max(4, clients):
        all_of_it = whole(traces, began)
        all_of_it.rule = "too short to leave out ramp-up and ramp-down: everything"
        return all_of_it
    rule = "from the end of every client's first request until a client found no more work"
    return Window(start - began, until - began, rule)


class Summary(msgspec.Struct):
    """The figures of a window. Latencies are of requests due in it, rates of what arrived in it."""

    window: Window
    requests: int
    failures: dict[str, int]
    req_s: float
    audio_s_per_s: float
    audio_each: Spread | None  # s
    ttfp: Spread | None  # ms, as all that follow
    smooth_start: Spread | None
    gap: Spread | None  # between neighbouring packets, all requests together
    worst_gap: Spread | None  # of each request
    e2e: Spread | None
    rtf: Spread | None
    underruns: int
    underrun_share: float  # requests with any
    silence: Spread | None  # of all underruns of a request
    longest_silence: Spread | None
    continuity: float  # share of requests whose underruns are at most 100 ms together
    listeners_served: int  # clients all of whose requests succeeded and were continuous
    in_flight: float  # requests, mean over the window
    packets_each: float
    send_lag: Spread | None
    retry_after_s: tuple[float, float] | None  # least and largest that a refusal asked for


def summarise(traces: Sequence[Trace], table: Columns, began: float, window: Window) -> Summary:
    """The figures of the requests that were due inside `window`."""
    inside = np.array([window.holds(due) for due in table.due_s], bool)

    def column(name: str, scale: float = 1000.0) -> Floats:
        return scale * table.array(name)[inside]

    good = [t for t in traces if not t.failure]
    failed = [t for t in traces if t.failure and window.holds(t.due - began)]
    kinds: dict[str, int] = {}
    for trace in failed:
        kinds[trace.failure] = kinds.get(trace.failure, 0) + 1
    gaps = [np.diff(t.times) for t in good if window.holds(t.due - began)]
    silence, audio = column("silence_s"), column("audio_s", 1.0)
    continuous = silence <= 1000 * CONTINUOUS_S
    broken = {int(c) for c in column("client", 1.0)[~continuous]} | {t.client for t in failed}
    waits = [t.retry_after_s for t in failed if t.retry_after_s is not None]
    length = max(window.length_s, 1e-9)
    audio_in, ended_in = blocks(traces, began, window, 1)
    busy = sum(
        max(0.0, min(t.ended - began, window.end_s) - max(t.sent - began, window.start_s)) for t in traces
    )
    return Summary(
        window=window,
        requests=int(inside.sum()),
        failures=kinds,
        req_s=float(ended_in[0]) / length,
        audio_s_per_s=float(audio_in[0]) / length,
        audio_each=spread(audio),
        ttfp=spread(column("ttfp_s")),
        smooth_start=spread(column("smooth_start_s")),
        gap=spread(1000 * np.concatenate(gaps)) if gaps else None,
        worst_gap=spread(column("worst_gap_s")),
        e2e=spread(column("e2e_s")),
        rtf=spread(column("e2e_s", 1.0) / audio),
        underruns=int(column("underruns", 1.0).sum()),
        underrun_share=_mean(column("underruns") > 0),
        silence=spread(silence),
        longest_silence=spread(column("longest_silence_s")),
        continuity=_mean(continuous),
        listeners_served=len({int(c) for c in column("client", 1.0)} - broken),
        in_flight=busy / length,
        packets_each=_mean(column("packets", 1.0)),
        send_lag=spread(column("send_lag_s")),
        retry_after_s=(min(waits), max(waits)) if waits else None,
    )


def _mean(values: NDArray) -> float:
    return float(values.mean()) if values.size else 0.0


def blocks(traces: Iterable[Trace], began: float, window: Window, count: int) -> tuple[Floats, Floats]:
    """Seconds of sound that arrived, and requests that ended, in each of `count` parts of the window."""
    edges = began + np.linspace(window.start_s, window.end_s, count + 1)
    audio, ended = np.zeros(count), np.zeros(count)
    for trace in traces:
        if not trace.failure:
            weights = np.asarray(trace.sizes) / trace.bytes_per_s
            audio += np.histogram(trace.times, edges, weights=weights)[0]
            ended += np.histogram([trace.ended], edges)[0]
    return audio, ended
