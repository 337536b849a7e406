"""Rows of many tensors at once: what slots hold is set when they change hands.

A stage keeps some fifteen to eighty tensors with a row a slot. A burst of requests would wait for a launch a
tensor and request, so that all rows of all tensors of all slots are one. Tensors are then known by their
addresses: they must be contiguous, stay where they are, and live on the device of the launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from hocket.kernels.choice import tl, triton, use_triton

_PART = 4096  # bytes, or words of 8 bytes, of a row that a program fills


class RowTable:
    """Tensors [slots, ...] on one device, and the number that a row of each is filled with."""

    def __init__(self, tensors: Sequence[Tensor], fills: Sequence[float]) -> None:
        self.tensors, self.fills = list(tensors), list(fills)
        self.places: list[int] = []  # byte at which each tensor's part of a packed row begins
        self.bytes = 0  # of a packed row
        for tensor in self.tensors:
            self.places.append(self.bytes)
            self.bytes += -(-row_bytes(tensor) // 8) * 8

    @cached_property
    def addresses(self) -> Tensor:
        """int64 [tensors, 4]: address, bytes a row, the fill repeated over 8 bytes, place in a packed row."""
        table = []
        for tensor, fill, place in zip(self.tensors, self.fills, self.places, strict=True):
            assert tensor.is_contiguous(), "rows are found by their size"
            word = torch.full((8 // tensor.itemsize,), fill, dtype=tensor.dtype).view(torch.int64).item()
            table.append((tensor.data_ptr(), row_bytes(tensor), word, place))
        return torch.tensor(table, dtype=torch.int64).to(self.tensors[0].device)

    @cached_property
    def parts(self) -> int:
        """Programs that a row of the longest takes."""
        sizes = [row_bytes(tensor) for tensor in self.tensors]
        return max(-(-(size // 8 if size % 8 == 0 else size) // _PART) for size in sizes)


def row_bytes(tensor: Tensor) -> int:
    """Bytes of one row of tensor [slots, ...]."""
    return tensor.nbytes // tensor.shape[0]


# --- filling -----------------------------------------------------------------------------------


def fill_rows_torch(table: RowTable, slots: Tensor) -> None:
    """Set the rows of slots int64 [k] to their fill in every tensor."""
    for tensor, fill in zip(table.tensors, table.fills, strict=True):
        tensor.index_fill_(0, slots, fill)


def fill_rows_triton(table: RowTable, slots: Tensor) -> None:
    """`fill_rows_torch` as a kernel: the same arguments, the same meaning."""
    _fill[(len(table.tensors), slots.shape[0], table.parts)](table.addresses, slots, PART=_PART, num_warps=4)


def fill_rows(table: RowTable, slots: Tensor) -> None:
    """`fill_rows_torch`, which says what it does, or its kernel; `hocket.kernels.choice` picks."""
    (fill_rows_triton if use_triton(slots) else fill_rows_torch)(table, slots)


# --- copying -----------------------------------------------------------------------------------


def take_row_torch(table: RowTable, slot: int) -> Tensor:
    """A copy of one slot's row of every tensor, packed: uint8 [table.bytes], for `give_rows`."""
    packed = torch.zeros(table.bytes, dtype=torch.uint8, device=table.tensors[0].device)
    for tensor, place in zip(table.tensors, table.places, strict=True):
        row = tensor[slot].reshape(-1).view(torch.uint8)
        packed[place : place + len(row)] = row
    return packed


def take_row_triton(table: RowTable, slot: int) -> Tensor:
    """`take_row_torch` as a kernel: the same arguments, the same meaning."""
    packed = torch.zeros(table.bytes, dtype=torch.uint8, device=table.tensors[0].device)
    _move_rows(table, [slot], [packed], give=False)
    return packed


def take_row(table: RowTable, slot: int) -> Tensor:
    """`take_row_torch`, which says what it does, or its kernel; `hocket.kernels.choice` picks."""
    return (take_row_triton if use_triton(table.tensors[0]) else take_row_torch)(table, slot)


def give_rows_torch(table: RowTable, slots: Sequence[int], rows: Sequence[Tensor]) -> None:
    """Write rows that `take_row` gave, one each, to k slots of every tensor."""
    for slot, packed in zip(slots, rows, strict=True):
        for tensor, place in zip(table.tensors, table.places, strict=True):
            part = packed[place : place + row_bytes(tensor)].view(tensor.dtype)
            tensor[slot] = part.view(tensor.shape[1:])


def give_rows_triton(table: RowTable, slots: Sequence[int], rows: Sequence[Tensor]) -> None:
    """`give_rows_torch` as a kernel: the same arguments, the same meaning."""
    _move_rows(table, slots, rows, give=True)


def give_rows(table: RowTable, slots: Sequence[int], rows: Sequence[Tensor]) -> None:
    """`give_rows_torch`, which says what it does, or its kernel; `hocket.kernels.choice` picks."""
    (give_rows_triton if use_triton(table.tensors[0]) else give_rows_torch)(table, slots, rows)


