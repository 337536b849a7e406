"""A program's steps as CUDA graphs, one per shape, behind the signature the program itself has.

A graph replays fixed addresses, so a step reads its row indices (and a codec its frames) from buffers
that never move, and its outputs are the same tensors at every replay: whoever wants them copies them
on the stage's own stream before the next step. A batch is padded to the next bucket with slot 0, which
belongs to nobody; a step leaves rows that are not live alone, so warming up and capturing change nothing
that a request owns. Graphs of one stage share a memory pool, because they run one after another.

While the batch stays the same a step copies nothing to the device.
"""

from __future__ import annotations

import bisect
import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hocket.core import TILE, AutoregressiveProgram, Places, StepOutput, StreamingProgram, Varied
from hocket.kernels.choice import compiling_ahead

CALL_ROWS = 2048  # of one prefill at most: more would not use the machine better
_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)


def own_stream(device: torch.device) -> Any:
    """A stream for one stage, so that its work waits for no other's; None on a CPU."""
    return torch.cuda.Stream(device) if device.type == "cuda" else None


def on(stream: Any) -> AbstractContextManager[Any]:
    """Run what is enclosed on `stream`; None changes nothing."""
    return nullcontext() if stream is None else torch.cuda.stream(stream)


def doubling(first: int, largest: int) -> list[int]:
    """first, 2 * first, … and `largest` at the end."""
    return [first << i for i in range(largest.bit_length()) if first << i < largest] + [largest]


def batch_buckets(largest: int) -> list[int]:
    """Batch sizes to capture, up to and including `largest`."""
    return [b for b in _BUCKETS if b < largest] + [largest]


def round_up(n: int, sizes: Sequence[int]) -> int:
    """The smallest of the ascending sizes that holds n."""
    return sizes[bisect.bisect_left(sizes, n)]


@dataclass(slots=True)
class _Graph:
    graph: Any  # torch.cuda.CUDAGraph
    output: Any


class GraphPool:
    """Captures calls on one stream, with one pool of memory, and keeps them by key."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: dict[Any, _Graph] = {}

    def __len__(self) -> int:
        return len(self._graphs)

    def capture(self, key: Any, call: Callable[[], Any]) -> None:
        """Record `call` under `key`. It runs once before, so that kernels are compiled and libraries set up:
        its inputs must then name padding rows only."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            call()
        self._stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        # A collection in the middle of a capture could free CUDA memory there, which is an error.
        gc.disable()
        try:
            with torch.cuda.graph(
                graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
            ):
                output = call()
        finally:
            gc.enable()
        self._graphs[key] = _Graph(graph, output)

    def __contains__(self, key: Any) -> bool:
        return key in self._graphs

    def __iter__(self) -> Iterator[Any]:
        return iter(self._graphs)

    def replay(self, key: Any, call: Callable[[], Any]) -> Any:
        """Run what was captured under `key`. Returns its fixed outputs."""
        found = self._graphs[key]
        found.graph.replay()
        return found.output


class _Rows:
    """The buffer a stage's graphs read their slots from."""

    def __init__(self, largest: int, device: torch.device) -> None:
        self.slots = torch.zeros(largest, dtype=torch.int64, device=device)
        self._last: Tensor | None = None

    def write(self, slots: Tensor) -> None:
        """Put slots [b] in front, zeros behind; nothing is done if it is the tensor of the last call."""
        if slots is not self._last:
            b = slots.shape[0]
            self.slots[:b].copy_(slots, non_blocking=True)
            self.slots[b:].zero_()
            self._last = slots


