"""Media files opened by libav: their type is decided by the content, among those that are allowed."""

from __future__ import annotations

from typing import Any, BinaryIO

import av
from av.container import InputContainer

# PyAV reads tags as it opens a file. Before version 19 it fails at those that are not UTF-8, unless told.
_TAGS: dict[str, Any] = {"metadata_errors": "replace"} if int(av.__version__.partition(".")[0]) < 19 else {}


def open_container(file: BinaryIO, containers: str, codecs: str) -> InputContainer:
    """`file`, if it is one of `containers`; tracks of other than `codecs` are not decoded.

    Both as libav names them, with commas between: it knows hundreds of formats; some (playlists) open other
    files, many decoders are old and little tested. Raises av.FFmpegError.
    """
    options = {"format_whitelist": containers, "codec_whitelist": codecs}
    return av.open(file, "r", container_options=options, **_TAGS)
