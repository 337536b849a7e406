"""What the owner of a server may choose. Every value is a default that a command-line option can change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from hocket.audio.encode import Format


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Options of one HTTP process."""

    model: str  # the path or hub id that is served; its last component is an accepted name
    served_names: tuple[str, ...] = ()  # the first is the one shown; none: the last component of `model`
    api_keys: tuple[str, ...] = ()  # none: open to everybody
    admin_keys: tuple[str, ...] = ()  # for /metrics and /admin/; none: `api_keys`
    public_listings: bool = False  # models and voices may be listed without a key
    cors_origins: tuple[str, ...] = ()

    default_format: Format = "mp3"
    pcm_native_rate: bool = False  # send PCM at the model's rate instead of 24 000 Hz
    voice_aliases: Mapping[str, str] = field(default_factory=dict)
    empty_input: Literal["error", "silence"] = "error"

    voices_dir: Path | None = None  # of uploaded voices; None: none are kept
    max_voices: int = 1000
    consent_required: bool = True  # an uploaded voice comes with a consent
    allow_media_url: bool = False  # references may be http(s) URLs of public addresses
    allow_media_hosts: tuple[str, ...] = ()  # ... and of these hosts, whatever their address
    media_dir: Path | None = None  # references may be files below it

    max_batch_items: int = 32
    max_ws: int = 1024  # open WebSockets
    ws_idle_s: float = 30.0  # a WebSocket without a message and without sound under way is closed
    ws_config_s: float = 10.0  # for the first message of a WebSocket
    max_body_mib: int = 64
    max_input_chars: int = 100_000
    max_instructions_chars: int = 500
    body_timeout_s: float = 60.0  # for the whole body to arrive
    request_timeout_s: float = 600.0  # to the first audio
    write_timeout_s: float = 60.0  # a client that takes no bytes for so long is gone
    stall_timeout_s: float = 30.0  # a stage with work that finishes no step for so long is unhealthy
    wait_comment_s: float = 10.0  # between the comments that keep a waiting event stream open
    kept_results: int = 1024  # finished requests whose outcome can still be asked for

    @property
    def checkpoint_name(self) -> str:
        return self.model.rstrip("/\\").replace("\\", "/").rpartition("/")[2] or self.model

    @property
    def name(self) -> str:
        """The model's name in listings and headers."""
        return self.served_names[0] if self.served_names else self.checkpoint_name
