import random

from hypothesis import given
from hypothesis import strategies as st

from hocket.runtime.blocks import KvBlocks


def keys(*words: str) -> list[bytes]:
    return [w.encode() for w in words]


def test_equal_prompts_share_full_blocks_only() -> None:
    pool = KvBlocks(9, 2)
    hashes = pool.hashes(keys("a", "b", "c", "d", "e"))
    assert len(hashes) == 2
    blocks = pool.take(3)
    assert blocks is not None
    for block, h in zip(blocks, hashes, strict=False):
        pool.publish(block, h)
    assert pool.match(pool.hashes(keys("a", "b", "c", "d", "x"))) == blocks[:2]
    assert pool.match(pool.hashes(keys("a", "b", "c", "x"))) == blocks[:1]
    assert pool.match(pool.hashes(keys("x", "b", "c", "d"))) == []


def test_same_rows_behind_another_beginning_do_not_match() -> None:
    pool = KvBlocks(9, 2)
    one, two = pool.hashes(keys("a", "b", "c", "d")), pool.hashes(keys("x", "y", "c", "d"))
    assert one[1] != two[1]


def test_row_borders_are_part_of_the_hash() -> None:
    pool = KvBlocks(9, 2)
    assert pool.hashes(keys("ab", "c")) != pool.hashes(keys("a", "bc"))


def test_unused_prefix_is_kept_until_space_is_needed() -> None:
    pool = KvBlocks(4, 1)
    blocks = pool.take(2)
    assert blocks is not None
    hashes = pool.hashes(keys("a", "b"))
    for block, h in zip(blocks, hashes, strict=True):
        pool.publish(block, h)
    pool.release(blocks)
    assert pool.used == 0
    assert pool.match(hashes) == blocks
    pool.release(blocks)
    assert pool.take(3) is not None
    assert pool.match(hashes) == []


def test_take_is_all_or_nothing() -> None:
    pool = KvBlocks(4, 1)
    assert pool.take(4) is None
    assert pool.available == 3


def test_nothing_matches_when_sharing_is_off() -> None:
    pool = KvBlocks(4, 1, share=False)
    blocks = pool.take(1)
    assert blocks is not None
    pool.publish(blocks[0], pool.hashes(keys("a"))[0])
    pool.release(blocks)
    assert pool.match(pool.hashes(keys("a"))) == []


@given(st.integers(0, 2**32), st.integers(2, 12))
def test_no_block_is_lost_or_given_twice(seed: int, total: int) -> None:
    rng = random.Random(seed)
    pool = KvBlocks(total, 1)
    held: list[list[int]] = []
    for _ in range(60):
        if rng.random() < 0.6:
            hashes = pool.hashes(keys(*rng.choices("abc", k=rng.randint(1, 3))))
            shared = pool.match(hashes)
            fresh = pool.take(len(hashes) - len(shared))
            if fresh is None:
                pool.release(shared)
                continue
            blocks = shared + fresh
            for block, h in zip(blocks, hashes, strict=True):
                pool.publish(block, h)
            assert not set(fresh) & {b for owner in held for b in owner}
            held.append(blocks)
        elif held:
            pool.release(held.pop(rng.randrange(len(held))))
        assert pool.used == len({b for owner in held for b in owner})
    for owner in held:
        pool.release(owner)
    assert pool.available == total - 1
