"""The voices that can be asked for by name: the model's own, and those that clients upload."""

from __future__ import annotations

import unicodedata
from collections.abc import AsyncGenerator
from typing import Any, NoReturn

import msgspec
import numpy as np
from anyio import to_thread
from fastapi import APIRouter, Request
from starlette.datastructures import FormData, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from hocket.audio.decode import check_reference, decode
from hocket.audio.resample import resample
from hocket.audio.wav import Samples
from hocket.core import ModelInfo
from hocket.errors import InvalidRequest, NotFound, Unsupported, clip
from hocket.server.errors import Refused
from hocket.server.names import is_speaker
from hocket.server.openapi import ERRORS
from hocket.server.references import MAX_BYTES
from hocket.server.serving import Serving
from hocket.server.voice_store import VoiceRecord, VoiceStore

_FORM_BYTES = 1 << 20  # of everything in the form but the recording
_NAME_CHARS = 64
_CONSENT_CHARS = 256
_TEXT_CHARS = 4096
_MAX_DIM = 8192
_MAX_RATE_HZ = 48000  # a higher rate is of no use to any model, and is not stored


def router(serving: Serving) -> APIRouter:
    """The routes of this resource."""
    router = APIRouter(tags=["voices"], responses=ERRORS)

    @router.get("/v1/audio/voices")
    async def voices(legacy: bool = False, names_only: bool = False) -> dict[str, Any]:
        """All voices; `legacy` gives `voices` as plain names, `names_only` the uploaded ones' names alone."""
        known = serving.check_open().voices
        store = serving.voices
        records = [] if store is None else await to_thread.run_sync(store.records)
        if names_only:
            return {"uploaded_voice_names": [record.name for record in records]}
        entries = [
            {"id": voice.id, "name": voice.name, "kind": "builtin", "languages": list(voice.languages)}
            for voice in known
        ]
        entries += [{"id": record.name, "name": record.name, "kind": "uploaded"} for record in records]
        return {
            "object": "list",
            "voices": [entry["id"] for entry in entries] if legacy else entries,
            "data": entries,
            "uploaded_voices": [_entry(record) for record in records],
        }

    @router.post("/v1/audio/voices", openapi_extra=_FORM)
    async def upload(request: Request) -> Response:
        """Store a voice: a recording of 1 to 30 s, or a speaker embedding."""
        info = serving.check_open()
        store = _store(serving)
        try:
            form = await _form(request)
        except ClientDisconnect:
            return Response(status_code=499)  # nobody is there to read it
        try:
            name, record = _described(form, info, consent_required=serving.settings.consent_required)
            replace = _flag(form, "replace", default=True)
            record, data = await _sound(form, record, serving)
        finally:
            await form.close()
        record = await to_thread.run_sync(lambda: store.save(record, data, replace=replace))
        answer = {
            "success": True,
            "id": name,
            "object": "audio.voice",
            "type": "audio_sample",
            "name": name,
            "created_at": record.created_at,
            "voice": {"id": name, "kind": "uploaded", **_entry(record)},
        }
        return Response(msgspec.json.encode(answer), media_type="application/json")

    @router.get("/v1/audio/voices/{name}")
    async def voice(name: str) -> dict[str, Any]:
        """What is known of one voice. Its recording is never given away."""
        info = serving.check_open()
        folded = name.casefold()
        for speaker in info.voices:
            if folded in (speaker.id.casefold(), speaker.name.casefold()):
                languages = list(speaker.languages)
                return {"id": speaker.id, "name": speaker.name, "kind": "builtin", "languages": languages}
        store = serving.voices
        stored = None if store is None else await to_thread.run_sync(store.find, name)
        if stored is None:
            _unknown(name)
        return {"id": stored.record.name, "kind": "uploaded", **_entry(stored.record)}

    @router.delete("/v1/audio/voices/{name}")
    async def delete(name: str) -> dict[str, Any]:
        """Forget an uploaded voice. Requests that use it already go on."""
        if is_speaker(name, serving.check_open()):
            message = f"voice '{clip(name)}' is the model's own and cannot be deleted"
            raise InvalidRequest(message, param="name", code="voice_builtin")
        if not await to_thread.run_sync(_store(serving).delete, name):
            _unknown(name)
        return {
            "success": True,
            "id": name,
            "object": "audio.voice.deleted",
            "deleted": True,
            "message": f"voice '{name}' is deleted",
        }

    return router


