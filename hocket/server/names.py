"""Names that clients use for models and voices, and what they stand for here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from hocket.core import ModelInfo, Voice
from hocket.errors import InvalidRequest, NotFound, clip
from hocket.server.settings import ServerSettings
from hocket.server.voice_store import StoredVoice

# Names that OpenAI's clients send without being asked: they stand for the speech model served.
MODEL_ALIASES = ("tts-1", "tts-1-hd", "gpt-4o-mini-tts")

OPENAI_VOICES = (
    "alloy", "ash", "ballad", "coral", "echo", "fable", "onyx",
    "nova", "sage", "shimmer", "verse", "marin", "cedar",
)  # fmt: skip

_SHOWN = 20


def check_model(wanted: str | None, settings: ServerSettings) -> None:
    """Accept a name of the model served, or None; raise NotFound for any other."""
    accepted = {*settings.served_names, settings.model, settings.checkpoint_name, *MODEL_ALIASES}
    if wanted is not None and wanted not in accepted:
        message = f"model '{clip(wanted)}' is not served here; served: {settings.name}"
        raise NotFound(message, param="model", code="model_not_found")


class Uploaded(Protocol):
    """Voices that clients have stored; see `hocket.server.voice_store.VoiceStore`."""

    def find(self, name: str) -> StoredVoice | None: ...

    def names(self) -> list[str]: ...


def is_speaker(wanted: str | None, info: ModelInfo) -> bool:
    """Whether a name is one of the model's own: a speaker, or its default."""
    name = (wanted or "default").casefold()
    return name == "default" or name in _speakers(info)


def find_voice(
    wanted: str | None, info: ModelInfo, aliases: Mapping[str, str], uploaded: Uploaded | None = None
) -> StoredVoice | str | None:
    """The voice that a client means: an uploaded one, a speaker of the model (its id), else an alias.

    Case does not matter. The model's own names come before an uploaded one, which cannot be given them,
    but may have been uploaded to another model's server. None where the model's default is meant, and for
    OpenAI's names where it has no speakers to spread them over. Raises InvalidRequest `voice_not_found`,
    naming the voices there are.
    """
    name = (wanted or "default").casefold()
    speakers = _speakers(info)
    if name in speakers:
        return speakers[name]
    if name != "default" and uploaded is not None and (stored := uploaded.find(name)) is not None:
        return stored
    own = {alias.casefold(): target for alias, target in aliases.items()}
    if name in own:
        target = own[name].casefold()
        if target in speakers:
            return speakers[target]
        if uploaded is not None and (stored := uploaded.find(target)) is not None:
            return stored
        name = target
    if name == "default":
        return info.default_voice
    if name in OPENAI_VOICES:
        return _stand_in(OPENAI_VOICES.index(name), info.voices) or info.default_voice
    known = [*(uploaded.names() if uploaded is not None else ()), *(voice.id for voice in info.voices)]
    known = known or ["default"]
    more = f" and {len(known) - _SHOWN} more" if len(known) > _SHOWN else ""
    names = ", ".join(clip(each, 32) for each in known[:_SHOWN])
    message = f"voice '{clip(wanted)}' is not known; known voices: {names}{more}"
    raise InvalidRequest(message, param="voice", code="voice_not_found")


def _speakers(info: ModelInfo) -> dict[str, str]:
    """The ids of the model's speakers, by all their names."""
    return {name.casefold(): voice.id for voice in info.voices for name in (voice.id, voice.name)}


def _stand_in(index: int, voices: Sequence[Voice]) -> str | None:
    return voices[index % len(voices)].id if voices else None
