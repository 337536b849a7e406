"""Uploaded voices on disk, shared by every API process that has the folder.

A voice is one file, put in place by a rename, so that a reader sees the old voice or the new one and nothing
between:

    8 bytes     "hocketv1"
    4 bytes     length of the record, little-endian
    record      JSON, `VoiceRecord`
    payload     float32, little-endian: the samples, or the speaker embedding

Writers take turns by a lock on the folder. Readers look at a file's time, size and number at each lookup, so
what one process writes is what the next request of every other sees. All calls block: they are for threads.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import secrets
import struct
import sys
import tempfile
import threading
import time
import unicodedata
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

import msgspec
import numpy as np

from hocket.audio.wav import Samples
from hocket.errors import InvalidRequest, RequestFailed
from hocket.server.errors import Refused

log = logging.getLogger("hocket.server")

_MAGIC = b"hocketv1"
_MAX_RECORD = 1 << 20
_SUFFIX = ".voice"
_KEPT_BYTES = 128 << 20  # of payloads


class VoiceRecord(msgspec.Struct, kw_only=True):
    """What is known of a voice beside its sound."""

    name: str
    version: str = ""  # another one for each upload
    created_at: int = 0  # Unix time
    consent: str | None = None
    file_size: int = 0  # of the upload, in bytes
    mime_type: str | None = None
    language: str | None = None
    ref_text: str | None = None
    speaker_description: str | None = None
    embedding_source: Literal["audio", "direct"] = "audio"
    embedding_dim: int | None = None  # of an embedding given directly
    rate_hz: int = 0  # of the samples


@dataclass(frozen=True, slots=True)
class StoredVoice:
    record: VoiceRecord
    data: Samples  # float32 [n], read-only: samples at record.rate_hz, or the embedding


_Signature = tuple[int, int, int]  # time, size and number of a file


class VoiceStore:
    """The voices in `folder`, at most `limit`."""

    def __init__(self, folder: Path, limit: int) -> None:
        self._folder = folder
        self._limit = limit
        self._lock = threading.Lock()
        self._records: dict[str, tuple[_Signature, VoiceRecord]] = {}  # by file name
        self._voices: OrderedDict[str, tuple[_Signature, StoredVoice]] = OrderedDict()

    # --- reading ------------------------------------------------------------------------------

    def find(self, name: str) -> StoredVoice | None:
        """The voice of that name, whatever the case."""
        path = self._path(name)
        signature = _signature(path)
        with self._lock:
            kept = self._voices.get(path.name)
            if kept is not None and kept[0] == signature:
                self._voices.move_to_end(path.name)
                return kept[1]
            self._voices.pop(path.name, None)
        if signature is None:
            return None
        try:
            with path.open("rb") as file:
                signature = _signature_of(os.fstat(file.fileno()))
                record = _read_record(file)
                data = np.frombuffer(file.read(), "<f4")
        except (OSError, ValueError) as error:
            _unreadable(path, error)
            return None
        voice = StoredVoice(record, data)
        with self._lock:
            self._voices[path.name] = signature, voice
            while sum(v.data.nbytes for _, v in self._voices.values()) > _KEPT_BYTES:
                self._voices.popitem(last=False)
        return voice

    def records(self) -> list[VoiceRecord]:
        """All voices, oldest first."""
        found: dict[str, tuple[_Signature, VoiceRecord]] = {}
        for entry in self._entries():
            try:
                signature = _signature_of(entry.stat())
                kept = self._records.get(entry.name)
                if kept is None or kept[0] != signature:
                    with open(entry.path, "rb") as file:
                        kept = signature, _read_record(file)
                found[entry.name] = kept
            except (OSError, ValueError) as error:
                _unreadable(Path(entry.path), error)
        self._records = found
        return sorted((record for _, record in found.values()), key=lambda r: (r.created_at, r.name))

    def names(self) -> list[str]:
        return [record.name for record in self.records()]

    def _entries(self) -> list[os.DirEntry[str]]:
        try:
            with os.scandir(self._folder) as entries:
                return [entry for entry in entries if entry.name.endswith(_SUFFIX)]
        except FileNotFoundError:
            return []

    # --- writing ------------------------------------------------------------------------------

    def save(self, record: VoiceRecord, data: Samples, *, replace: bool) -> VoiceRecord:
        """Put a voice in place. -> the record with its version and time.

        Raises Refused 409 `voice_exists` unless `replace`, InvalidRequest `voice_limit` when full, and
        RequestFailed when the folder cannot be written.
        """
        try:
            return self._save(record, data, replace=replace)
        except OSError as error:
            raise self._unwritable(error) from error

    def _save(self, record: VoiceRecord, data: Samples, *, replace: bool) -> VoiceRecord:
        record = msgspec.structs.replace(record, version=secrets.token_hex(8), created_at=int(time.time()))
        path = self._path(record.name)
        head = msgspec.json.encode(record)
        self._folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=self._folder, suffix=".part", delete=False) as file:
            try:
                file.write(_MAGIC + struct.pack("<I", len(head)) + head)
                file.write(np.ascontiguousarray(data, "<f4").data)
                file.flush()
                os.fsync(file.fileno())
                file.close()
                with self._writing():
                    if path.exists():
                        if not replace:
                            raise Refused(
                                409,
                                f"a voice '{record.name}' exists; delete it or send replace=true",
                                param="name",
                                code="voice_exists",
                            )
                    elif len(self._entries()) >= self._limit:
                        raise InvalidRequest(
                            f"{self._limit} voices are stored, and no more are accepted; delete some",
                            param="name",
                            code="voice_limit",
                        )
                    os.replace(file.name, path)
            except BaseException:
                file.close()
                with contextlib.suppress(OSError):
                    os.unlink(file.name)
                raise
        return record

    def delete(self, name: str) -> bool:
        """False if there is no such voice. Whoever has it already keeps it. Raises as `save`."""
        path = self._path(name)
        with self._lock:
            self._voices.pop(path.name, None)
        try:
            with self._writing():
                path.unlink()
        except FileNotFoundError:
            return False
        except OSError as error:
            raise self._unwritable(error) from error
        return True

    def _unwritable(self, error: OSError) -> RequestFailed:
        log.error("voices cannot be written to %s: %s; see --voices-dir", self._folder, error.strerror)
        message = f"the server cannot write its folder of voices: {error.strerror}"
        return RequestFailed(message, code="voices_unwritable")

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """The turn to write, among all threads and processes."""
        with open(self._folder / ".lock", "ab") as file:
            _lock_file(file)
            yield  # closing the file gives the lock back

    def _path(self, name: str) -> Path:
        digest = hashlib.blake2b(folded(name).encode(), digest_size=16).hexdigest()
        return self._folder / f"{digest}{_SUFFIX}"


def folded(name: str) -> str:
    """What two spellings of one name have in common."""
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", name.strip()).casefold())


def _signature(path: Path) -> _Signature | None:
    try:
        return _signature_of(path.stat())
    except OSError:
        return None


def _signature_of(status: os.stat_result) -> _Signature:
    return status.st_mtime_ns, status.st_size, status.st_ino


def _read_record(file: IO[bytes]) -> VoiceRecord:
    head = file.read(12)
    if len(head) < 12 or head[:8] != _MAGIC:
        raise ValueError("not a voice")
    (length,) = struct.unpack("<I", head[8:])
    if length > _MAX_RECORD:
        raise ValueError("not a voice")
    return msgspec.json.decode(file.read(length), type=VoiceRecord)  # its errors are ValueErrors


def _unreadable(path: Path, error: Exception) -> None:
    if not isinstance(error, FileNotFoundError):  # deleted meanwhile
        log.warning("the voice in %s cannot be read: %s", path.name, error)


if sys.platform == "win32":
    import msvcrt

    def _lock_file(file: IO[Any]) -> None:
        msvcrt.locking(file.fileno(), msvcrt.LK_LOCK, 1)

else:
    import fcntl

    def _lock_file(file: IO[Any]) -> None:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX)
