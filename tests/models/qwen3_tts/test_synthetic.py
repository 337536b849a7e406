"""The checkpoint maker: other tests and the golden files take its bytes for granted."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from hocket.models.qwen3_tts.synthetic import (
    CODEC_END,
    SPECIAL_TOKENS,
    Size,
    Variant,
    codec_config,
    codec_shapes,
    model_config,
    model_shapes,
    token_ids,
    write_checkpoint,
)

OFFICIAL_IDS = {
    "assistant": 77091,
    "<|im_start|>": 151644,
    "<|im_end|>": 151645,
    "<tts_pad>": 151671,
    "<tts_text_bos>": 151672,
    "<tts_text_eod>": 151673,
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny"), variant="base")


def load_tokenizer(folder: Path) -> Tokenizer:
    tokenizer = Tokenizer(BPE.from_file(str(folder / "vocab.json"), str(folder / "merges.txt")))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL_TOKENS])
    return tokenizer


def digest(file: Path) -> str:
    total = hashlib.sha256()
    for name, tensor in sorted(load_file(file).items()):
        total.update(name.encode() + tensor.numpy().tobytes())
    return total.hexdigest()[:16]


@pytest.mark.parametrize(
    ("size", "variant", "tensors", "parameters"),
    [
        pytest.param("1.7b", "base", 480, 1_928_677_440, id="1.7b-base"),
        pytest.param("1.7b", "custom_voice", 404, 1_916_676_352, id="1.7b-custom-voice"),
        pytest.param("1.7b", "voice_design", 404, 1_916_676_352, id="1.7b-voice-design"),
        pytest.param("0.6b", "base", 478, 914_643_008, id="0.6b-base"),
        pytest.param("0.6b", "custom_voice", 402, 905_788_672, id="0.6b-custom-voice"),
    ],
)
def test_full_sizes_have_the_released_tensors(
    size: Size, variant: Variant, tensors: int, parameters: int
) -> None:
    shapes = model_shapes(model_config(size, variant, OFFICIAL_IDS))
    assert len(shapes) == tensors
    assert sum(map(math.prod, shapes.values())) == parameters


def test_full_size_codec_has_the_released_tensors() -> None:
    shapes = codec_shapes(codec_config("1.7b"))
    assert len(shapes) == 496
    assert sum(map(math.prod, shapes.values())) == 170_557_441


@pytest.mark.parametrize(("size", "projected"), [("tiny", True), ("tiny-0.6b", False)])
def test_only_a_narrower_predictor_has_a_projection(size: Size, projected: bool) -> None:
    shapes = model_shapes(model_config(size, "custom_voice", OFFICIAL_IDS))
    assert ("talker.code_predictor.small_to_mtp_projection.weight" in shapes) is projected


def test_files_hold_the_tensors_that_their_configs_imply(tiny: Path) -> None:
    config = json.loads((tiny / "config.json").read_text())
    codec = json.loads((tiny / "speech_tokenizer" / "config.json").read_text())
    for file, shapes in (("", model_shapes(config)), ("speech_tokenizer", codec_shapes(codec))):
        tensors = load_file(tiny / file / "model.safetensors")
        assert {name: tuple(t.shape) for name, t in tensors.items()} == shapes
        assert all(t.dtype == torch.float32 and t.isfinite().all() for t in tensors.values())


def test_tiny_bytes_never_change(tiny: Path) -> None:
    """The golden files were made from these weights: a new digest asks for new golden files."""
    assert digest(tiny / "model.safetensors") == "ffdb770e57e8def9"
    assert digest(tiny / "speech_tokenizer" / "model.safetensors") == "b3ed12d9387173f8"


def test_seed_decides_the_bytes(tiny: Path, tmp_path: Path) -> None:
    again = write_checkpoint(tmp_path / "again", variant="base")
    other = write_checkpoint(tmp_path / "other", variant="base", seed=1)
    for file in ("model.safetensors", "speech_tokenizer/model.safetensors"):
        assert (again / file).read_bytes() == (tiny / file).read_bytes()
        assert digest(other / file) != digest(tiny / file)


def test_a_tensor_is_the_same_in_every_variant(tiny: Path, tmp_path: Path) -> None:
    design = load_file(write_checkpoint(tmp_path, variant="voice_design") / "model.safetensors")
    base = load_file(tiny / "model.safetensors")
    assert design.keys() < base.keys()
    assert all(torch.equal(base[name], tensor) for name, tensor in design.items())


def test_matrices_have_unit_gain(tiny: Path) -> None:
    head = load_file(tiny / "model.safetensors")["talker.codec_head.weight"]
    assert head.mean().abs() < 1e-3
    assert head.std() * math.sqrt(head.shape[1]) == pytest.approx(1, abs=1e-2)


def test_end_row_can_be_silenced_or_copied(tiny: Path, tmp_path: Path) -> None:
    never = write_checkpoint(tmp_path / "never", never_ends=True)
    like = write_checkpoint(tmp_path / "like", end_like=(75, 1.3))
    name = "talker.codec_head.weight"
    plain = load_file(tiny / "model.safetensors")[name]
    silenced, copied = (load_file(folder / "model.safetensors")[name] for folder in (never, like))
    assert not silenced[CODEC_END].any()
    torch.testing.assert_close(copied[CODEC_END], plain[75] * 1.3)
    others = torch.arange(plain.shape[0]) != CODEC_END
    assert torch.equal(silenced[others], plain[others])
    assert torch.equal(copied[others], plain[others])


def test_prompt_template_is_cut_where_the_reference_cuts_it(tiny: Path) -> None:
    tokenizer = load_tokenizer(tiny)
    text = "assist an assistant, é世"
    ids = tokenizer.encode(f"<|im_start|>assistant\n{text}<|im_end|>\n<|im_start|>assistant\n").ids
    named = token_ids(tiny)
    assert ids[:2] == [named["<|im_start|>"], named["assistant"]]
    assert ids[-5] == named["<|im_end|>"]
    assert tokenizer.decode(ids[3:-5]) == text


def test_config_names_the_ids_of_the_tokenizer_written(tiny: Path, tmp_path: Path) -> None:
    source, out = tmp_path / "tokenizer", tmp_path / "model"
    source.mkdir()
    for name in ("vocab.json", "merges.txt", "tokenizer_config.json"):
        (source / name).write_bytes((tiny / name).read_bytes())
    settings = json.loads((source / "tokenizer_config.json").read_text())
    moved = {str(int(i) + 1000): token for i, token in settings["added_tokens_decoder"].items()}
    (source / "tokenizer_config.json").write_text(json.dumps(settings | {"added_tokens_decoder": moved}))

    write_checkpoint(out, tokenizer=source)
    config = json.loads((out / "config.json").read_text())
    plain = json.loads((tiny / "config.json").read_text())
    assert config["im_start_token_id"] == plain["im_start_token_id"] + 1000
    assert config["tts_eos_token_id"] == plain["tts_eos_token_id"] + 1000
    assert config["assistant_token_id"] == plain["assistant_token_id"]
    assert config["talker_config"]["text_vocab_size"] == plain["talker_config"]["text_vocab_size"] + 1000


def test_unknown_size_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"size '3b' is not known; known: tiny, .*1\.7b"):
        write_checkpoint(tmp_path, size="3b")  # type: ignore[arg-type]
