"""Reference recordings by URL and path: what may be read, what not, and that reading blocks nobody."""

from __future__ import annotations

import base64
import os
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

import hocket.audio.decode
import hocket.server.fetch
from hocket.audio.wav import to_s16, wav_header
from hocket.server import body as body_module
from hocket.server import references
from hocket.server.fetch import is_public

SPEECH = "/v1/audio/speech"
WAIT_S = 10


def wav(seconds: float, rate: int = 16000) -> bytes:
    samples = (0.5 * np.sin(np.arange(int(rate * seconds)) / 20)).astype(np.float32)
    return wav_header(rate, len(samples)) + to_s16(samples).tobytes()


CLIP = wav(2)


class Pages(BaseHTTPRequestHandler):
    """What is asked for says what comes: a clip, N redirects to it (/hop/N), one to a URL (/to?URL), …"""

    asked: list[tuple[str, str]]
    stop = threading.Event()

    def do_GET(self) -> None:
        type(self).asked.append((self.path, self.headers["Host"]))
        what, _, rest = self.path[1:].partition("/")
        if self.path.startswith("/to?"):
            self._redirect(self.path[4:])
        elif what == "hop":
            self._redirect(f"/hop/{int(rest) - 1}" if int(rest) > 1 else "/clip")
        elif what == "big":
            self._send(b"", length=(10 << 20) + 1)
        elif what == "endless":
            self._send(bytes(11 << 20), length=None)
        elif what == "slow":
            self._send(CLIP[:99], length=len(CLIP))
            self.wfile.flush()
            self.stop.wait(WAIT_S)
        elif what == "cut":
            self._send(CLIP[:99], length=len(CLIP))
        elif what == "chunked":
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for start in range(0, len(CLIP), 1000):
                piece = CLIP[start : start + 1000]
                self.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            self.wfile.write(b"0\r\n\r\n")
        elif what == "status":
            self.send_response(int(rest))
            self.end_headers()
        elif what == "text":
            self._send(b"hello", length=5)
        else:
            self._send(CLIP, length=len(CLIP))

    def _redirect(self, where: str) -> None:
        self.send_response(302)
        self.send_header("Location", where)
        self.end_headers()

    def _send(self, body: bytes, length: int | None) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/plain")
        if length is not None:
            self.send_header("Content-Length", str(length))
        self.end_headers()
        try:
            self.wfile.write(body)
        except OSError:
            self.close_connection = True

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def pages() -> Iterator[str]:
    Pages.asked = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Pages)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"127.0.0.1:{server.server_port}"
    Pages.stop.set()
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def client(app: Callable[..., FastAPI]) -> TestClient:
    """May fetch, from the local machine too."""
    return TestClient(app(allow_media_url=True, allow_media_hosts=("127.0.0.1",)))


def ask(client: TestClient, url: str, **fields: Any) -> Any:
    return client.post(SPEECH, json={"input": "a", "ref_audio": url, "ref_text": "b", **fields})


@pytest.mark.parametrize("path", ["clip", "chunked", "hop/1", "hop/3", "clip?a=b%20c&d=ü", "%C3%A4/ö"])
def test_url_is_fetched(client: TestClient, engine: Any, pages: str, path: str) -> None:
    response = ask(client, f"http://{pages}/{path}")
    assert response.status_code == 200, response.text
    assert len(engine.requests[0].reference.samples) == 32000
    assert Pages.asked[-1][1] == pages


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("hop/4", "more than 3 redirects"),
        ("status/404", "answered 404"),
        ("status/500", "answered 500"),
        ("status/302", "leads nowhere"),
        ("big", "larger than 10 MiB"),
        ("endless", "larger than 10 MiB"),
        ("cut", "cut short"),
        ("text", "cannot be decoded"),
        ("to?ftp://127.0.0.1/clip", "not an http(s) URL"),
        ("to?http://u:p@127.0.0.1/clip", "not an http(s) URL"),
    ],
)
def test_bad_answer_is_a_bad_reference(client: TestClient, pages: str, path: str, says: str) -> None:
    response = ask(client, f"http://{pages}/{path}")
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, "bad_reference", "ref_audio")
    assert says in error["message"]


def test_slow_server_is_given_up(client: TestClient, pages: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client.app.state.serving.references._fetcher, "_timeout_s", 0.2)
    assert "within 0.2 s" in ask(client, f"http://{pages}/slow").json()["error"]["message"]


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:1/a", "http://127.0.0.1:99999/a", "http://no-such-host.invalid/a", "http://",
        "http:///a", "http://[::1/a", "http://a b/", "http://\udc00/".encode("utf-8", "replace").decode(),
        "http://" + "a" * 300 + ".example/", "https://127.0.0.1:1/",
    ],
)  # fmt: skip
def test_url_that_leads_nowhere_is_a_bad_reference(client: TestClient, url: str) -> None:
    response = ask(client, url)
    assert (response.status_code, response.json()["error"]["code"]) == (400, "bad_reference")


