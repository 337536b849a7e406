"""Checkpoints as they are published, read and written: sizes, file forms, and what is wrong with a file."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from hocket.core import leaves
from hocket.errors import StartupError
from hocket.models import family_of
from hocket.models.voxcpm.config import read_model_config, read_vae_config
from hocket.models.voxcpm.synthetic import model_config, model_shapes, write_checkpoint, write_lora
from hocket.models.voxcpm.talker import TalkerProgram
from hocket.models.voxcpm.vae import VaeConfig, VaeConfigV2
from hocket.models.voxcpm.weights import load_talker

CPU = torch.device("cpu")


def load(folder: Path, device: torch.device = CPU) -> Any:
    return load_talker(folder, read_model_config(folder), device, torch.float32)


def stacks_of(weights: Any) -> list[Tensor]:
    w = [weights.base, weights.residual, weights.encoder.stack, weights.diffusion.stack]
    return [getattr(layer.weights, name) for s in w for layer in s.layers for name in ("qkv", "out", "down")]


def test_full_size_is_that_of_the_release() -> None:
    shapes = model_shapes(model_config("2"))
    assert len(shapes) == 577
    assert sum(map(math.prod, shapes.values())) / 1e6 == pytest.approx(2290, abs=0.5)


def test_full_size_is_read_without_its_gigabytes(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, size="2", vocoder=False)
    assert sum(file.stat().st_size for file in folder.iterdir()) < 5e6
    weights = load(folder, torch.device("meta"))
    assert (len(weights.base.layers), len(weights.residual.layers)) == (28, 8)
    assert weights.text.shape == (73448, 2048)
    assert weights.diffusion.stack.layers[0].weights.out.shape == (1024, 2048)


def test_pickled_file_holds_the_same(tmp_path: Path) -> None:
    one = load(write_checkpoint(tmp_path / "one", size="tiny-0.5b", vocoder=False))
    two = load(write_checkpoint(tmp_path / "two", size="tiny-0.5b", vocoder=False, pickled=True))
    for a, b in zip(stacks_of(one), stacks_of(two), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(("written", "family"), [("voxcpm2", "voxcpm"), ("voxcpm", "voxcpm")])
def test_family_is_found_by_architecture(written: str, family: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architecture": written}), "utf-8")
    assert family_of(tmp_path) == family
    (tmp_path / "config.json").write_text(json.dumps({"architecture": "voxcpn2"}), "utf-8")
    with pytest.raises(StartupError, match="'voxcpn2' is not served"):
        family_of(tmp_path)


def test_keys_that_a_file_leaves_out_take_the_published_class_s_values(tmp_path: Path) -> None:
    for size, patch, vae in (("2", 4, VaeConfigV2()), ("0.5b", 2, VaeConfig())):
        content = model_config(size)
        for key in ("patch_size", "max_length", "audio_vae_config", "residual_lm_no_rope"):
            content.pop(key, None)
        (tmp_path / "config.json").write_text(json.dumps(content), "utf-8")
        config = read_model_config(tmp_path)
        assert config.patch_size == patch
        assert config.residual_lm_no_rope is False
        assert read_vae_config(tmp_path, config) == vae


# --- wrong files -------------------------------------------------------------------------------


def change(content: dict[str, Any], path: str, value: Any) -> None:
    *parents, last = path.split(".")
    for key in parents:
        content = content[key]
    if value is None:
        del content[last]
    else:
        content[last] = value


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("lm_config.hidden_size", None, "hidden_size"),
        ("lm_config.rope_scaling.long_factor", [1.0], r"long_factor holds 1 values, expected 8"),
        ("dit_config.dit_mean_mode", True, "dit_mean_mode"),
        ("dit_config.kv_channels", 8, "heads of one width"),
        ("feat_dim", 16, "feat_dim is 16, but audio_vae_config.latent_dim is 8"),
        ("audio_vae_config.depthwise", False, "depthwise"),
    ],
)
def test_wrong_config_is_one_error_that_names_the_key(
    path: str, value: Any, message: str, tmp_path: Path
) -> None:
    content = model_config("tiny")
    change(content, path, value)
    (tmp_path / "config.json").write_text(json.dumps(content), "utf-8")
    with pytest.raises(StartupError, match=message):
        read_vae_config(tmp_path, read_model_config(tmp_path))


@pytest.fixture
def with_lora(tmp_path: Path) -> Path:
    folder = write_checkpoint(tmp_path, vocoder=False)
    write_lora(folder / "lora" / "calm", model_config("tiny"))
    return folder


def rewrite(file: Path, edit: Callable[[dict[str, Tensor]], Any]) -> None:
    tensors = load_file(file)
    edit(tensors)
    save_file(tensors, file)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.pop("fusion_concat_proj.lora_B"), "'calm': fusion_concat_proj.lora_B is missing"),
        (lambda t: t.update({"stop_proj.lora_A": torch.zeros(4, 64)}), "stop_proj.lora_A belongs to no"),
        (lambda t: t.update({"lm_to_dit_proj.weight": torch.zeros(4)}), "is no LoRA tensor"),
        (lambda t: t.update({"lm_to_dit_proj.lora_A": torch.zeros(5, 64)}), "lora_config.r is 4"),
        (lambda t: t.update({"lm_to_dit_proj.lora_A": torch.zeros(4, 65)}), r"expected \[4, 64\]"),
    ],
    ids=["half", "unknown", "no-lora", "rank", "width"],
)
def test_wrong_lora_is_one_error_that_names_tensor_and_folder(
    edit: Callable[[dict[str, Tensor]], Any], message: str, with_lora: Path
) -> None:
    load(with_lora)
    rewrite(with_lora / "lora" / "calm" / "lora_weights.safetensors", edit)
    with pytest.raises(StartupError, match=message):
        load(with_lora)


def test_missing_tensor_is_one_error(with_lora: Path) -> None:
    rewrite(with_lora / "model.safetensors", lambda t: t.pop("stop_head.weight"))
    with pytest.raises(StartupError, match=r"'stop_head.weight' is missing"):
        load(with_lora)
    (with_lora / "model.safetensors").unlink()
    with pytest.raises(StartupError, match=r"model\.safetensors"):
        load(with_lora)


def test_state_is_declared_with_both_stacks_in_one_cache(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, vocoder=False)
    state = TalkerProgram(read_model_config(folder), load(folder), 6.25).declare()
    assert state.cache.kv.shape == (5, 2, "blocks", "block_tokens", 2, 16)
    assert all(leaf.per_slot for leaf in leaves(state) if leaf is not state.cache.kv)
