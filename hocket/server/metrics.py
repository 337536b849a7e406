"""The Prometheus metrics of the server, under the names of the API contract.

Requests are counted as they end; what the stages report is read from the engine's status at each scrape.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from fastapi import APIRouter
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, SummaryMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from starlette.responses import Response

from hocket.server.requests import Ticket

if TYPE_CHECKING:
    from hocket.engine.client import EngineStatus

_CONTINUITY_S = 0.1  # a gap up to this counts as smooth

_LATENCY_S = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2, 5, 10, 30, 60)
_DURATION_S = (0.1, 0.25, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600)
_RTF = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.85, 1, 1.25, 2, 5, 10)
_UNDERRUN_S = (0.01, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)


class Metrics:
    """What has been counted so far. `status` gives the engine's, for a scrape."""

    def __init__(self, model: str, status: Callable[[], EngineStatus]) -> None:
        self.registry = CollectorRegistry()
        self._model = model
        self.sockets = Gauge(
            "hocket_ws_connections", "Open WebSockets.", ("model",), registry=self.registry
        ).labels(model)
        self._requests = Counter(
            "hocket_requests",
            "Requests by how they ended.",
            ("model", "endpoint", "outcome"),
            registry=self.registry,
        )
        self._first_audio = self._histogram(
            "hocket_first_audio_seconds", "From parsed request to first audio bytes.", _LATENCY_S
        )
        self._request = self._histogram(
            "hocket_request_seconds", "From parsed request to last byte.", _DURATION_S
        )
        self._rtf = self._histogram("hocket_rtf", "Time taken for a second of audio.", _RTF)
        self._underrun = self._histogram(
            "hocket_underrun_seconds", "Longest wait of a player that started at once.", _UNDERRUN_S
        )
        self._smooth = self._counter("hocket_continuity_ok", "Answers without a gap over 100 ms.")
        self._audio = self._counter("hocket_audio_seconds", "Audio sent.")
        self._tokens = self._counter("hocket_input_tokens", "Tokens of text and reference read.")
        self._frames = self._counter("hocket_output_frames", "Codec frames made.")
        self.registry.register(_EngineMetrics(model, status))

    def ended(self, ticket: Ticket) -> None:
        """Count a request that has just ended."""
        model = self._model
        self._requests.labels(model, ticket.endpoint, ticket.outcome).inc()
        if ticket.first_audio is None:
            return
        spent = time.monotonic() - ticket.began
        self._first_audio.labels(model).observe(ticket.first_audio - ticket.began)
        self._request.labels(model).observe(spent)
        self._underrun.labels(model).observe(ticket.underrun_s)
        self._audio.labels(model).inc(ticket.audio_s)
        self._tokens.labels(model).inc(ticket.input_tokens)
        self._frames.labels(model).inc(ticket.frames)
        if ticket.audio_s:
            self._rtf.labels(model).observe(spent / ticket.audio_s)
        if ticket.underrun_s <= _CONTINUITY_S:
            self._smooth.labels(model).inc()

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(name, text, ("model",), registry=self.registry, buckets=buckets)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, ("model",), registry=self.registry)

    def text(self) -> bytes:
        """Everything, in the Prometheus text format."""
        return generate_latest(self.registry)

    def router(self) -> APIRouter:
        router = APIRouter(tags=["operation"])

        @router.get("/metrics", response_class=Response)
        async def metrics() -> Response:
            """All metrics in the Prometheus text format."""
            return Response(self.text(), media_type=CONTENT_TYPE_LATEST)

        return router


class _EngineMetrics(Collector):
    """The engine's own figures, read when they are asked for."""

    def __init__(self, model: str, status: Callable[[], EngineStatus]) -> None:
        self._model = model
        self._status = status

    def describe(self) -> list[Metric]:
        return []  # registering must not ask the engine, which may not have started

    def collect(self) -> Iterator[Metric]:
        status = self._status()
        restarts = CounterMetricFamily("hocket_stage_restarts", "Workers started again.", labels=["model"])
        restarts.add_metric([self._model], status.restarts)
        yield restarts
        for name, text, value in (
            ("hocket_requests_running", "Requests being worked on.", status.running),
            ("hocket_requests_waiting", "Requests that have not begun.", status.waiting),
        ):
            gauge = GaugeMetricFamily(name, text, labels=["model"])
            gauge.add_metric([self._model], value)
            yield gauge
        labels = ["model", "stage", "replica"]
        rows = [
            ([self._model, name, str(replica)], stage)
            for name, replicas in status.stages.items()
            for replica, stage in enumerate(replicas)
        ]
        for name, text, attribute in _STAGE_GAUGES:
            gauge = GaugeMetricFamily(name, text, labels=labels)
            for row, stage in rows:
                gauge.add_metric(row, getattr(stage, attribute))
            yield gauge
        for name, text, attribute in _STAGE_COUNTERS:
            counter = CounterMetricFamily(name, text, labels=labels)
            for row, stage in rows:
                counter.add_metric(row, getattr(stage, attribute))
            yield counter
        eager = CounterMetricFamily("hocket_eager_steps", "Steps launched kernel by kernel.", labels=labels)
        for row, stage in rows:
            eager.add_metric(row, stage.steps - stage.graph_steps)
        yield eager
        for name, text, count, total in _STAGE_SUMMARIES:
            summary = SummaryMetricFamily(name, text, labels=labels)
            for row, stage in rows:
                summary.add_metric(row, count_value=getattr(stage, count), sum_value=getattr(stage, total))
            yield summary
        transfer = SummaryMetricFamily(
            "hocket_chunk_transfer_seconds", "From a worker to this process.", labels=["model", "stage"]
        )
        for name, t in status.transfers.items():
            transfer.add_metric([self._model, name], count_value=t.count, sum_value=t.seconds)
        yield transfer


_STAGE_GAUGES = (
    ("hocket_slots_used", "Slots that requests hold.", "slots_used"),
    ("hocket_slots_total", "Slots there are.", "slots_total"),
    ("hocket_kv_blocks_used", "KV blocks that requests hold.", "kv_blocks_used"),
    ("hocket_kv_blocks_total", "KV blocks there are.", "kv_blocks_total"),
)
_STAGE_COUNTERS = (
    ("hocket_prefix_hits", "KV blocks of prompts that were found and not computed again.", "prefix_hits"),
    ("hocket_reference_cache_hits", "References that were not encoded again.", "cache_hits"),
    ("hocket_preemptions", "Requests moved out for others and resumed later.", "preemptions"),
    ("hocket_graph_replays", "Steps replayed from a recorded graph.", "graph_steps"),
)
_STAGE_SUMMARIES = (
    ("hocket_stage_step_seconds", "Time in the stage's steps.", "steps", "step_seconds"),
    ("hocket_stage_batch_size", "Requests in a step.", "steps", "rows"),
    ("hocket_queue_seconds", "Wait of a request for its first place in a stage.", "queued", "queue_seconds"),
)
