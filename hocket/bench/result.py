"""A result: what was run, where, against what, and what came of it."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from hocket import results
from hocket.bench.http import Client
from hocket.bench.load import Level, Share, Workload
from hocket.bench.metrics import BLOCKS, Columns, Summary, Trace, blocks, columns, steady, summarise, whole
from hocket.bench.processes import until
from hocket.errors import StartupError

SCHEMA = "hocket-bench/1"
_SAMPLE = 24  # requests of a level whose packets are kept, for the waterfall


class Packets(msgspec.Struct):
    """One request, packet by packet; times in seconds since the level began."""

    due_s: float
    ended_s: float
    times_s: list[float]
    audio_s: list[float]


class ClientCost(msgspec.Struct):
    """What the load generator itself cost."""

    processes: int
    cpu_share: float  # of a core, the busiest process
    us_per_packet: float
    send_lag_p99_ms: float


class LevelResult(msgspec.Struct):
    kind: str
    load: float
    name: str
    asked: dict[str, Any]
    wall_s: float
    interrupted: bool
    unfinished: int  # requests that an interrupt cut off; counted nowhere else
    steady: Summary
    whole: Summary
    examples: dict[str, str]  # of each kind of failure, the first
    client: ClientCost
    requests: Columns
    block_audio_s: list[float]  # sound that arrived in each of equal parts of the steady window
    block_ended: list[float]  # requests that ended in it
    sample: list[Packets]


class Result(msgspec.Struct):
    schema: str
    created: str
    command: str
    interrupted: bool
    hocket: str
    machine: dict[str, Any]
    server: dict[str, Any]
    work: dict[str, Any]
    levels: list[LevelResult] = []

    @property
    def failures(self) -> int:
        return sum(sum(level.whole.failures.values()) for level in self.levels)


def level_result(level: Level, shares: Sequence[Share], began: float, *, stopped: bool) -> LevelResult:
    """One level's figures from what its client processes measured; `stopped`: by Ctrl+C."""
    every = [trace for share in shares for trace in share.traces]
    traces = [trace for trace in every if trace.failure != "interrupted"]
    table = columns(traces, began)
    end = min(until(shares) or began, max((t.ended for t in traces), default=began))
    window = steady(traces, began, end, level.clients)
    audio, ended = blocks(traces, began, window, BLOCKS)
    examples: dict[str, str] = {}
    for trace in sorted(traces, key=lambda t: t.due):
        if trace.failure:
            examples.setdefault(trace.failure, trace.detail)
    packets = sum(len(trace.times) for trace in every)
    lag = sorted(table.send_lag_s)
    everything = whole(traces, began)
    return LevelResult(
        kind=level.kind,
        load=level.load,
        name=level.name,
        asked={"requests": level.requests, "duration_s": level.duration_s},
        wall_s=everything.length_s,
        interrupted=stopped,
        unfinished=len(every) - len(traces),
        steady=summarise(traces, table, began, window),
        whole=summarise(traces, table, began, everything),
        examples=examples,
        client=ClientCost(
            processes=len(shares),
            cpu_share=max(share.cpu_s / max(share.wall_s, 1e-9) for share in shares),
            us_per_packet=1e6 * sum(share.cpu_s for share in shares) / max(packets, 1),
            send_lag_p99_ms=1000 * lag[round(0.99 * (len(lag) - 1))] if lag else 0.0,
        ),
        requests=table,
        block_audio_s=audio.tolist(),
        block_ended=ended.tolist(),
        sample=[_packets(trace, began) for trace in _middle(traces, began + window.start_s)],
    )


def _middle(traces: Sequence[Trace], start: float) -> list[Trace]:
    """A few neighbours from the steady window: what ran at once is seen at once."""
    good = sorted((t for t in traces if not t.failure), key=lambda t: t.due)
    inside = [trace for trace in good if trace.due >= start] or good
    return inside[:_SAMPLE]


def _packets(trace: Trace, began: float) -> Packets:
    return Packets(
        trace.due - began,
        trace.ended - began,
        [round(at - began, 6) for at in trace.times],
        [round(size / trace.bytes_per_s, 6) for size in trace.sizes],
    )


def new_result(work: Workload, command: Sequence[str], server: dict[str, Any], version: str) -> Result:
    """A result without levels; `version` is this client's."""
    asked = msgspec.to_builtins(work, enc_hook=str)
    asked.pop("api_key")
    return Result(
        schema=SCHEMA,
        created=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        command=results.command_line(command),
        interrupted=False,
        hocket=version,
        machine=machine(),
        server=server,
        work=asked,
    )


def machine() -> dict[str, Any]:
    """The machine that this client runs on, which may be the server's too."""
    found: dict[str, Any] = {
        "system": platform.platform(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "python": sys.version.split()[0],
        "load": list(os.getloadavg()) if hasattr(os, "getloadavg") else None,
        "gpus": [],
    }
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        told = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return found  # no NVIDIA GPU here
    found["gpus"] = told.strip().splitlines()
    return found


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


async def ask_server(work: Workload) -> dict[str, Any]:
    """What the server says about itself. Raises StartupError if nothing answers at the address."""
    client = Client(work.url, api_key=work.api_key, timeout_s=min(10.0, work.timeout_s))
    found: dict[str, Any] = {"url": work.url}
    try:
        for name, path in (("version", "/version"), ("models", "/v1/models")):
            answer = await client.request("GET", path)
            if answer.failure in ("no connection", "timeout"):
                reason = answer.detail or answer.failure
                message = f"{work.url} does not answer: {reason}; is the server running?"
                raise StartupError(message)
            if answer.status == 200:
                found[name] = _json(answer.head)
            if name == "version" and "server" in answer.headers:
                found["software"] = answer.headers["server"]
    finally:
        await client.close()
    return found


def _json(body: bytes) -> Any:
    try:
        return msgspec.json.decode(body)
    except msgspec.DecodeError:
        return body[:300].decode("utf-8", "replace")


def load(path: Path) -> Result:
    """The result in `path`. Raises InvalidRequest if it holds none."""
    return results.load(path, Result, SCHEMA)