class FrameGraphs:
    """`AutoregressiveProgram.step` and `.prefill` from graphs.

    max_batch: jobs in one step, or in one prefill. max_context: a multiple of the block size. A program that
    is not bounded by context has one graph a batch bucket, and one a number of prefill rows; others have one
    for each of a few bounds as well.
    """

    # Up to some 250 rows the weights are what takes time, and padding is free.
    PREFILL_ROWS = (32, 64, 128, 256, 384, 512, 768, 1024, 1536, CALL_ROWS)

    def __init__(
        self,
        program: AutoregressiveProgram,
        state: Any,
        *,
        max_batch: int,
        max_context: int,
        device: torch.device,
        stream: Any,
    ) -> None:
        self.program, self._state = program, state
        self._usual = program.usual_variant if isinstance(program, Varied) else 0
        self._batches = batch_buckets(max_batch)
        self._contexts = doubling(256, max_context) if program.bounded_by_context else [max_context]
        self._steps, self._prefills = GraphPool(stream), GraphPool(stream)
        self._rows = _Rows(max_batch, device)
        self._nobody = torch.zeros(0, dtype=torch.int64, device=device)
        self._prefill_x = torch.zeros(CALL_ROWS, program.width, dtype=program.dtype, device=device)
        size = 2 * (CALL_ROWS + CALL_ROWS // TILE + max_batch)
        self._places = torch.zeros(size, dtype=torch.int32, device=device)

    def warm(self) -> int:
        """Capture what a server's first minutes ask for; the rest is captured when needed. -> graphs held"""
        self._rows.write(self._nobody)
        self._places.zero_()
        with compiling_ahead():
            for b in self._batches:
                self._step_call(b, self._contexts[0], self._usual)()
            for m in self.PREFILL_ROWS:
                self._prefill_call(m, self._contexts[0])()
        for b in reversed(self._batches):  # the largest first: it sizes the pool
            self._capture_step(b, self._contexts[0], self._usual)
        for m in reversed(self.PREFILL_ROWS):
            self._capture_prefill(m, self._contexts[0])
        return len(self._steps) + len(self._prefills)

    def step(self, state: Any, slots: Tensor, context: int, variant: int) -> StepOutput:
        """As the program's; outputs have the bucket's rows and are overwritten by the next step."""
        assert state is self._state
        b, bound = round_up(slots.shape[0], self._batches), round_up(context, self._contexts)
        if (b, bound, variant) not in self._steps:
            self._capture_step(b, bound, variant)
        self._rows.write(slots)
        return self._steps.replay((b, bound, variant), self._step_call(b, bound, variant))

    def prefill(self, state: Any, x: Tensor, places: Places, context: int) -> None:
        """As the program's, for at most `CALL_ROWS` rows of at most `max_batch` jobs."""
        m, tiles = len(x), len(places.tile)
        key = round_up(m, self.PREFILL_ROWS), round_up(context, self._contexts)
        if key not in self._prefills:
            self._capture_prefill(*key)
        to = self._prefill_places(key[0])
        # Rows of x beyond m keep an earlier call's values: finite, and written nowhere.
        self._prefill_x[:m].copy_(x)
        self._places.zero_()
        to.slot[:m].copy_(places.slot)
        to.position[:m].copy_(places.position)
        to.tile[:tiles].copy_(places.tile)
        self._prefills.replay(key, self._prefill_call(*key))

    def _step_call(self, b: int, context: int, variant: int) -> Callable[[], StepOutput]:
        return lambda: self.program.step(self._state, self._rows.slots[:b], context, variant)

    def _prefill_places(self, m: int) -> Places:
        """The part of the buffer that a prefill of m rows reads: as many tiles as its jobs may have."""
        tiles = self._places[2 * m :][: 2 * min(m, m // TILE + self._batches[-1])].view(-1, 2)
        return Places(slot=self._places[:m], position=self._places[m : 2 * m], tile=tiles)

    def _prefill_call(self, m: int, context: int) -> Callable[[], None]:
        return lambda: self.program.prefill(
            self._state, self._prefill_x[:m], self._prefill_places(m), context
        )

    def _capture_step(self, b: int, context: int, variant: int) -> None:
        self._rows.write(self._nobody)
        self._steps.capture((b, context, variant), self._step_call(b, context, variant))

    def _capture_prefill(self, m: int, context: int) -> None:
        self._places.zero_()
        self._prefills.capture((m, context), self._prefill_call(m, context))


class StreamGraphs:
    """`StreamingProgram.step` from graphs, one per (frames, batch bucket)."""

    def __init__(
        self,
        program: StreamingProgram,
        state: Any,
        *,
        max_batch: int,
        device: torch.device,
        stream: Any,
    ) -> None:
        self.program, self._state, self._device = program, state, device
        self._batches = batch_buckets(max_batch)
        self._graphs = GraphPool(stream)
        self._rows = _Rows(max_batch, device)
        self._frames: dict[tuple[int, int], Tensor] = {}
        self._nobody = torch.zeros(0, dtype=torch.int64, device=device)

    def warm(self, frames: Iterable[int]) -> int:
        """Capture steps of so many frames for every batch bucket. -> graphs held"""
        shapes = [(n, b) for n in sorted(frames, reverse=True) for b in reversed(self._batches)]
        self._rows.write(self._nobody)
        with compiling_ahead():
            for n, b in shapes:
                self._input(n, b)
                self._call(n, b)()
        for n, b in shapes:  # the largest first: it sizes the pool
            self._capture(n, b)
        return len(self._graphs)

    def step(self, state: Any, slots: Tensor, frames: Tensor) -> Tensor:
        """As the program's; the output has the bucket's rows; the next step of its shape overwrites it."""
        assert state is self._state
        n, b = frames.shape[1], round_up(slots.shape[0], self._batches)
        if (n, b) not in self._graphs:
            self._capture(n, b)
        self._rows.write(slots)
        self._input(n, b)[: frames.shape[0]].copy_(frames, non_blocking=True)
        pcm: Tensor = self._graphs.replay((n, b), self._call(n, b))
        return pcm

    def _input(self, n: int, b: int) -> Tensor:
        if (n, b) not in self._frames:
            frame = self.program.frame
            shape = [int(size) for size in frame.shape]
            self._frames[n, b] = torch.zeros([b, n, *shape], dtype=frame.dtype, device=self._device)
        return self._frames[n, b]

    def _call(self, n: int, b: int) -> Callable[[], Tensor]:
        return lambda: self.program.step(self._state, self._rows.slots[:b], self._frames[n, b])

    def _capture(self, n: int, b: int) -> None:
        self._rows.write(self._nobody)
        self._input(n, b)
        self._graphs.capture((n, b), self._call(n, b))
