"""Mailboxes: how engine, workers and clients reach each other. One interface, two carriers.

`local:` addresses pass messages between threads of one process as they are. `ipc:` and `tcp:`
addresses are ZeroMQ sockets; messages are msgpack, arrays travel as frames of their own behind it
and are not copied into it. What is sent between two flushes to one address goes as one delivery.
"""

from __future__ import annotations

import contextlib
import queue
from collections import defaultdict
from typing import Any, ClassVar, Protocol

import msgspec
import numpy as np
import zmq

from hocket.engine.messages import Message


class Mailbox(Protocol):
    """Where messages for one address arrive, and where its owner sends from."""

    address: str

    def send(self, address: str, message: Message) -> None:
        """Put a message on its way with the next flush. To an address nobody holds it is lost.

        Raises RequestFailed if the carrier refuses it.
        """

    def flush(self) -> None: ...

    def poll(self, timeout_s: float) -> list[Message]:
        """What has arrived, waiting at most so long for the first. Empty after `close`."""

    def forget(self, address: str) -> None:
        """Drop what was meant for an address whose owner is gone."""

    def close(self) -> None: ...


def open_mailbox(address: str) -> Mailbox:
    """A mailbox that receives at `address`: local:NAME, ipc://PATH or tcp://HOST:PORT."""
    return LocalMailbox(address) if address.startswith("local:") else ZmqMailbox(address)


class LocalMailbox:
    """Between threads. An address belongs to the mailbox that was opened last under it."""

    _open: ClassVar[dict[str, LocalMailbox]] = {}

    def __init__(self, address: str) -> None:
        self.address = address
        self._queue: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        LocalMailbox._open[address] = self

    def send(self, address: str, message: Message) -> None:
        box = LocalMailbox._open.get(address)
        if box is not None:
            box._queue.put(message)

    def flush(self) -> None:
        """Messages have gone already."""

    def poll(self, timeout_s: float) -> list[Message]:
        out: list[Message] = []
        try:
            first = self._queue.get(timeout=timeout_s) if timeout_s > 0 else self._queue.get_nowait()
            while first is not None:
                out.append(first)
                first = self._queue.get_nowait()
        except queue.Empty:
            pass
        return out

    def forget(self, address: str) -> None:
        LocalMailbox._open.pop(address, None)

    def close(self) -> None:
        if LocalMailbox._open.get(self.address) is self:
            del LocalMailbox._open[self.address]
        self._queue.put(None)


class ZmqMailbox:
    """PULL bound to the own address, one PUSH per peer. Sending and polling may be two threads'."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._inbox = self._context.socket(zmq.PULL)
        self._inbox.setsockopt(zmq.RCVHWM, 0)
        self._inbox.bind(address)
        self._peers: dict[str, zmq.Socket[bytes]] = {}
        self._outbox: defaultdict[str, list[Message]] = defaultdict(list)
        self._closed = False

    def send(self, address: str, message: Message) -> None:
        self._outbox[address].append(message)

    def flush(self) -> None:
        for address, messages in self._outbox.items():
            if not messages:
                continue
            peer = self._peers.get(address)
            if peer is None:
                peer = self._peers[address] = self._context.socket(zmq.PUSH)
                peer.setsockopt(zmq.LINGER, 0)
                peer.setsockopt(zmq.SNDHWM, 100_000)
                peer.connect(address)
            # A peer that has not read 100 000 deliveries is gone, and supervision says so.
            with contextlib.suppress(zmq.Again):
                peer.send_multipart(encode(messages), zmq.NOBLOCK, copy=False)
        self._outbox.clear()

    def poll(self, timeout_s: float) -> list[Message]:
        out: list[Message] = []
        if self._closed or not self._inbox.poll(int(timeout_s * 1000)):
            return out
        try:
            while True:
                out += decode(self._inbox.recv_multipart(zmq.NOBLOCK, copy=False))
        except zmq.Again:
            return out

    def forget(self, address: str) -> None:
        self._outbox.pop(address, None)
        peer = self._peers.pop(address, None)
        if peer is not None:
            peer.close(linger=0)

    def close(self) -> None:
        self._closed = True
        for peer in self._peers.values():
            peer.close(linger=500)
        self._inbox.close(linger=0)


def encode(messages: list[Message]) -> list[Any]:
    """Frames: one of msgpack, then one for each array."""
    frames: list[Any] = [b""]

    def array(value: Any) -> Any:
        if not isinstance(value, np.ndarray):
            raise NotImplementedError(f"{type(value)} does not travel")
        frames.append(np.ascontiguousarray(value).data.cast("B") if value.size else b"")
        return (value.dtype.str, value.shape, len(frames) - 1)

    frames[0] = msgspec.msgpack.encode(messages, enc_hook=array)
    return frames


def decode(frames: list[Any]) -> list[Message]:
    """The messages of frames made by `encode`; arrays are views of the frames."""

    def array(kind: type, value: Any) -> Any:
        dtype, shape, at = value
        return np.frombuffer(
            frames[at].buffer if hasattr(frames[at], "buffer") else frames[at], dtype
        ).reshape(shape)

    head = frames[0].buffer if hasattr(frames[0], "buffer") else frames[0]
    messages: list[Message] = msgspec.msgpack.decode(head, type=list[Message], dec_hook=array)
    return messages
