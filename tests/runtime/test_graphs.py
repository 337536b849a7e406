"""What graphs do around a step, with the recording left out: buckets, padding, buffers. No GPU is needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from hocket.core import StepOutput
from hocket.runtime import graphs
from hocket.runtime.graphs import FrameGraphs, StreamGraphs, batch_buckets, doubling, round_up

CPU = torch.device("cpu")


class Unrecorded:
    """Stands for `GraphPool`: a replay is the call itself; a capture is, too, as warming up is."""

    def __init__(self, stream: Any) -> None:
        self.keys: list[Any] = []

    def __len__(self) -> int:
        return len(self.keys)

    def __contains__(self, key: Any) -> bool:
        return key in self.keys

    def __iter__(self) -> Iterator[Any]:
        return iter(self.keys)

    def capture(self, key: Any, call: Callable[[], Any]) -> None:
        self.keys.append(key)
        call()

    def replay(self, key: Any, call: Callable[[], Any]) -> Any:
        assert key in self.keys
        return call()


@pytest.fixture(autouse=True)
def _unrecorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "GraphPool", Unrecorded)


@dataclass
class Counts:
    steps: Tensor  # int64 [slots]
    tokens: Tensor  # int64 [slots]


class CountingProgram:
    """Counts what each slot is asked to do."""

    width, dtype, bounded_by_context = 3, torch.float32, True

    def __init__(self) -> None:
        self.shapes: list[tuple[int, ...]] = []

    def step(self, state: Counts, slots: Tensor, context: int, variant: int) -> StepOutput:
        self.shapes.append((len(slots), context, variant))
        state.steps.index_add_(0, slots, torch.ones_like(slots))
        return StepOutput(chunk=state.steps[slots], emit=slots > 0, stop=slots < 0)

    def prefill(self, state: Counts, slots: Tensor, x: Tensor, count: Tensor, context: int) -> None:
        self.shapes.append((*x.shape[:2], context))
        assert x.isfinite().all()
        state.tokens.index_add_(0, slots, count)


def frames(program: CountingProgram, state: Counts) -> FrameGraphs:
    return FrameGraphs(program, state, max_batch=6, max_context=1000, device=CPU, stream=None)  # type: ignore[arg-type]


@pytest.fixture
def state() -> Counts:
    return Counts(torch.zeros(9, dtype=torch.int64), torch.zeros(9, dtype=torch.int64))


def test_each_row_is_stepped_once_also_when_its_graph_is_made_on_the_way(state: Counts) -> None:
    program = CountingProgram()
    g = frames(program, state)
    slots = torch.tensor([5, 2, 7])
    out = g.step(state, slots, 100, 0)
    assert out.chunk[:3].tolist() == [1, 1, 1]
    g.step(state, slots, 300, 0)  # the same batch in another graph: the buffer holds it still
    g.step(state, torch.tensor([2]), 100, 1)
    assert state.steps[1:].tolist() == [0, 3, 0, 0, 2, 0, 2, 0]
    assert set(program.shapes) == {(4, 256, 0), (4, 512, 0), (1, 256, 1)}


def test_prefill_counts_no_token_twice(state: Counts) -> None:
    program = CountingProgram()
    g = frames(program, state)
    g.prefill(state, torch.tensor([4, 1]), torch.ones(2, 5, 3), torch.tensor([5, 3]), 5)
    g.prefill(state, torch.tensor([4]), torch.ones(1, 600, 3), torch.tensor([600]), 605)  # too long: as it is
    everyone = torch.arange(1, 9)  # more than a step takes
    g.prefill(state, everyone, torch.ones(8, 2, 3), torch.ones_like(everyone), 700)
    assert state.tokens[1:].tolist() == [4, 1, 1, 606, 1, 1, 1, 1]
    assert (2, 8, 64) in program.shapes
    assert (1, 600, 605) in program.shapes


def test_prefill_pads_to_what_is_recorded_before_it_records(state: Counts) -> None:
    program = CountingProgram()
    g = frames(program, state)
    g.prefill(state, torch.tensor([1, 2, 3, 4]), torch.ones(4, 30, 3), torch.full((4,), 30), 200)
    program.shapes.clear()
    g.prefill(state, torch.tensor([5]), torch.ones(1, 3, 3), torch.tensor([3]), 70)
    assert program.shapes == [(4, 32, 256)]
    g.prefill(state, torch.tensor([5]), torch.ones(1, 40, 3), torch.tensor([40]), 70)  # nothing is as long
    assert program.shapes[1:] == [(1, 64, 128)] * 2  # recorded, then run
    assert state.tokens[1:6].tolist() == [30, 30, 30, 30, 43]


def test_warming_touches_the_padding_row_only(state: Counts) -> None:
    frames(CountingProgram(), state).warm()
    assert state.steps[1:].sum() == 0
    assert state.tokens.sum() == 0


def test_usual_variant_is_made_ready(state: Counts) -> None:
    class Varied(CountingProgram):
        usual_variant = 5

    for kind, variant in ((CountingProgram, 0), (Varied, 5)):
        program = kind()
        frames(program, state).warm()
        assert {
            v for b, context, v in program.shapes if (context, b) in {(256, n) for n in (1, 2, 4, 6)}
        } == {variant}


def test_streams_get_their_own_frames_back() -> None:
    class Echo:
        frame = torch.zeros(2, dtype=torch.int32)

        def step(self, state: Any, slots: Tensor, frames: Tensor) -> Tensor:
            return frames.sum(2) * 10 + slots[:, None]

    state = object()
    g = StreamGraphs(Echo(), state, max_batch=4, device=CPU, stream=None)  # type: ignore[arg-type]
    for _ in range(2):
        pcm = g.step(state, torch.tensor([3, 1, 2]), torch.tensor([[[1, 2]], [[3, 4]], [[5, 6]]]).int())
        assert pcm.shape == (4, 1)
        assert pcm[:3, 0].tolist() == [33, 71, 112]


def test_buckets() -> None:
    assert batch_buckets(6) == [1, 2, 4, 6]
    assert doubling(64, 200) == [64, 128, 200]
    assert [round_up(n, [64, 128, 200]) for n in (1, 64, 65, 200)] == [64, 64, 128, 200]