@pytest.mark.parametrize("path", ["clip", "to?http://127.0.0.1/"])
def test_private_address_is_forbidden_by_default(app: Callable[..., FastAPI], pages: str, path: str) -> None:
    client = TestClient(app(allow_media_url=True))
    before = len(Pages.asked)
    for host in (pages, pages.replace("127.0.0.1", "localhost"), pages.replace("127.0.0.1", "0x7f.1")):
        response = ask(client, f"http://{host}/{path}")
        assert (response.status_code, response.json()["error"]["code"]) == (403, "forbidden_source")
    assert len(Pages.asked) == before


@pytest.mark.parametrize("target", ["http://localhost:1/", "http://10.0.0.1/", "http://[::ffff:127.0.0.1]/"])
def test_redirect_is_checked_again(client: TestClient, pages: str, target: str) -> None:
    assert ask(client, f"http://{pages}/to?{target}").status_code == 403


def test_name_is_resolved_once_and_the_connection_goes_there(
    app: Callable[..., FastAPI], pages: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name server that answers with a public address first and a private one later gains nothing."""
    port = int(pages.partition(":")[2])
    lookups: list[str] = []
    connected: list[str] = []
    real_lookup, real_connect = socket.getaddrinfo, hocket.server.fetch.asyncio.open_connection

    def lookup(host: Any, *args: Any, **kwargs: Any) -> Any:
        if host != "rebind.example":
            return real_lookup(host, *args, **kwargs)
        lookups.append(host)
        address = "127.0.0.1" if len(lookups) > 1 else "93.184.215.14"
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port))]

    async def connect(host: str, *args: Any, **kwargs: Any) -> Any:
        connected.append(host)
        return await real_connect("127.0.0.1", *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    monkeypatch.setattr(hocket.server.fetch.asyncio, "open_connection", connect)
    client = TestClient(app(allow_media_url=True))
    assert ask(client, f"http://rebind.example:{port}/clip").status_code == 200
    assert (lookups, connected) == (["rebind.example"], ["93.184.215.14"])
    assert Pages.asked[-1][1] == f"rebind.example:{port}"
    assert ask(client, f"http://rebind.example:{port}/clip").status_code == 403


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("93.184.215.14", True), ("2606:2800:21f:cb07::1", True), ("64:ff9b::5db8:d70e", True),
        ("127.0.0.1", False), ("127.8.8.8", False), ("0.0.0.0", False), ("10.1.2.3", False),
        ("172.16.0.1", False), ("192.168.1.1", False), ("169.254.169.254", False), ("100.64.0.1", False),
        ("100.100.100.200", False), ("224.0.0.1", False), ("255.255.255.255", False), ("240.0.0.1", False),
        ("192.0.2.1", False), ("198.18.0.1", False), ("::", False), ("::1", False), ("fe80::1", False),
        ("fe80::1%eth0", False), ("fc00::1", False), ("fd00:ec2::254", False), ("ff02::1", False),
        ("fec0::1", False), ("::ffff:127.0.0.1", False), ("::ffff:93.184.215.14", False),
        ("64:ff9b::7f00:1", False), ("2002:7f00:1::", False), ("2002:a00:1::", False), ("nonsense", False),
    ],
)  # fmt: skip
def test_addresses(address: str, public: bool) -> None:
    assert is_public(address) is public


# --- paths -------------------------------------------------------------------------------------


@pytest.fixture
def media(tmp_path: Path) -> Path:
    folder = tmp_path / "media"
    (folder / "deep").mkdir(parents=True)
    (folder / "clip one.wav").write_bytes(CLIP)
    (folder / "deep" / "clip.wav").write_bytes(CLIP)
    (folder / "inside.wav").symlink_to(folder / "deep" / "clip.wav")
    (tmp_path / "secret.wav").write_bytes(CLIP)
    (folder / "outside.wav").symlink_to(tmp_path / "secret.wav")
    (folder / "circle").symlink_to(folder / "circle")
    (folder / "huge.wav").write_bytes(bytes((10 << 20) + 1))
    (folder / "empty").mkdir()
    os.mkfifo(folder / "pipe")
    return folder


def by_path(client: TestClient, path: str) -> Any:
    return client.post(SPEECH, json={"input": "a", "references": [{"audio_path": path, "text": "b"}]})


def test_file_below_the_media_folder_is_read(app: Callable[..., FastAPI], engine: Any, media: Path) -> None:
    client = TestClient(app(media_dir=media))
    inside = media / "deep" / "clip.wav"
    for path in ("deep/clip.wav", str(inside), "deep/../inside.wav", inside.as_uri(), "clip one.wav"):
        assert by_path(client, path).status_code == 200, path
    for url in (inside.as_uri(), f"file://localhost{inside}", (media / "clip one.wav").as_uri()):
        assert ask(client, url).status_code == 200, url
    assert len(engine.requests) == 8


@pytest.mark.parametrize(
    "path",
    [
        "outside.wav", "../secret.wav", "deep/../../secret.wav", "{tmp}/secret.wav", "/etc/passwd", "missing",
        "circle", "pipe", "empty", "", ".", "deep/clip.wav/x", "a\0b", "x" * 5000, "file:///etc/passwd",
        "file://otherhost/clip.wav", "file:///%2e%2e/%2e%2e/etc/passwd", "file:", "file://[",
    ],
)  # fmt: skip
def test_what_is_outside_or_missing_gets_one_answer(
    app: Callable[..., FastAPI], media: Path, path: str
) -> None:
    response = by_path(TestClient(app(media_dir=media)), path.replace("{tmp}", str(media.parent)))
    error = response.json()["error"]
    if not path:
        assert (response.status_code, error["code"]) == (400, "missing_field")
        return
    assert (response.status_code, error["code"]) == (403, "forbidden_source")
    expected = "'references.0.audio_path' names a place that this server may not read; send a data:"
    assert error["message"].startswith(expected)


def test_large_file_is_refused(app: Callable[..., FastAPI], media: Path) -> None:
    response = by_path(TestClient(app(media_dir=media)), "huge.wav")
    assert (response.status_code, response.json()["error"]["code"]) == (400, "bad_reference")


def test_bare_path_is_a_locator_only_where_a_path_is_asked_for(
    app: Callable[..., FastAPI], media: Path
) -> None:
    client = TestClient(app(media_dir=media))
    for body in ({"ref_audio": "deep/clip.wav"}, {"references": [{"audio": "deep/clip.wav"}]}):
        response = client.post(SPEECH, json={"input": "a", **body})
        assert (response.status_code, response.json()["error"]["code"]) == (400, "bad_reference")


# --- cost --------------------------------------------------------------------------------------


def data_url(data: bytes) -> str:
    return "data:audio/wav;base64," + base64.b64encode(data).decode()


def test_heavy_calls_run_off_the_event_loop(
    serve: Callable[..., Any], listener: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """JSON, base64, decoding and the checks of a large reference: none of it on the loop's thread."""
    running = serve()
    loop_thread = listener.run(_thread())
    seen: dict[str, set[int]] = {}

    def watched(module: Any, name: str) -> None:
        real = getattr(module, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if name != "decode" or module is not body_module or len(args[0]) > 1 << 20:
                seen.setdefault(f"{module.__name__}.{name}", set()).add(threading.get_ident())
            return real(*args, **kwargs)

        monkeypatch.setattr(module, name, call)

    watched(body_module, "decode")
    for name in ("parse_data_url", "decode", "check_reference"):
        watched(references, name)
    body = {"input": "a", "ref_audio": data_url(wav(29.9, 48000)), "ref_text": "b"}
    assert running.http.post(SPEECH, json=body).status_code == 200
    assert set(seen) == {
        "hocket.server.body.decode",
        "hocket.server.references.parse_data_url",
        "hocket.server.references.decode",
        "hocket.server.references.check_reference",
    }
    assert all(loop_thread not in threads for threads in seen.values())


async def _thread() -> int:
    return threading.get_ident()


def test_base64_is_decoded_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """One call must not hold the interpreter for the whole of a large recording."""
    sizes: list[int] = []
    real = base64.b64decode
    monkeypatch.setattr(
        hocket.audio.decode.base64, "b64decode", lambda s, **k: sizes.append(len(s)) or real(s, **k)
    )
    data = os.urandom(5_000_001)
    assert hocket.audio.decode.parse_data_url(data_url(data), param="x") == data
    assert max(sizes) <= 1 << 20


def test_recording_that_comes_again_is_not_decoded_again(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    count: list[int] = []
    real = references.decode
    monkeypatch.setattr(references, "decode", lambda *a, **k: count.append(1) or real(*a, **k))
    for _ in range(3):
        assert ask(client, data_url(CLIP)).status_code == 200
    assert ask(client, data_url(wav(3))).status_code == 200
    assert len(count) == 2


def test_kept_recordings_are_bounded(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(references, "_KEPT_BYTES", 300_000)
    for seconds in (2, 2.1, 2.2, 2.3):
        assert ask(client, data_url(wav(seconds))).status_code == 200
    kept = client.app.state.serving.references._kept
    assert 0 < sum(samples.nbytes for samples, _ in kept.values()) <= 300_000


def test_client_that_leaves_during_the_download_ends_it(
    serve: Callable[..., Any], engine: Any, pages: str
) -> None:
    running = serve(allow_media_url=True, allow_media_hosts=("127.0.0.1",))
    body = b'{"input": "a", "ref_text": "b", "ref_audio": "http://%b/slow"}' % pages.encode()
    host, port = running.url.removeprefix("http://").split(":")
    before = len(Pages.asked)
    with socket.create_connection((host, int(port))) as connection:
        head = f"POST {SPEECH} HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        while len(Pages.asked) == before:
            running.http.get("/live")
    for _ in range(5000):
        if not running.app.state.serving.requests.running:
            return
        running.http.get("/live")
    raise AssertionError("the download went on")
