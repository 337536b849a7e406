"""Results that arrive late, as a device's do: the same streams, whenever their steps are read."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hocket.runtime.ring import OutputRing
from tests.runtime.test_streaming import Driver, EchoProgram, expected


@pytest.fixture(params=[1, 3], ids=lambda n: f"{n} looks early")
def _late(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step is there only after so many looks, unless it is waited for."""
    pop, looks = OutputRing.pop, dict[int, int]()

    def late(ring: OutputRing, *, wait: bool) -> Any:
        if not wait and ring._entries:
            key = id(ring._entries[0])
            looks[key] = looks.get(key, 0) + 1
            if looks[key] <= request.param:
                return None
        return pop(ring, wait=wait)

    monkeypatch.setattr(OutputRing, "pop", late)


@pytest.mark.usefixtures("_late")
@pytest.mark.parametrize("lookahead", [0, 3])
def test_a_stream_whose_last_step_is_under_way_ends_once(lookahead: int) -> None:
    d = Driver(EchoProgram(lookahead), in_flight=2)
    d.start("a")
    for n in (1, 2, 3):
        d.push("a", [n], last=n == 3)
        d.tick()
    d.tick(20)
    assert d.heard("a") == expected([1, 2, 3])
    assert [c.last for c in d.out["a"]].count(True) == 1
    assert d.runner.jobs() == []


@pytest.mark.usefixtures("_late")
def test_an_aborted_streams_late_sound_reaches_nobody() -> None:
    d = Driver(EchoProgram(), in_flight=2, slots=1)
    d.start("a")
    d.push("a", [7])
    d.tick()
    d.runner.abort("a")
    d.start("b")  # the slot that "a" had
    d.push("b", [1], last=True)
    d.tick(20)
    assert d.heard("b") == expected([1])
    assert not np.isin(7.0, d.heard("b"))
