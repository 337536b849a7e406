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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hocket.core import AutoregressiveProgram, StepOutput, StreamingProgram

_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)


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
        """Record `call` under `key`; it runs once before, so that kernels are compiled and libraries set up."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            call()
        self._stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        # A collection in the middle of a capture could free CUDA memory there, which is an error.
        gc.collect()
        gc.disable()
        try:
            with torch.cuda.graph(
                graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
            ):
                output = call()
        finally:
            gc.enable()
        self._graphs[key] = _Graph(graph, output)

    def replay(self, key: Any, call: Callable[[], Any]) -> Any:
        """Run what `key` stands for, captured now if it never was. Returns its fixed outputs."""
        if key not in self._graphs:
            self.capture(key, call)
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

    contexts: ascending; the bounds a step is captured for. A program whose kernels read each row's length
    on the device needs only the largest.
    """

    PREFILL_ROWS = (8, 16, 32, 64, 128, 256, 512)
    PREFILL_TOKENS = 1024  # beyond, launching costs little beside the work, and prefill runs eagerly

    def __init__(
        self,
        program: AutoregressiveProgram,
        state: Any,
        *,
        max_batch: int,
        contexts: Sequence[int],
        width: int,
        dtype: torch.dtype,
        device: torch.device,
        stream: Any,
    ) -> None:
        self.program, self._state = program, state
        self._batches, self._contexts = batch_buckets(max_batch), list(contexts)
        self._steps, self._prefills = GraphPool(stream), GraphPool(stream)
        self._rows = _Rows(max_batch, device)
        self._prefill_rows = _Rows(max_batch, device)
        self._prefill_x = torch.zeros(self.PREFILL_TOKENS, width, dtype=dtype, device=device)
        self._prefill_count = torch.zeros(max_batch, dtype=torch.int64, device=device)

    def warm(self, batches: Iterable[int] | None = None, prefills: Iterable[tuple[int, int]] = ()) -> int:
        """Capture steps for the batch buckets (all by default), and prefills (rows, batch). -> graphs held"""
        for b in reversed(list(self._batches if batches is None else batches)):  # largest first: it sizes the pool
            for context in self._contexts:
                self._capture_step(round_up(b, self._batches), context, 0)
        for n, b in prefills:
            self._capture_prefill(n, b, self._contexts[0])
        return len(self._steps) + len(self._prefills)

    def step(self, state: Any, slots: Tensor, context: int, variant: int) -> StepOutput:
        """As the program's; outputs have the bucket's rows and are overwritten by the next step."""
        assert state is self._state
        b, bound = round_up(slots.shape[0], self._batches), round_up(context, self._contexts)
        self._rows.write(slots)
        return self._steps.replay((b, bound, variant), self._step_call(b, bound, variant))

    def prefill(self, state: Any, slots: Tensor, x: Tensor, count: Tensor, context: int) -> None:
        """As the program's."""
        b, n = x.shape[:2]
        batch = round_up(b, self._batches)
        if n > self.PREFILL_ROWS[-1] or batch * round_up(n, self.PREFILL_ROWS) > self.PREFILL_TOKENS:
            self.program.prefill(state, slots, x, count, context)
            return
        rows, bound = round_up(n, self.PREFILL_ROWS), round_up(context, self._contexts)
        self._prefill_rows.write(slots)
        # Rows of x beyond n and beyond b keep an earlier call's values: finite, and their output is dropped.
        self._prefill_input(rows, batch)[:b, :n].copy_(x)
        self._prefill_count[:b].copy_(count)
        self._prefill_count[b:].zero_()
        self._prefills.replay((rows, batch, bound), self._prefill_call(rows, batch, bound))

    def _step_call(self, b: int, context: int, variant: int) -> Callable[[], StepOutput]:
        return lambda: self.program.step(self._state, self._rows.slots[:b], context, variant)

    def _prefill_input(self, n: int, b: int) -> Tensor:
        return self._prefill_x[: n * b].view(b, n, -1)

    def _prefill_call(self, n: int, b: int, context: int) -> Callable[[], None]:
        return lambda: self.program.prefill(
            self._state, self._prefill_rows.slots[:b], self._prefill_input(n, b), self._prefill_count[:b], context
        )

    def _capture_step(self, b: int, context: int, variant: int) -> None:
        self._rows.write(torch.zeros(0, dtype=torch.int64, device=self._rows.slots.device))
        self._steps.capture((b, context, variant), self._step_call(b, context, variant))

    def _capture_prefill(self, n: int, b: int, context: int) -> None:
        self._prefill_rows.write(torch.zeros(0, dtype=torch.int64, device=self._rows.slots.device))
        self._prefill_count.zero_()
        self._prefills.capture((n, b, context), self._prefill_call(n, b, context))


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

    def warm(self, shapes: Iterable[tuple[int, int]], like: Tensor) -> int:
        """Capture (frames, batch) shapes; `like` [1, 1, ...] gives a frame's form. -> graphs held"""
        for n, b in shapes:
            self._rows.write(torch.zeros(0, dtype=torch.int64, device=self._device))
            self._input(n, round_up(b, self._batches), like)
            self._graphs.capture((n, round_up(b, self._batches)), self._call(n, round_up(b, self._batches)))
        return len(self._graphs)

    def step(self, state: Any, slots: Tensor, frames: Tensor) -> Tensor:
        """As the program's; the output has the bucket's rows and is overwritten by the next step of its shape."""
        assert state is self._state
        n, b = frames.shape[1], round_up(slots.shape[0], self._batches)
        self._rows.write(slots)
        self._input(n, b, frames)[: frames.shape[0]].copy_(frames, non_blocking=True)
        pcm: Tensor = self._graphs.replay((n, b), self._call(n, b))
        return pcm

    def _input(self, n: int, b: int, like: Tensor) -> Tensor:
        if (n, b) not in self._frames:
            self._frames[n, b] = torch.zeros((b, n, *like.shape[2:]), dtype=like.dtype, device=self._device)
        return self._frames[n, b]

    def _call(self, n: int, b: int) -> Callable[[], Tensor]:
        return lambda: self.program.step(self._state, self._rows.slots[:b], self._frames[n, b])
