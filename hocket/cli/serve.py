"""`hocket serve`: the HTTP server, from loading to the end of the last request.

The port answers from the start: `/live` at once, `/ready` when the model is loaded. The first SIGTERM or
SIGINT stops new work, lets what runs finish for `--drain-timeout`, and exits with 0; the second exits at
once.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from hocket.cli.folders import data_folder
from hocket.cli.report import Debug, note, pairs_of, progress, reports_errors, settings_of
from hocket.errors import InvalidRequest, StartupError, clip

if TYPE_CHECKING:
    from hocket.engine.client import AsyncEngine
    from hocket.server.settings import ServerSettings

_Format = Literal["mp3", "opus", "aac", "flac", "wav", "pcm"]

_ABORT_S = 2.0  # for answers to aborted requests to leave
_KEEP_ALIVE_S = 30
_WS_PING_S = 20
_WS_BYTES = 16 << 20  # of one message: a configuration with a reference of 10 MiB in base64


@reports_errors
def serve(
    model: Annotated[str | None, typer.Argument(help="Folder, or name on a hub.")] = None,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free port.")] = 8000,
    profile: Annotated[str | None, typer.Option(help="Name or path of a profile.")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="stage.field=value: a change of the profile.")
    ] = None,
    max_waiting: Annotated[
        int | None, typer.Option(min=0, help="Requests that may queue before new ones get 503.")
    ] = None,
    served_name: Annotated[
        list[str] | None, typer.Option(help="Name of the model for clients; may be repeated.")
    ] = None,
    voice_alias: Annotated[
        list[str] | None, typer.Option(help="name=voice: another name for a voice; may be repeated.")
    ] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(envvar="HOCKET_API_KEY", help="Key that clients need; may be repeated."),
    ] = None,
    admin_key: Annotated[
        list[str] | None,
        typer.Option(envvar="HOCKET_ADMIN_KEY", help="Key for /metrics and /admin; may be repeated."),
    ] = None,
    public_listings: Annotated[
        bool, typer.Option("--public-listings", help="List models and voices to those without a key.")
    ] = False,
    cors_origin: Annotated[
        list[str] | None, typer.Option(help="Origin whose pages may call the server; may be repeated.")
    ] = None,
    default_response_format: Annotated[_Format, typer.Option(help="Where a request names none.")] = "mp3",
    pcm_native_rate: Annotated[
        bool, typer.Option("--pcm-native-rate", help="Send pcm at the model's rate, not at 24 kHz.")
    ] = False,
    empty_input: Annotated[
        Literal["error", "silence"], typer.Option(help="Answer to a text with nothing to say.")
    ] = "error",
    voices_dir: Annotated[
        Path | None, typer.Option(envvar="HOCKET_VOICES", help="Folder of uploaded voices.")
    ] = None,
    max_voices: Annotated[int, typer.Option(min=0, help="Voices that may be uploaded.")] = 1000,
    no_consent: Annotated[
        bool, typer.Option("--no-consent", help="Take voices without a word on consent.")
    ] = False,
    allow_media_url: Annotated[
        bool, typer.Option("--allow-media-url", help="Fetch references from public http(s) addresses.")
    ] = False,
    allow_media_host: Annotated[
        list[str] | None, typer.Option(help="Host to fetch from whatever its address; may be repeated.")
    ] = None,
    media_dir: Annotated[
        Path | None, typer.Option(help="Folder whose files requests may name as references.")
    ] = None,
    max_batch_items: Annotated[int, typer.Option(min=1)] = 32,
    max_ws: Annotated[int, typer.Option(min=0, help="WebSockets that may be open.")] = 1024,
    ws_idle: Annotated[float, typer.Option(min=0.001, help="Seconds a WebSocket may be idle.")] = 30.0,
    max_body_mib: Annotated[int, typer.Option(min=1)] = 64,
    max_input_chars: Annotated[int, typer.Option(min=1)] = 100_000,
    max_instructions_chars: Annotated[int, typer.Option(min=1)] = 500,
    request_timeout: Annotated[float, typer.Option(min=0.001, help="Seconds to the first audio.")] = 600.0,
    write_timeout: Annotated[
        float, typer.Option(min=0.001, help="Seconds a client may take no bytes.")
    ] = 60.0,
    stall_timeout: Annotated[float, typer.Option(min=0.001, help="Seconds a stage may stand still.")] = 30.0,
    drain_timeout: Annotated[float, typer.Option(min=0, help="Seconds to finish what runs.")] = 30.0,
    debug: Debug = False,
) -> None:
    """Serve a model over HTTP."""
    overrides = settings_of(settings or [])
    aliases = pairs_of("--voice-alias", voice_alias or [])
    for option, folder in (("--media-dir", media_dir), ("--voices-dir", voices_dir)):
        if folder is not None and not folder.is_dir() and (option == "--media-dir" or folder.exists()):
            raise InvalidRequest(f"{option} {clip(folder)!r} is no folder; give one, or leave the option out")
    with _listen(host, port) as listener:
        # Imported here: what comes before should not wait for PyTorch.
        from hocket.cli.bundled import NAME, bundled_model
        from hocket.engine.client import AsyncEngine
        from hocket.server.settings import ServerSettings

        if model is None:
            model = bundled_model()
            served_name = served_name or [NAME]
        options = ServerSettings(
            model=model,
            served_names=tuple(served_name or ()),
            api_keys=tuple(api_key or ()),
            admin_keys=tuple(admin_key or ()),
            public_listings=public_listings,
            cors_origins=tuple(cors_origin or ()),
            default_format=default_response_format,
            pcm_native_rate=pcm_native_rate,
            voice_aliases=aliases,
            empty_input=empty_input,
            voices_dir=voices_dir or data_folder() / "voices",
            max_voices=max_voices,
            consent_required=not no_consent,
            allow_media_url=allow_media_url or bool(allow_media_host),
            allow_media_hosts=tuple(allow_media_host or ()),
            media_dir=media_dir,
            max_batch_items=max_batch_items,
            max_ws=max_ws,
            ws_idle_s=ws_idle,
            max_body_mib=max_body_mib,
            max_input_chars=max_input_chars,
            max_instructions_chars=max_instructions_chars,
            request_timeout_s=request_timeout,
            write_timeout_s=write_timeout,
            stall_timeout_s=stall_timeout,
        )
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
        logging.getLogger("uvicorn").setLevel(logging.WARNING)
        sys.setswitchinterval(
            0.0005
        )  # chunks come in by another thread, which a busy event loop keeps waiting
        engine = AsyncEngine(model, profile=profile, overrides=overrides, max_waiting=max_waiting)
        asyncio.run(_run(engine, options, listener, drain_timeout))


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=2048)
        # Connections inherit it. Else the kernel holds a first chunk that follows the headers until the
        # client has acknowledged them, which clients put off by 40 ms.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listener
    except OSError as error:
        message = f"cannot listen on {host}:{port}: {error.strerror}; choose another --host or --port"
        raise StartupError(message) from error


async def _run(
    engine: AsyncEngine, settings: ServerSettings, listener: socket.socket, drain_timeout_s: float
) -> None:
    """Serve until told to stop. Raises StartupError if the model cannot be loaded."""
    import uvicorn

    from hocket.server.app import create_app
    from hocket.server.protocol import Protocol

    class Server(uvicorn.Server):
        @contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield  # signals mean a drain here, not an exit

    app = create_app(engine, settings)
    config = uvicorn.Config(
        app,
        http=Protocol,
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        ws_ping_interval=_WS_PING_S,
        ws_ping_timeout=_WS_PING_S,
        ws_max_size=_WS_BYTES,
        ws_per_message_deflate=False,  # sound does not get smaller, and each connection would cost memory
        timeout_graceful_shutdown=int(_ABORT_S),
    )
    server = Server(config)
    stop = asyncio.Event()
    _on_signal(stop)
    host, port = listener.getsockname()[:2]
    address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    http = asyncio.create_task(server.serve(sockets=[listener]))
    asked = asyncio.create_task(stop.wait())
    with progress(f"loading {settings.name}"):
        note(f"{address} answers; loading {settings.name}")
        started = asyncio.create_task(engine.start())
        await asyncio.wait({started, http, asked}, return_when=asyncio.FIRST_COMPLETED)
    if not started.done():
        await engine.close()
        os._exit(0)  # a download runs in a thread, which cannot be interrupted
    try:
        await started
        note(f"{address} is ready")
        await asyncio.wait({http, asked}, return_when=asyncio.FIRST_COMPLETED)
        if stop.is_set():
            app.state.serving.draining = True
            note(f"stopping: {len(app.state.serving.requests.running)} requests to finish")
            await _drain(engine, app.state.serving.requests.running, drain_timeout_s)
    finally:
        asked.cancel()
        server.should_exit = True
        await http
        if not started.cancelled() and started.exception() is None:
            await engine.close()


async def _drain(engine: AsyncEngine, running: dict[str, object], timeout_s: float) -> None:
    """Let `running`, by job, come to an end; abort what has not after `timeout_s`."""
    await _until_empty(running, timeout_s)
    for job in list(running):
        await engine.abort(job)
    await _until_empty(running, _ABORT_S)


async def _until_empty(running: dict[str, object], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while running and time.monotonic() < deadline:
        await asyncio.sleep(0.05)


def _on_signal(stop: asyncio.Event) -> None:
    """Set `stop` at the first SIGTERM or SIGINT; leave at the second."""
    loop = asyncio.get_running_loop()

    def act() -> None:
        if stop.is_set():
            os._exit(1)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        try:
            loop.add_signal_handler(number, act)
        except NotImplementedError:  # Windows
            signal.signal(number, lambda *_: loop.call_soon_threadsafe(act))
