"""What graphs do around a step, with the recording left out: buckets, padding, buffers. No GPU is needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from hocket.core import TILE, Places, StepOutput
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

    def prefill(self, state: Counts, x: Tensor, places: Places, context: int) -> None:
        self.shapes.append((len(x), len(places.tile), context))
        assert x.isfinite().all()
        first, count = places.tile.unbind(1)
        state.tokens.index_add_(0, places.slot[first].long(), count.long())


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


def places(*jobs: tuple[int, int]) -> tuple[Tensor, Places]:
    """Rows, and where they go: so many of each slot, from position 5 on."""
    slot = torch.cat([torch.full((count,), slot) for slot, count in jobs]).int()
    position = torch.cat([torch.arange(5, 5 + count) for _, count in jobs]).int()
    tiles, first = [], 0
    for _, count in jobs:
        tiles += [(first + at, min(TILE, count - at)) for at in range(0, count, TILE)]
        first += count
    return torch.ones(first, 3), Places(slot, position, torch.tensor(tiles, dtype=torch.int32))


def test_prefill_counts_no_row_twice_and_none_of_an_earlier_call(state: Counts) -> None:
    program = CountingProgram()
    g = frames(program, state)
    g.prefill(state, *places((4, 5), (1, 3)), 5)
    g.prefill(state, *places((4, 700), (2, 68)), 705)
    g.prefill(state, *places((3, 1), (5, 1), (4, 2)), 100)
    assert state.tokens[1:].tolist() == [3, 68, 1, 707, 1, 0, 0, 0]
    # Recorded, then run: rows, tiles that six jobs may have, context.
    assert program.shapes == [(32, 7, 256)] * 2 + [(768, 30, 1000)] * 2 + [(32, 7, 256)]


def test_largest_prefill_holds_all_its_tiles(state: Counts) -> None:
    program = CountingProgram()
    g = frames(program, state)
    most = [(slot, 1 + 11 * TILE) for slot in range(1, 6)]  # each with a tile that holds one row
    rest = graphs.CALL_ROWS - sum(count for _, count in most)
    g.prefill(state, *places(*most, (6, rest)), 1000)
    assert state.tokens[1:].tolist() == [353] * 5 + [rest, 0, 0]


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
