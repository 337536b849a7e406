"""Which KV block belongs to whom, and which hold a prefix that a later request can share.

A full block of prompt rows is known by a hash of everything its rows and all rows before it are
made of. Placeholder ids alone would be equal for two voices whose vectors differ. A block that
nobody uses keeps its content until the space is needed, oldest first. The idea of hashing blocks
by content is vLLM's automatic prefix caching (docs.vllm.ai, "Automatic Prefix Caching").

    free ──take──▶ in use (references > 0) ──release──▶ free, or kept when its hash is known
                        ▲                                             │
                        └───────────────── match ─────────────────────┘
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

PADDING = 0  # rows of nobody read and write here


class KvBlocks:
    """`total` blocks of `block_tokens` tokens each, block 0 apart."""

    def __init__(self, total: int, block_tokens: int, *, share: bool = True) -> None:
        self.block_tokens = block_tokens
        self.total = total - 1
        self._share = share
        self._free = list(range(total - 1, PADDING, -1))
        self._references = [0] * total
        self._hash_of: list[bytes | None] = [None] * total
        self._known: dict[bytes, int] = {}
        self._kept: OrderedDict[int, None] = OrderedDict()  # unused blocks with a known hash, oldest first

    @property
    def available(self) -> int:
        """Blocks that `take` could give, those with a prefix nobody uses included."""
        return len(self._free) + len(self._kept)

    @property
    def used(self) -> int:
        """Blocks that some job holds."""
        return self.total - self.available

    def hashes(self, row_keys: Sequence[bytes]) -> list[bytes]:
        """One hash for each full block of the rows, chained so that it covers all rows before."""
        out: list[bytes] = []
        parent = b""
        for start in range(0, len(row_keys) - self.block_tokens + 1, self.block_tokens):
            digest = hashlib.blake2b(parent, digest_size=16)
            for key in row_keys[start : start + self.block_tokens]:
                digest.update(len(key).to_bytes(4, "little"))
                digest.update(key)
            parent = digest.digest()
            out.append(parent)
        return out

    def match(self, hashes: Sequence[bytes]) -> list[int]:
        """Blocks that hold the longest known prefix; the caller now holds a reference to each."""
        found: list[int] = []
        for h in hashes if self._share else ():
            block = self._known.get(h)
            if block is None:
                break
            if self._references[block] == 0:
                del self._kept[block]
            self._references[block] += 1
            found.append(block)
        return found

    def take(self, count: int) -> list[int] | None:
        """`count` blocks of unspecified content, or None, and then nothing has changed."""
        if count > self.available:
            return None
        out = []
        for _ in range(count):
            if self._free:
                block = self._free.pop()
            else:
                block, _ = self._kept.popitem(last=False)
                self._forget(block)
            self._references[block] = 1
            out.append(block)
        return out

    def publish(self, block: int, h: bytes) -> None:
        """Say that `block` now holds the rows of hash `h`. The first block with a hash keeps it."""
        if self._share and h not in self._known and self._hash_of[block] is None:
            self._known[h] = block
            self._hash_of[block] = h

    def release(self, blocks: Sequence[int]) -> None:
        """Give up one reference to each block of a job, given in the order of its tokens."""
        for block in reversed(blocks):  # a prefix outlives what hangs on it
            self._references[block] -= 1
            assert self._references[block] >= 0, f"block {block} released twice"
            if self._references[block] == 0:
                if self._hash_of[block] is None:
                    self._free.append(block)
                else:
                    self._kept[block] = None

    def _forget(self, block: int) -> None:
        h = self._hash_of[block]
        if h is not None:
            del self._known[h]
            self._hash_of[block] = None