def _store(serving: Serving) -> VoiceStore:
    if serving.voices is None:
        raise Unsupported("this server stores no voices: it has no folder for them", code="voices_disabled")
    return serving.voices


def _unknown(name: str) -> NoReturn:
    raise NotFound(f"no voice '{clip(name)}' is known", param="name", code="voice_not_found")


def _entry(record: VoiceRecord) -> dict[str, Any]:
    shown = (
        "name", "consent", "created_at", "file_size", "mime_type", "ref_text", "speaker_description",
        "language", "embedding_source", "embedding_dim",
    )  # fmt: skip
    return {field: getattr(record, field) for field in shown}


# --- the form of an upload ---------------------------------------------------------------------


async def _form(request: Request) -> FormData:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "multipart/form-data":
        raise InvalidRequest("send the voice as multipart/form-data", code="invalid_multipart")

    async def limited() -> AsyncGenerator[bytes, None]:
        size = 0
        async for piece in request.stream():
            size += len(piece)
            if size > MAX_BYTES + _FORM_BYTES:
                raise _too_large()
            yield piece

    parser = MultiPartParser(
        request.headers, limited(), max_files=2, max_fields=20, max_part_size=_FORM_BYTES
    )
    try:
        return await parser.parse()
    except MultiPartException as error:
        raise InvalidRequest(f"the form is broken: {clip(error.message)}", code="invalid_multipart") from None
    except (UnicodeDecodeError, LookupError, KeyError, ValueError):
        raise InvalidRequest("the form is broken", code="invalid_multipart") from None


