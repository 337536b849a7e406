"""A conversation to what the stages read: ids, positions, recordings and pictures at their final size.

Text goes through the checkpoint's own chat template. Media stand in it as one pad each, which is repeated
here as often as the medium takes positions. Positions have three parts (time, height, width): text counts on
in all three, sound too, pictures span height and width, films time as well, 13 a second.

Equal to transformers 5.17.0: models/qwen3_omni_moe/processing_qwen3_omni_moe.py and
modeling_qwen3_omni_moe.py `get_rope_index`, for one conversation; film frames are thinned and their size is
bounded as qwen-omni-utils 0.0.9 does. One thing is different on purpose: a special token that a user writes
is text here, so that nobody can end his own turn and open another's.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.sandbox
import numpy as np
import torch
import torch.nn.functional as F

from hocket.audio.resample import resample
from hocket.core import Media, Message
from hocket.errors import InvalidRequest, StartupError
from hocket.models.qwen3_omni.audio import HOP, RATE_HZ, SHORTEST
from hocket.models.qwen3_omni.config import ModelConfig, read_json, read_media_config, read_model_config
from hocket.models.qwen3_omni.prompt import AudioInput, Clip, Picture, ThinkerInput, VisionInput
from hocket.tokenizer import TextTokenizer
from hocket.video import chosen_frames

AUDIO_END = "<|audio_end|>"
SHIELD = "\ufdd0"  # a noncharacter, put into what looks like a special token in a user's text
FILM_TOKENS = 128, 768  # least and most positions of a temporal patch
BUDGET_TOKENS = 115_200  # positions of all of a film's frames together: nine tenths of 128,000
STEEPEST = 200  # longer side over shorter


@dataclass(slots=True)
class Reading:
    """A conversation made ready."""

    ids: np.ndarray  # int32 [n]
    positions: np.ndarray | None  # float32 [n, 3]: time, height, width; None: 0, 1, 2, …
    audio: AudioInput | None
    vision: VisionInput | None

    def thinker(self, **options: Any) -> ThinkerInput:
        """What the Thinker is told; options as fields of `ThinkerInput`."""
        return ThinkerInput(
            ids=self.ids.tobytes(),
            positions=b"" if self.positions is None else self.positions.tobytes(),
            audio=[(clip.key, clip.tokens) for clip in self.audio.clips] if self.audio else [],
            vision=[(picture.key, picture.tokens) for picture in self.vision.pictures] if self.vision else [],
            **options,
        )


class Processor:
    """Reads conversations for one checkpoint. Raises StartupError when its files are missing or wrong."""

    def __init__(self, folder: Path) -> None:
        self.config: ModelConfig = read_model_config(folder)
        self.media = read_media_config(folder)
        self.tokenizer = TextTokenizer(folder)
        self.specials = _special_tokens(folder)
        self._named = re.compile("|".join(map(re.escape, sorted(self.specials, key=len, reverse=True))))
        self._template = _read_template(folder)
        t = self.config.thinker_config
        self._pads = {t.audio_token_id: "audio", t.image_token_id: "image", t.video_token_id: "video"}
        for id in (*self._pads, t.audio_start_token_id, self.config.im_end_token_id):
            if id not in self.specials.values():
                raise StartupError(
                    f"{folder}/tokenizer_config.json names no token {id}, which config.json uses"
                )
        if AUDIO_END not in self.specials:
            raise StartupError(f"{folder}/tokenizer_config.json does not name {AUDIO_END}")

    # --- text -----------------------------------------------------------------------------------

    def encode(self, text: str) -> list[int]:
        """Ids of a rendered prompt: special tokens by name, but not those that are shielded."""
        ids: list[int] = []
        at = 0
        for match in self._named.finditer(text):
            ids += self._plain(text[at : match.start()])
            ids.append(self.specials[match.group()])
            at = match.end()
        return ids + self._plain(text[at:])

    def _plain(self, text: str) -> list[int]:
        return self.tokenizer.encode(text.replace(SHIELD, "")) if text else []

    def shield(self, value: Any) -> Any:
        """`value`, text or a tree with text in it, so that no special token in it will be taken for one."""
        if isinstance(value, str):
            return self._named.sub(lambda m: m.group()[0] + SHIELD + m.group()[1:], value.replace(SHIELD, ""))
        if isinstance(value, Mapping):
            return {self.shield(key): self.shield(item) for key, item in value.items()}
        if isinstance(value, Sequence):
            return [self.shield(item) for item in value]
        return value

    def render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """The prompt as the checkpoint's template writes it, ready for `encode`."""
        try:
            text: str = self._template.render(
                messages=[self._as_template(message) for message in messages],
                tools=self.shield(tools) or None,
                add_generation_prompt=True,
            )
        except jinja2.TemplateError as e:  # what templates raise about roles and their order
            raise InvalidRequest(
                f"messages do not fit this model's chat template: {str(e).replace(SHIELD, '')}",
                param="messages",
            ) from e
        return text

    def _as_template(self, message: Message) -> dict[str, Any]:
        parts: list[dict[str, Any]] = []
        for part in message.parts:
            if isinstance(part, Media):
                parts.append({"type": part.kind, part.kind: part.kind})
            else:
                parts.append({"type": "text", "text": self.shield(part)})
        made: dict[str, Any] = {"role": message.role, "content": parts}
        if all(part["type"] == "text" for part in parts):
            made["content"] = "".join(part["text"] for part in parts)
        if message.tool_calls:
            made["tool_calls"] = self.shield(message.tool_calls)
        return made

    # --- a conversation -------------------------------------------------------------------------

    def read(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        audio_in_video: bool = False,
    ) -> Reading:
        """ids, positions and media of a prompt that the assistant is to answer.

        audio_in_video: films are heard too, in step with their frames. Raises InvalidRequest, whose `param`
        names the message and the part.
        """
        media = [
            (part, f"messages.{i}.content.{k}")
            for i, message in enumerate(messages)
            for k, part in enumerate(message.parts)
            if isinstance(part, Media)
        ]
        clips, pictures, seconds = [], [], []
        for part, param in media:
            if part.kind == "audio":
                clips.append(self.clip(part, param))
                continue
            picture, step = self.picture(part, param)
            pictures.append(picture)
            seconds.append(step)
            if part.kind == "video" and audio_in_video:
                if part.sound is None:
                    raise InvalidRequest(
                        f"{param} has no sound, but audio_in_video asks for it; turn that off or send a film"
                        " with sound",
                        param=param,
                    )
                clips.append(self.clip(part.sound, param))
        pads = self.encode(self.render(messages, tools))
        ids, positions = self._lay_out(pads, media, clips, pictures, seconds, audio_in_video)
        linear = bool((positions == np.arange(len(ids))[:, None]).all())
        return Reading(
            ids=ids,
            positions=None if linear else positions,
            audio=AudioInput(clips) if clips else None,
            vision=VisionInput(pictures) if pictures else None,
        )

    # --- media ----------------------------------------------------------------------------------

    def clip(self, part: Media, param: str) -> Clip:
        """A recording at 16 kHz."""
        samples = resample(np.ascontiguousarray(part.data, np.float32), round(part.rate_hz), RATE_HZ)
        if len(samples) < SHORTEST:
            raise InvalidRequest(
                f"{param} is {len(samples) / RATE_HZ * 1000:.0f} ms of sound; at least"
                f" {math.ceil(SHORTEST / RATE_HZ * 1000)} ms are needed",
                param=param,
            )
        content = samples.astype(np.float32).tobytes()
        tokens = self.config.thinker_config.audio_config.tokens(len(samples) // HOP)
        return Clip(samples=content, key=_digest(b"sound", content), tokens=tokens)

    def picture(self, part: Media, param: str) -> tuple[Picture, float]:
        """An image or a film scaled to whole blocks of patches, and the seconds a temporal patch lasts."""
        m = self.media
        film = part.kind == "video"
        frames, rate_hz = (part.data, part.rate_hz) if film else (part.data[None], 0.0)
        if film:
            frames, rate_hz = thin(frames, rate_hz)
        height, width = frames.shape[1:3]
        if max(height, width) > STEEPEST * min(height, width):
            raise InvalidRequest(
                f"{param} is {width} x {height} pixels; no side may be over {STEEPEST} times the other",
                param=param,
            )
        block = m.patch_size * m.merge_size
        least, most = film_pixels(len(frames), block) if film else m.pixels
        size = fitting(height, width, block, least, most)
        pixels = torch.from_numpy(np.ascontiguousarray(frames)).permute(0, 3, 1, 2)
        if size != (height, width):
            # On uint8 as the published processors do it: through floats, or with PIL, pixels differ by one.
            pixels = F.interpolate(pixels, size=size, mode="bicubic", antialias=True)
        content = pixels.contiguous().numpy().tobytes()
        shape = (len(frames), *size)
        grid = (-(-len(frames) // m.temporal_patch_size), size[0] // m.patch_size, size[1] // m.patch_size)
        key = _digest(b"picture", np.array(shape, np.int64).tobytes(), content)
        tokens = math.prod(grid) // m.merge_size**2
        step = m.temporal_patch_size / rate_hz if film else 0.0
        return Picture(frames=content, shape=shape, key=key, grid=grid, tokens=tokens), step

    # --- ids and positions ------------------------------------------------------------------------

    def _lay_out(
        self,
        pads: Sequence[int],
        media: Sequence[tuple[Media, str]],
        clips: Sequence[Clip],
        pictures: Sequence[Picture],
        seconds: Sequence[float],
        heard: bool,
    ) -> tuple[np.ndarray, np.ndarray]:
        """ids int32 [n] and positions float32 [n, 3] of a prompt with one pad a medium."""
        if [self._pads[id] for id in pads if id in self._pads] != [part.kind for part, _ in media]:
            raise InvalidRequest(
                "this model's chat template leaves out media of some messages; send them in user messages",
                param="messages",
            )
        sound = self.config.thinker_config.audio_token_id
        sounds, sights = iter(clips), iter(zip(pictures, seconds, strict=True))
        ids: list[np.ndarray] = []
        rows: list[np.ndarray] = []
        text: list[int] = []  # ids not laid out yet

        def add(some: np.ndarray, places: np.ndarray) -> None:
            start = rows[-1].max() + np.float32(1) if rows else np.float32(0)
            ids.append(some)
            rows.append(places + start)

        def flush() -> None:
            if text:
                add(np.array(text, np.int32), _counted(len(text)))
                text.clear()

        for id in pads:
            kind = self._pads.get(id)
            if kind is None:
                text.append(id)
            elif kind == "audio":
                flush()
                n = next(sounds).tokens
                add(np.full(n, id, np.int32), _counted(n))
            elif kind == "image" or not heard:
                flush()
                places = self._places(*next(sights))
                add(np.full(len(places), id, np.int32), places)
            else:  # the sound's two markers stand inside the film's
                text.append(self.config.thinker_config.audio_start_token_id)
                flush()
                picture, step = next(sights)
                places, n = self._places(picture, step), next(sounds).tokens
                order = self._by_time(picture, step, n)
                both = np.where(order < len(places), id, sound).astype(np.int32)
                add(both, np.concatenate([places, _counted(n)])[order])
                text.append(self.specials[AUDIO_END])
        flush()
        return np.concatenate(ids), np.concatenate(rows)

    def _by_time(self, picture: Picture, step: float, sound: int) -> np.ndarray:
        """Order of a film's rows (0 …) and of its sound's after them; at equal times the film comes first.

        Times in fp64, as the published processor orders ids; the published model orders positions by times
        in fp32, so where rounding decides a tie it gives two rows each other's position.
        """
        rate = self.config.thinker_config.position_id_per_seconds
        time = np.arange(picture.grid[0]) * step * rate
        each = picture.tokens // picture.grid[0]
        return np.argsort(np.concatenate([time.repeat(each), np.arange(sound)]), kind="stable")

    def _places(self, picture: Picture, step: float) -> np.ndarray:
        """float32 [tokens, 3]: time, row and column of each block."""
        merge = self.media.merge_size
        t, h, w = picture.grid[0], picture.grid[1] // merge, picture.grid[2] // merge
        rate = np.float32(self.config.thinker_config.position_id_per_seconds)
        time = np.arange(t, dtype=np.float32) * np.float32(step) * rate
        places = np.empty((t, h, w, 3), np.float32)
        places[..., 0] = time[:, None, None]
        places[..., 1] = np.arange(h)[:, None]
        places[..., 2] = np.arange(w)
        return places.reshape(-1, 3)


def _counted(n: int) -> np.ndarray:
    return np.repeat(np.arange(n, dtype=np.float32)[:, None], 3, axis=1)


def thin(frames: np.ndarray, rate_hz: float) -> tuple[np.ndarray, float]:
    """The film frames [t, …] that are looked at, and their rate; see `chosen_frames`."""
    chosen, rate_hz = chosen_frames(len(frames), rate_hz)
    return frames[chosen], rate_hz


def film_pixels(frames: int, block: int) -> tuple[int, int]:
    """Least and most pixels of each of a film's frames."""
    least, most = (tokens * block**2 for tokens in FILM_TOKENS)
    share = int(BUDGET_TOKENS * block**2 / frames * 2)
    return least, max(min(most, share), int(least * 1.05))


def fitting(height: int, width: int, block: int, least: int, most: int) -> tuple[int, int]:
    """The size nearest to height x width whose sides are multiples of `block`, of least to most pixels."""
    h, w = round(height / block) * block, round(width / block) * block
    if h * w > most:
        shrink = math.sqrt(height * width / most)
        h, w = (max(block, math.floor(side / shrink / block) * block) for side in (height, width))
    elif h * w < least:
        grow = math.sqrt(least / (height * width))
        h, w = (math.ceil(side * grow / block) * block for side in (height, width))
    return h, w


def _digest(*parts: bytes) -> bytes:
    total = blake2b(digest_size=16)
    for part in parts:
        total.update(part)
    return total.digest()


# --- the checkpoint's files --------------------------------------------------------------------


def _special_tokens(folder: Path) -> dict[str, int]:
    """Ids of the tokens that tokenizer_config.json adds to the vocabulary."""
    path = folder / "tokenizer_config.json"
    try:
        return {token["content"]: int(id) for id, token in read_json(path)["added_tokens_decoder"].items()}
    except (KeyError, TypeError, ValueError, AttributeError) as e:
        raise StartupError(f"{path}: expected added_tokens_decoder with a content for each id") from e


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """Jinja's own filter escapes for HTML, which a prompt is not."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Templates come with checkpoints: they may compute text and nothing else."""


def _read_template(folder: Path) -> jinja2.Template:
    """chat_template.json, or chat_template.jinja as transformers 5 saves it."""
    path = folder / "chat_template.json"
    if not path.exists() and (folder / "chat_template.jinja").exists():
        path = folder / "chat_template.jinja"
        text = path.read_text("utf-8")
    else:
        content = read_json(path)
        if not isinstance(content, dict) or not isinstance(content.get("chat_template"), str):
            raise StartupError(f"{path}: expected a JSON object with the text chat_template")
        text = content["chat_template"]
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols], autoescape=False
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    try:
        return environment.from_string(text)
    except jinja2.TemplateError as e:
        raise StartupError(f"{path}: {e}") from e
