import threading
from collections.abc import Iterator

import numpy as np
import pytest

from hocket.core import Chunk, ChunkKind, Job
from hocket.engine.connector import Mailbox, decode, encode, open_mailbox
from hocket.engine.messages import Abort, Deliver, Feed, Message, Shutdown, Submit


@pytest.fixture(params=["local:{}", "ipc://{}", "tcp://127.0.0.1:{}"], ids=["threads", "ipc", "tcp"])
def pair(
    request: pytest.FixtureRequest, tmp_path: object, unused_tcp_port_factory: object
) -> Iterator[tuple[Mailbox, Mailbox]]:
    def address(name: str) -> str:
        place = unused_tcp_port_factory() if "tcp" in request.param else f"{tmp_path}/{name}"  # type: ignore[operator]
        return str(request.param).format(place)

    boxes = open_mailbox(address("a")), open_mailbox(address("b"))
    yield boxes
    for box in boxes:
        box.close()


def chunk(**arrays: np.ndarray) -> Deliver:
    return Deliver(
        stage="codec",
        chunk=Chunk(job="j", source="talker", index=3, kind=ChunkKind.CODES, arrays=arrays, last=True),
    )


def receive(box: Mailbox, count: int) -> list[Message]:
    out: list[Message] = []
    while len(out) < count:
        out += box.poll(5.0)
    return out


def test_messages_arrive_in_order_and_whole(pair: tuple[Mailbox, Mailbox]) -> None:
    a, b = pair
    codes = np.arange(32, dtype=np.int32).reshape(2, 16)[:, ::2]  # not contiguous
    empty = np.zeros((0, 16), np.int32)
    job = Job(id="j", route=("talker",), inputs={"talker": b"\x00\xff"}, seed=-1, max_frames=3)
    sent: list[Message] = [
        Submit(job=job, placement={"talker": "x"}, reply_to="y"),
        Feed(job="j", stage="talker", data=b"abc"),
        chunk(codes=codes, empty=empty),
        chunk(pcm=np.float32([0.5, -1])),
        Abort(job="j"),
    ]
    for message in sent:
        a.send(b.address, message)
    a.flush()
    got = receive(b, len(sent))
    assert [type(m) for m in got] == [type(m) for m in sent]
    assert got[0] == sent[0]
    assert isinstance(got[2], Deliver)
    np.testing.assert_array_equal(got[2].chunk.arrays["codes"], codes)
    assert got[2].chunk.arrays["empty"].shape == (0, 16)
    assert got[2].chunk.last


def test_reader_is_woken(pair: tuple[Mailbox, Mailbox]) -> None:
    a, b = pair
    got: list[Message] = []
    reader = threading.Thread(target=lambda: got.extend(receive(b, 1)))
    reader.start()
    a.send(b.address, Shutdown())
    a.flush()
    reader.join(10)
    assert got == [Shutdown()]


def test_sending_to_nobody_is_no_error(pair: tuple[Mailbox, Mailbox]) -> None:
    a, b = pair
    a.send(b.address + "9", Shutdown())
    a.flush()
    a.forget(b.address + "9")
    assert a.poll(0) == []


def test_bytes_over_the_wire_grow_with_frames_not_with_time() -> None:
    sizes = [
        sum(len(bytes(f)) for f in encode([chunk(codes=np.zeros((1, 16), np.int32)) for _ in range(n)]))
        for n in (10, 20, 40)
    ]
    assert sizes[2] - sizes[1] == pytest.approx(2 * (sizes[1] - sizes[0]), rel=0.1)


def test_what_is_no_array_does_not_travel() -> None:
    with pytest.raises(NotImplementedError):
        encode([chunk(codes={1, 2}.__class__)])  # type: ignore[arg-type]


def test_decoding_gives_views_of_the_frames() -> None:
    frames = encode([chunk(pcm=np.float32([1, 2]))])
    (message,) = decode(frames)
    assert isinstance(message, Deliver)
    np.testing.assert_array_equal(message.chunk.arrays["pcm"], [1, 2])
