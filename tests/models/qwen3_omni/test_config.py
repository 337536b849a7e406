"""What is read from the checkpoint's files, and the maker of tiny ones."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from hocket.errors import StartupError
from hocket.models.qwen3_omni.config import read_media_config, read_model_config
from hocket.models.qwen3_omni.processing import Processor
from hocket.models.qwen3_omni.synthetic import ROLES, SPECIALS, model_config, model_shapes, write_checkpoint
from hocket.models.qwen3_omni.weights import load_audio, load_thinker, load_vision
from hocket.nn.checkpoint import open_tensors


def test_the_full_size_is_the_released_one() -> None:
    """28,010 tensors and 35,259,818,545 parameters are what the published files of Instruct hold."""
    shapes = model_shapes(model_config("30b", "instruct", ROLES | SPECIALS))
    assert len(shapes) == 28_010
    assert sum(math.prod(shape) for shape in shapes.values()) == 35_259_818_545


def test_both_generations_of_files_say_the_same(omni: Any, tmp_path: Path) -> None:
    """transformers 5 saves rotary options and, of the Talker, the number of experts under other names."""
    content = json.loads((omni() / "config.json").read_text())
    first = read_model_config(omni())

    def renew(part: dict[str, Any]) -> None:
        scaling = part.pop("rope_scaling", None) or {"rope_type": "default"}
        part["rope_parameters"] = scaling | {"rope_theta": part.pop("rope_theta")}

    talker = content["talker_config"]
    for part in (
        content["thinker_config"]["text_config"],
        talker["text_config"],
        talker["code_predictor_config"],
        content["code2wav_config"],
    ):
        renew(part)
    talker["text_config"]["num_local_experts"] = talker["text_config"].pop("num_experts")
    (tmp_path / "config.json").write_text(json.dumps(content))
    second = read_model_config(tmp_path)
    assert second.talker.text_config.num_experts == first.talker.text_config.num_experts
    for one, two in (
        (first.thinker_config.text_config, second.thinker_config.text_config),
        (first.talker.text_config, second.talker.text_config),
    ):
        assert (one.theta, one.sections) == (two.theta, two.sections)
    assert first.code2wav.theta == second.code2wav.theta == 10000
    assert second.talker.code_predictor_config.theta == 1000000


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        (("thinker_config", "text_config", "num_experts"), None, "num_experts"),
        (("thinker_config", "text_config", "norm_topk_prob"), False, "norm_topk_prob"),
        (("thinker_config", "audio_config", "output_dim"), 7, "output_dim is 7"),
        (("talker_config", "accept_hidden_layer"), 3, "accept_hidden_layer is 3"),
        (("talker_config", "thinker_hidden_size"), 7, "thinker_hidden_size is 7"),
        (("thinker_config", "text_config", "rope_scaling"), {}, "mrope_section"),
    ],
    ids=lambda x: x[-1] if isinstance(x, tuple) else "",
)
def test_a_config_that_does_not_fit_is_named(
    path: tuple[str, ...], value: Any, says: str, omni: Any, tmp_path: Path
) -> None:
    content = json.loads((omni() / "config.json").read_text())
    part = content
    for key in path[:-1]:
        part = part[key]
    if value is None:
        del part[path[-1]]
    else:
        part[path[-1]] = value
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(StartupError, match=says):
        read_model_config(tmp_path)


def test_checkpoints_that_only_write_have_no_talker(omni: Any) -> None:
    config = read_model_config(omni(variant="captioner"))
    assert not config.speaks
    with pytest.raises(StartupError, match="no talker_config"):
        _ = config.talker
    assert Processor(omni(variant="captioner")).specials


def test_pixels_come_in_either_form(omni: Any, tmp_path: Path) -> None:
    content = json.loads((omni() / "preprocessor_config.json").read_text())
    least, most = content.pop("min_pixels"), content.pop("max_pixels")
    content["size"] = {"shortest_edge": least, "longest_edge": most}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(content))
    assert read_media_config(tmp_path).pixels == read_media_config(omni()).pixels == (3136, 12845056)


def test_a_drawn_checkpoint_needs_no_weights_on_disk(omni: Any, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, drawn=True, never_ends=True)
    assert not (folder / "model.safetensors").exists()
    drawn, written = open_tensors(folder), open_tensors(omni())
    assert set(drawn) == set(written)
    for name in ("thinker.model.embed_tokens.weight", "thinker.visual.patch_embed.proj.weight"):
        assert drawn[name].shape == written[name].shape
        assert float(drawn[name].std()) == pytest.approx(float(written[name].std()), rel=0.1)
        assert torch.equal(drawn[name], open_tensors(folder)[name])
    ends = {"thinker.lm_head.weight": 274, "talker.codec_head.weight": 2150}
    for name, row in ends.items():
        assert drawn[name].count_nonzero(1).argmin() == row
        assert not drawn[name][row].any()
    with pytest.raises(StartupError, match=r"'no\.such' is missing"):
        _ = drawn["no.such"]


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_parts_load_onto_any_device(device: str, omni: Any) -> None:
    config = read_model_config(omni())
    at = torch.device(device)
    thinker = load_thinker(omni(), config, at, torch.bfloat16)
    assert thinker.layers[0].moe.gate_up.shape == (8, 64, 64)
    assert thinker.head.device.type == device
    assert load_audio(omni(), config, at, torch.bfloat16).enter.device.type == device
    assert len(load_vision(omni(), config, at, torch.bfloat16).deep) == 3
