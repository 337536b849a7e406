import numpy as np
import torch

from hocket.runtime.ring import OutputRing, Owner
from hocket.runtime.slots import Slots


def test_slot_zero_belongs_to_nobody() -> None:
    slots = Slots(3)
    assert sorted(s for s in (slots.take() for _ in range(3)) if s) == [1, 2, 3]
    assert slots.take() is None


def test_epoch_tells_owners_of_one_slot_apart() -> None:
    slots = Slots(1)
    slot = slots.take()
    assert slot is not None
    first = slots.epoch[slot]
    slots.release(slot)
    assert slots.epoch[slot] != first
    assert slots.take() == slot
    assert slots.epoch[slot] != first


def test_ring_gives_steps_back_in_order_with_their_owners() -> None:
    ring = OutputRing(2)
    ring.push([Owner(1, 1, "a")], [torch.tensor([7])])
    ring.push([Owner(2, 5, "b")], [torch.tensor([8])])
    assert ring.full
    owners, (values,) = ring.pop(wait=True) or ([], [np.zeros(0)])
    assert owners == [Owner(1, 1, "a")]
    assert values.tolist() == [7]
    assert not ring.full
    assert ring.pop(wait=False) is not None
    assert ring.pop(wait=False) is None