def _described(form: FormData, info: ModelInfo, *, consent_required: bool) -> tuple[str, VoiceRecord]:
    name = (_text(form, "name", 4 * _NAME_CHARS) or "").strip()
    if not 1 <= len(name) <= _NAME_CHARS:
        problem = f"must be 1 to {_NAME_CHARS} characters; got {len(name)}"
        raise _invalid("name", problem, "missing_field" if not name else "invalid_name")
    unfit = any(unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp") or c in "/\\" for c in name)
    if unfit or name in (".", ".."):
        raise _invalid("name", "must not be '.' or '..' nor hold / \\ or control characters", "invalid_name")
    if is_speaker(name, info):
        raise _invalid("name", f"'{clip(name)}' is a voice of the model itself", "voice_reserved")
    kind = _text(form, "type", 64) or "audio_sample"
    if kind != "audio_sample":
        raise _invalid("type", f"must be audio_sample; got '{clip(kind)}'", "unsupported_type")
    consent = _text(form, "consent", _CONSENT_CHARS)
    if not consent and consent_required:
        raise _invalid("consent", "is required: say by what right the voice is used", "missing_field")
    return name, VoiceRecord(
        name=name,
        consent=consent,
        ref_text=_text(form, "ref_text", _TEXT_CHARS),
        speaker_description=_text(form, "speaker_description", _TEXT_CHARS),
        language=_text(form, "language", 64),
    )


async def _sound(form: FormData, record: VoiceRecord, serving: Serving) -> tuple[VoiceRecord, Samples]:
    upload, embedding = form.get("audio_sample"), _text(form, "speaker_embedding", _FORM_BYTES)
    if (upload is None) == (embedding is None):
        problem = "is required, or 'speaker_embedding' in its place; give one of them"
        raise _invalid("audio_sample", problem, "missing_field" if upload is None else "invalid_value")
    if embedding is not None:
        vector = _embedding(embedding)
        return msgspec.structs.replace(
            record, embedding_source="direct", embedding_dim=len(vector), file_size=len(embedding)
        ), vector
    if not isinstance(upload, UploadFile):
        raise _invalid("audio_sample", "must be a file", "invalid_value")
    data = await upload.read()
    if len(data) > MAX_BYTES:
        raise _too_large()
    samples, rate = await serving.offload(_decoded, data)
    replaced = msgspec.structs.replace(record, rate_hz=rate, file_size=len(data), mime_type=_mime(data))
    return replaced, samples


def _decoded(data: bytes) -> tuple[Samples, int]:
    try:
        samples, rate = decode(data, param="audio_sample")
    except InvalidRequest as error:
        raise Refused(415, error.message, param="audio_sample", code="unsupported_audio") from None
    check_reference(samples, rate, param="audio_sample")
    if rate > _MAX_RATE_HZ:
        samples, rate = resample(samples, rate, _MAX_RATE_HZ), _MAX_RATE_HZ
    return samples, rate


def _embedding(text: str) -> Samples:
    try:
        numbers = msgspec.json.decode(text, type=list[float])
        with np.errstate(over="ignore"):
            vector = np.array(numbers, np.float32)
    except (msgspec.DecodeError, UnicodeError):
        raise _invalid("speaker_embedding", "must be a JSON list of numbers", "invalid_value") from None
    if not 1 <= len(vector) <= _MAX_DIM or not np.isfinite(vector).all():
        raise _invalid("speaker_embedding", f"must be 1 to {_MAX_DIM} finite numbers", "invalid_value")
    return vector


_SIGNS = (
    (0, b"RIFF", "audio/wav"),
    (0, b"fLaC", "audio/flac"),
    (0, b"OggS", "audio/ogg"),
    (4, b"ftyp", "audio/mp4"),
    (0, b"\x1aE\xdf\xa3", "audio/webm"),
    (0, b"\xff\xf1", "audio/aac"),
    (0, b"\xff\xf9", "audio/aac"),
)


def _mime(data: bytes) -> str:
    """The type of a file that has been decoded; what has none of the signs is MP3."""
    return next((kind for at, sign, kind in _SIGNS if data.startswith(sign, at)), "audio/mpeg")


def _text(form: FormData, name: str, limit: int) -> str | None:
    """A field's text; None where it is left out or empty."""
    value = form.get(name)
    if value is None or value == "":
        return None
    if not isinstance(value, str):
        raise _invalid(name, "must be text, not a file", "invalid_value")
    if len(value) > limit:
        raise _invalid(name, f"has {len(value)} characters; at most {limit} are accepted", "too_long")
    if "\0" in value:
        code = "invalid_name" if name == "name" else "invalid_value"
        raise _invalid(name, "holds a NUL character; remove it", code)
    return value


def _flag(form: FormData, name: str, *, default: bool) -> bool:
    value = (_text(form, name, 16) or str(default)).lower()
    if value not in ("true", "false", "1", "0"):
        raise _invalid(name, f"must be true or false; got '{clip(value)}'", "invalid_value")
    return value in ("true", "1")


def _too_large() -> Refused:
    return Refused(
        413,
        f"the recording is larger than the {MAX_BYTES >> 20} MiB this server accepts",
        param="audio_sample",
        code="file_too_large",
        headers={"Connection": "close"},
    )


def _invalid(param: str, problem: str, code: str) -> InvalidRequest:
    return InvalidRequest(f"'{param}' {problem}", param=param, code=code)


_TEXT = {"type": "string"}
_FORM = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["name"],
                    "properties": {
                        "name": {"type": "string", "minLength": 1, "maxLength": _NAME_CHARS},
                        "consent": {"type": "string", "maxLength": _CONSENT_CHARS},
                        "audio_sample": {"type": "string", "format": "binary"},
                        "speaker_embedding": {"type": "string", "description": "A JSON list of numbers."},
                        "ref_text": _TEXT,
                        "speaker_description": _TEXT,
                        "language": _TEXT,
                        "replace": {"type": "string", "enum": ["true", "false"]},
                        "type": {"type": "string", "enum": ["audio_sample"]},
                    },
                }
            }
        },
    }
}
