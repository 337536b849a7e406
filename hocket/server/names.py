"""Names that clients use for models and voices, and what they stand for here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hocket.core import ModelInfo, Voice
from hocket.errors import InvalidRequest, NotFound, clip
from hocket.server.settings import ServerSettings

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


def find_voice(wanted: str | None, info: ModelInfo, aliases: Mapping[str, str]) -> str | None:
    """The id of the voice that a client means: a speaker of the model, else an alias, whatever the case.

    None where the model's own default is meant, and for OpenAI's names where it has no speakers to spread
    them over. Raises InvalidRequest `voice_not_found`, naming the voices there are.
    """
    name = (wanted or "default").casefold()
    speakers = {voice.id.casefold(): voice.id for voice in info.voices}
    speakers |= {voice.name.casefold(): voice.id for voice in info.voices}
    if name in speakers:
        return speakers[name]
    own = {alias.casefold(): target for alias, target in aliases.items()}
    if name in own:
        target = own[name].casefold()
        if target in speakers:
            return speakers[target]
        name = target
    if name == "default":
        return info.default_voice
    if name in OPENAI_VOICES:
        return _stand_in(OPENAI_VOICES.index(name), info.voices) or info.default_voice
    known = [voice.id for voice in info.voices] or ["default"]
    more = f" and {len(known) - _SHOWN} more" if len(known) > _SHOWN else ""
    message = f"voice '{clip(wanted)}' is not known; known voices: {', '.join(known[:_SHOWN])}{more}"
    raise InvalidRequest(message, param="voice", code="voice_not_found")


def _stand_in(index: int, voices: Sequence[Voice]) -> str | None:
    return voices[index % len(voices)].id if voices else None
