"""Which slot belongs to whom. Slot 0 is padding and belongs to nobody."""

from __future__ import annotations


class Slots:
    """Slots 1 … total. A slot's epoch grows each time it changes hands, so that a result that was
    computed for the last owner can be told from one for the present."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.epoch = [0] * (total + 1)
        self._free = list(range(total, 0, -1))

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def used(self) -> int:
        return self.total - len(self._free)

    def take(self) -> int | None:
        """A free slot, now the caller's, or None."""
        if not self._free:
            return None
        slot = self._free.pop()
        self.epoch[slot] += 1
        return slot

    def release(self, slot: int) -> None:
        """Give a slot back; results still on their way to its owner are now stale."""
        assert slot not in self._free, f"slot {slot} released twice"
        self.epoch[slot] += 1
        self._free.append(slot)