def _move_rows(table: RowTable, slots: Sequence[int], rows: Sequence[Tensor], *, give: bool) -> None:
    ways = _sent(np.array([*slots, *(row.data_ptr() for row in rows)], np.int64), table.addresses.device)
    grid = (len(table.tensors), len(slots), table.parts)
    _move[grid](table.addresses, ways, PART=_PART, GIVE=give, num_warps=4)


def _sent(values: np.ndarray, device: torch.device) -> Tensor:
    """Host values on the device, without waiting for it."""
    host = torch.from_numpy(values)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


# --- writing -----------------------------------------------------------------------------------


Write = tuple[Tensor, np.ndarray]  # a tensor [slots, ...], and what its rows begin with: [k, ...]


def put_rows_torch(slots: Sequence[int], writes: Sequence[Write]) -> None:
    """Write the first n values of the rows of k slots, from the host: values [k, ...] of n each, converted to
    their tensor's dtype; what follows in a row stays. Nothing waits for the device."""
    for tensor, values in writes:
        at = torch.tensor(slots, dtype=torch.int64, device=tensor.device)
        given = torch.from_numpy(np.ascontiguousarray(values).reshape(len(slots), -1))
        rows = tensor.view(tensor.shape[0], row_bytes(tensor) // tensor.itemsize)
        rows[at, : given.shape[1]] = given.to(tensor)


def put_rows_triton(slots: Sequence[int], writes: Sequence[Write]) -> None:
    """`put_rows_torch` as a kernel, after one copy of everything: the same arguments, the same meaning."""
    k, device = len(slots), writes[0][0].device
    parts, heads, at = [], [], 8 * (k + 4 * len(writes))
    for tensor, values in writes:
        assert tensor.is_contiguous(), "rows are found by their size"
        given = torch.from_numpy(np.ascontiguousarray(values).reshape(-1)).to(tensor.dtype)
        part = given.contiguous().flatten().view(torch.uint8).numpy().tobytes()
        heads.append((tensor.data_ptr(), row_bytes(tensor), len(part) // k, at))
        parts.append(part)
        at += len(part)
    head = np.array([*slots, *(number for row in heads for number in row)], np.int64).tobytes()
    packed = np.frombuffer(bytearray().join([head, *parts]), np.uint8)
    _put[(len(writes), k)](_sent(packed, device), PART=1024, num_warps=4)


def put_rows(slots: Sequence[int], writes: Sequence[Write]) -> None:
    """`put_rows_torch`, which says what it does, or its kernel; `hocket.kernels.choice` picks."""
    (put_rows_triton if use_triton(writes[0][0]) else put_rows_torch)(slots, writes)


# --- kernels -------------------------------------------------------------------------------------


@triton.jit
def _fill(table, slots, PART: tl.constexpr):
    at = table + tl.program_id(0) * 4
    size = tl.load(at + 1)
    word = tl.load(at + 2)
    row = tl.load(at) + tl.load(slots + tl.program_id(1)) * size
    i = tl.program_id(2) * PART + tl.arange(0, PART)
    if size % 8 == 0:  # rows begin at 8 bytes, because their tensor does
        tl.store(row.to(tl.pointer_type(tl.int64)) + i, tl.zeros([PART], tl.int64) + word, i < size // 8)
    else:  # every element begins at a multiple of its size, and a row as well
        shift = (i % 8).to(tl.int64) * 8
        tl.store(row.to(tl.pointer_type(tl.int8)) + i, (word >> shift).to(tl.int8), i < size)


@triton.jit
def _move(table, ways, PART: tl.constexpr, GIVE: tl.constexpr):
    """ways int64 [2, k]: slots, and the addresses of packed rows."""
    at = table + tl.program_id(0) * 4
    size = tl.load(at + 1)
    row = tl.load(at) + tl.load(ways + tl.program_id(1)) * size
    packed = tl.load(ways + tl.num_programs(1) + tl.program_id(1)) + tl.load(at + 3)
    to, of = (row, packed) if GIVE else (packed, row)
    i = tl.program_id(2) * PART + tl.arange(0, PART)
    if size % 8 == 0:
        word = tl.load(of.to(tl.pointer_type(tl.int64)) + i, i < size // 8, 0)
        tl.store(to.to(tl.pointer_type(tl.int64)) + i, word, i < size // 8)
    else:
        byte = tl.load(of.to(tl.pointer_type(tl.int8)) + i, i < size, 0)
        tl.store(to.to(tl.pointer_type(tl.int8)) + i, byte, i < size)


@triton.jit
def _put(packed, PART: tl.constexpr):
    """packed: slots int64 [k]; int64 [writes, 4] of address, bytes a row, bytes given and where; bytes."""
    k = tl.num_programs(1)
    head = packed.to(tl.pointer_type(tl.int64))
    which = head + k + tl.program_id(0) * 4
    slot = tl.load(head + tl.program_id(1))
    given = tl.load(which + 2)
    to = (tl.load(which) + slot * tl.load(which + 1)).to(tl.pointer_type(tl.int8))
    of = packed.to(tl.pointer_type(tl.int8)) + tl.load(which + 3) + tl.program_id(1) * given
    for begin in range(0, given, PART):
        i = begin + tl.arange(0, PART)
        tl.store(to + i, tl.load(of + i, i < given, 0), i < given)
