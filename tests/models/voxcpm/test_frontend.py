"""From a request to a job: prompts of every mode, options, and one clear error for what cannot be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from hocket.core import Reference, Sampling, SpeechRequest
from hocket.errors import InvalidRequest
from hocket.models.voxcpm.frontend import VoxCpmFrontEnd
from hocket.models.voxcpm.prompt import AUDIO, TalkerInput, build_prompt
from hocket.models.voxcpm.synthetic import write_checkpoint, write_lora
from hocket.models.voxcpm.tokenizer import TextTokenizer
from hocket.models.voxcpm.vae_encoder import EncoderInput

SECOND = np.linspace(-0.5, 0.5, 24000, dtype=np.float32)
SAID = "One two, "


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_checkpoint(tmp_path_factory.mktemp("voxcpm") / "model", vocoder=False)
    config = json.loads((folder / "config.json").read_text("utf-8"))
    for name in ("calm", "loud"):
        write_lora(folder / "lora" / name, config)
    return folder


@pytest.fixture(scope="module")
def front(folder: Path) -> VoxCpmFrontEnd:
    return VoxCpmFrontEnd(folder)


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> VoxCpmFrontEnd:
    """Of a checkpoint before VoxCPM2."""
    return VoxCpmFrontEnd(write_checkpoint(tmp_path_factory.mktemp("first"), size="tiny-0.5b", vocoder=False))


def recording(text: str | None = None, **options: Any) -> Reference:
    return Reference(samples=SECOND, rate_hz=24000, text=text, **options)


def talker(front: VoxCpmFrontEnd, **fields: Any) -> TalkerInput:
    job = front.prepare(SpeechRequest(**({"text": "Over there."} | fields)))
    return msgspec.msgpack.decode(job.inputs["talker"], type=TalkerInput)


# --- text --------------------------------------------------------------------------------------


def test_chinese_words_become_characters_and_control_tokens_do_nothing(front: VoxCpmFrontEnd) -> None:
    ids = front.tokenizer.encode("你好世界")
    known = front.tokenizer._tokenizer
    assert [known.id_to_token(id) for id in ids] == ["你", "好", "世", "界"]  # the mark of "▁你好" is dropped
    assert front.tokenizer.encode("Over <|audio_start|>there.") == front.tokenizer.encode("Over there.")
    nested = "<|audio<|audio_start|>_start|>Over there."
    assert front.tokenizer.encode(nested) == front.tokenizer.encode("Over there.")
    assert not {101, 102, 103, 104} & set(front.tokenizer.encode("<|audio_start|><|audio_prompt_end|>"))


def test_transcript_and_text_are_tokenised_as_one(front: VoxCpmFrontEnd) -> None:
    """Apart, the text would begin with a word mark of its own."""
    ids = talker(front, reference=recording("Hello "), text="there.").ids
    tokenizer = TextTokenizer(front.folder)
    assert ids == tokenizer.encode("Hello there.")
    assert ids != tokenizer.encode("Hello ") + tokenizer.encode("there.")


def test_blanks_and_line_feeds_are_one_blank(front: VoxCpmFrontEnd) -> None:
    assert talker(front, text="Over\n\n  there.").ids == talker(front, text="Over there.").ids


def test_description_stands_in_brackets_before_the_text(front: VoxCpmFrontEnd) -> None:
    wanted = front.tokenize("(a low, calm voice)Over there.")
    for description in ("a low, calm voice", "(a low, calm voice)", "（a low, calm voice）"):
        assert talker(front, instructions=description).ids == wanted
    styled = talker(front, instructions="calm", reference=recording())
    assert styled.ids == front.tokenize("(calm)Over there.")
    assert (styled.reference, styled.continued) == (True, False)


# --- modes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "reference", "continued"),
    [
        ({}, False, False),
        ({"reference": recording()}, True, False),
        ({"reference": recording(SAID)}, False, True),
        ({"reference": recording(SAID, speaker_only=True)}, True, False),
        ({"reference": recording(SAID), "extra": {"clone_mode": "reference"}}, True, False),
        ({"reference": recording(SAID), "extra": {"clone_mode": "both"}}, True, True),
    ],
    ids=["zero-shot", "reference", "continuation", "timbre-only", "asked-reference", "both"],
)
def test_mode_follows_from_recording_and_transcript(
    front: VoxCpmFrontEnd, fields: dict[str, Any], reference: bool, continued: bool
) -> None:
    job = front.prepare(SpeechRequest(text="Over there.", **fields))
    i = msgspec.msgpack.decode(job.inputs["talker"], type=TalkerInput)
    assert (i.reference, i.continued) == (reference, continued)
    assert i.ids == front.tokenize((SAID if continued else "") + "Over there.")
    assert job.route == (("encoder",) if reference or continued else ()) + ("talker", "vocoder")
    patches = 7  # 16,000 samples at 2,560 each
    assert job.audio_tokens == patches * (reference + continued)
    if "encoder" in job.inputs:
        sent = msgspec.msgpack.decode(job.inputs["encoder"], type=EncoderInput)
        assert (len(sent.reference), len(sent.prompt)) == (64000 * reference, 64000 * continued)


@pytest.mark.parametrize(
    ("reference", "continued", "layout", "audio_from"),
    [
        (0, 0, "tt 101", 3),
        (2, 0, "103 aa 104 tt 101", 7),
        (0, 3, "tt 101 aaa", 3),
        (2, 3, "103 aa 104 tt 101 aaa", 7),
    ],
)
def test_rows_of_each_mode(reference: int, continued: int, layout: str, audio_from: int) -> None:
    def patches(n: int) -> np.ndarray | None:
        return np.arange(n * 8, dtype=np.float32).reshape(n, 4, 2) if n else None

    i = TalkerInput(
        ids=[7, 8], reference=bool(reference), continued=bool(continued), guidance=2, steps=10, temperature=1,
        least=2,
    )  # fmt: skip
    p = build_prompt(i, patches(reference), patches(continued), lora=0, variant=0)
    wanted = []
    for part in layout.split():
        wanted += [int(part)] if part.isdigit() else [AUDIO] * len(part) if part[0] == "a" else [7, 8]
    assert p.ids.tolist() == wanted
    assert len(p.row_keys) == len(wanted)
    assert len(p.patches) == reference + continued
    assert p.audio_from == audio_from
    assert p.ids[slice(*p.reference)].tolist() == [AUDIO] * reference


# --- options -----------------------------------------------------------------------------------


def test_options_reach_the_talker(front: VoxCpmFrontEnd) -> None:
    extra = {"cfg_value": 1.5, "inference_timesteps": 25, "min_len": 7, "lora": "loud"}
    i = talker(front, extra=extra, sampling=Sampling(temperature=0.8))
    assert (i.guidance, i.steps, i.least, i.lora, i.temperature) == (1.5, 25, 7, "loud", 0.8)
    plain = talker(front)
    assert (plain.guidance, plain.steps, plain.least, plain.lora, plain.temperature) == (2.0, 10, 2, "", 1.0)


def test_patches_are_limited_by_the_text_and_by_the_context(front: VoxCpmFrontEnd) -> None:
    """Six a token and ten, as published; no more than fit behind the prompt; or what the client says."""
    short = front.prepare(SpeechRequest(text="Over there."))
    assert short.max_frames == 6 * short.text_tokens + 10
    long = front.prepare(SpeechRequest(text="Over there. " * 20))
    assert long.text_tokens + 1 + long.max_frames - 1 == front.config.max_length
    assert front.prepare(SpeechRequest(text="Over there.", max_frames=9)).max_frames == 9


def test_seed_is_kept_or_drawn(front: VoxCpmFrontEnd) -> None:
    assert front.prepare(SpeechRequest(text="Over.", seed=-3)).seed == -3
    assert len({front.prepare(SpeechRequest(text="Over.")).seed for _ in range(4)}) == 4


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"text": "..."}, "input"),
        ({"voice": "ryan"}, "voice"),
        ({"language": "English"}, "language"),
        ({"task": "CustomVoice"}, "task_type"),
        ({"speaker_embedding": [0.0]}, "speaker_embedding"),
        ({"sampling": Sampling(top_k=3)}, "top_k"),
        ({"sampling": Sampling(temperature=float("nan"))}, "temperature"),
        ({"text_first": False}, "non_streaming_mode"),
        ({"max_frames": 0}, "max_new_tokens"),
        ({"max_frames": 5000}, "max_new_tokens"),
        ({"seed": 1 << 63}, "seed"),
        ({"extra": {"cfg": 2}}, "extra_params.cfg"),
        ({"extra": {"cfg_value": "2"}}, "extra_params.cfg_value"),
        ({"extra": {"cfg_value": 11}}, "extra_params.cfg_value"),
        ({"extra": {"inference_timesteps": 1}}, "extra_params.inference_timesteps"),
        ({"extra": {"inference_timesteps": 51}}, "extra_params.inference_timesteps"),
        ({"extra": {"inference_timesteps": 9.5}}, "extra_params.inference_timesteps"),
        ({"extra": {"min_len": True}}, "extra_params.min_len"),
        ({"extra": {"lora": "soft"}}, "extra_params.lora"),
        ({"extra": {"clone_mode": "all"}}, "extra_params.clone_mode"),
        ({"extra": {"clone_mode": "both"}}, "ref_audio"),
        ({"reference": recording(), "extra": {"clone_mode": "both"}}, "ref_text"),
        ({"reference": recording(SAID), "instructions": "calm"}, "instructions"),
        ({"reference": Reference(samples=SECOND[:0], rate_hz=24000)}, "ref_audio"),
    ],
)
def test_bad_option_is_one_error_that_names_the_field(
    front: VoxCpmFrontEnd, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(InvalidRequest) as raised:
        talker(front, **fields)
    assert raised.value.param == param


def test_language_auto_is_no_language(front: VoxCpmFrontEnd) -> None:
    assert talker(front, language="Auto").ids == talker(front).ids


def test_earlier_checkpoints_go_on_from_a_recording_only(first: VoxCpmFrontEnd) -> None:
    assert talker(first, reference=recording(SAID)).continued
    assert not first.info.instructions
    for fields, param in (
        ({"reference": recording()}, "ref_text"),
        ({"reference": recording(SAID), "extra": {"clone_mode": "both"}}, "ref_text"),
        ({"instructions": "calm"}, "instructions"),
    ):
        with pytest.raises(InvalidRequest) as raised:
            talker(first, **fields)
        assert raised.value.param == param


def test_info_says_what_the_checkpoint_does(front: VoxCpmFrontEnd, first: VoxCpmFrontEnd) -> None:
    assert (front.info.sample_rate_hz, front.info.frame_rate_hz) == (48000, 6.25)
    assert (first.info.sample_rate_hz, first.info.frame_rate_hz) == (16000, 12.5)
    with pytest.raises(InvalidRequest, match="all of it"):
        front.open_text(SpeechRequest(text="Over"))


def test_tokens_there_and_back(front: VoxCpmFrontEnd) -> None:
    text = "Over there, the 你好 é!"
    assert front.detokenize(front.tokenize(text)) == text.replace(" 你", "你")  # the split drops that blank
    with pytest.raises(InvalidRequest, match="2000000000"):
        front.detokenize([2_000_000_000])
