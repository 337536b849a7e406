"""The body of POST /v1/chat/completions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from hocket.server.speech_body import SpeechOptions, VoiceRef

StopText = Annotated[str, Meta(min_length=1)]
ChatFormat = Literal["wav", "mp3", "flac", "opus", "aac", "pcm16", "pcm"]


class MediaUrl(Struct):
    url: str


class InputAudio(Struct):
    """A recording in base64, as OpenAI's clients send it."""

    data: str
    format: str = "wav"


class ContentPart(Struct):
    """`type` names the field that holds the content: text, image_url, audio_url, video_url, input_audio."""

    type: str
    text: str | None = None
    image_url: str | MediaUrl | None = None
    audio_url: str | MediaUrl | None = None
    video_url: str | MediaUrl | None = None
    input_audio: InputAudio | None = None


class ChatMessage(Struct):
    role: str
    content: str | list[ContentPart] | None = None
    tool_calls: list[dict[str, Any]] | None = None


class ChatAudio(Struct):
    voice: str | VoiceRef | None = None
    format: ChatFormat | None = None


class StreamOptions(Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class MediaOptions(Struct):
    use_audio_in_video: Annotated[bool | None, Meta(description="Hear films, in step with frames.")] = None


class StageSampling(Struct, kw_only=True):
    """How one stage draws."""

    temperature: Annotated[float, Meta(ge=0, le=10)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=1 << 30)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    max_tokens: Annotated[int, Meta(ge=1, le=1 << 30)] | None = None


class ChatBody(SpeechOptions, kw_only=True):
    """POST /v1/chat/completions: OpenAI's fields, and those of a speech request."""

    messages: Annotated[
        list[ChatMessage],
        Meta(
            description="Answered by models that understand; of others, the last one of the user is spoken."
        ),
    ]
    modalities: list[Literal["text", "audio"]] | None = None
    audio: ChatAudio | None = None
    n: int | None = None
    max_tokens: Annotated[int, Meta(ge=1, description="Tokens of text.")] | None = None
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None
    stop: Annotated[
        StopText | Annotated[list[StopText], Meta(max_length=16)] | None,
        Meta(description="Strings before which the text ends."),
    ] = None
    tools: list[dict[str, Any]] | None = None
    mm_processor_kwargs: MediaOptions | None = None
    sampling_params_list: Annotated[
        list[StageSampling] | None, Meta(description="By stage: text, then speech.")
    ] = None
    stream_options: StreamOptions | None = None
    audio_delta: Annotated[
        Literal["audio", "content"] | None, Meta(description="Where chunks carry the audio.")
    ] = None

    @property
    def stops(self) -> list[str]:
        """What `stop` holds."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []
