"""Profiles: what ships, how layers merge, and what is said of every kind of mistake."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest
import torch

from hocket.core import CLIENT, ChunkKind, Stage, StageKind
from hocket.engine import fleet
from hocket.engine import profile as profiles
from hocket.engine.fleet import plan_workers
from hocket.engine.platform import PLATFORMS, current_platform
from hocket.engine.profile import Profile, StageProfile, load_profile, match_stages, shipped_profiles
from hocket.errors import StartupError

GOOD = """\
family: tiny
max_waiting: 8
stages:
  talker:
    device: 1
    dtype: bfloat16
    slots: 4
    kv_memory: 0.5
  codec:
    device: cpu
platforms:
  cpu:
    threads: 2
    stages:
      talker: {device: cpu, dtype: float32, kv_blocks: 32}
  cuda:
    stages:
      talker: {slots: 64}
"""

STAGES = (
    Stage("talker", StageKind.AUTOREGRESSIVE, ChunkKind.CODES, feeds=("codec",)),
    Stage("codec", StageKind.STREAMING, ChunkKind.PCM, feeds=(CLIENT,)),
)


def write(folder: Path, text: str) -> Path:
    file = folder / "my.yaml"
    file.write_text(text)
    return file


def refusal(text: str, folder: Path, platform: str = "cpu", **overrides: str) -> StartupError:
    with pytest.raises(StartupError) as caught:
        load_profile(write(folder, text), platform, {k.replace("__", "."): v for k, v in overrides.items()})
    return caught.value


# --- what ships --------------------------------------------------------------------------------


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("name", shipped_profiles())
def test_shipped_profile_loads_on_every_platform(name: str, platform: str) -> None:
    profile = load_profile(name, platform)
    assert profile.family
    assert profile.platform == platform
    assert all(stage.max_batch <= stage.slots for stage in profile.stages.values())


def test_qwen3_tts_on_cpu_and_cuda() -> None:
    cpu = load_profile("qwen3_tts", "cpu")
    assert list(cpu.stages) == ["reference", "talker", "codec"]
    assert {stage.device for stage in cpu.stages.values()} == {"cpu"}
    talker = cpu.stages["talker"]
    assert (talker.slots, talker.kv_blocks, talker.kv_memory, talker.block_tokens) == (16, 1024, None, 16)
    cuda = load_profile("qwen3_tts", "cuda")
    assert {stage.device for stage in cuda.stages.values()} == {"cuda:0"}
    assert (cuda.stages["talker"].slots, cuda.stages["talker"].kv_blocks) == (256, None)


def test_every_setting_of_a_stage_is_documented() -> None:
    page = (Path(__file__).parents[2] / "docs" / "profiles.md").read_text()
    documented = set(re.findall(r"^\| `(\w+)`", page, flags=re.MULTILINE))
    assert documented == {*profiles.STAGE_SETTINGS, *profiles.GLOBAL_SETTINGS, "family"}


def test_every_field_of_a_stage_can_be_set() -> None:
    assert set(profiles.STAGE_SETTINGS) == set(StageProfile.__struct_fields__)


# --- merging -----------------------------------------------------------------------------------


def test_layers_file_then_platform_then_overrides(tmp_path: Path) -> None:
    file = write(tmp_path, GOOD)
    plain = load_profile(file, "xpu")
    assert plain.stages["talker"] == StageProfile(
        device="xpu:1", dtype="bfloat16", slots=4, max_batch=4, kv_memory=0.5
    )
    assert load_profile(file, "cuda").stages["talker"].slots == 64
    assert load_profile(file, "cuda", {"stages.talker.slots": "3"}).stages["talker"].slots == 3
    cpu = load_profile(file, "cpu", {"max_waiting": "0"})
    assert (cpu.max_waiting, cpu.threads) == (0, 2)


def test_max_batch_left_out_follows_the_slots(tmp_path: Path) -> None:
    file = write(tmp_path, GOOD)
    assert load_profile(file, "cuda").stages["talker"].max_batch == 64
    assert load_profile(file, "cuda", {"stages.talker.max_batch": "8"}).stages["talker"].max_batch == 8


def test_later_layer_may_size_the_cache_the_other_way(tmp_path: Path) -> None:
    file = write(tmp_path, GOOD)

    def size(platform: str, overrides: dict[str, str] | None = None) -> tuple[int | None, float | None]:
        talker = load_profile(file, platform, overrides).stages["talker"]
        return talker.kv_blocks, talker.kv_memory

    assert size("cuda") == (None, 0.5)
    assert size("cpu") == (32, None)
    assert size("cuda", {"stages.talker.kv_blocks": "7"}) == (7, None)
    assert size("cpu", {"stages.talker.kv_memory": "0.25"}) == (None, 0.25)


@pytest.mark.parametrize(
    ("platform", "device", "expected"),
    [
        ("cpu", "3", "cpu"),
        ("cuda", "3", "cuda:3"),
        ("rocm", "3", "cuda:3"),
        ("xpu", "0", "xpu:0"),
        ("npu", "1", "npu:1"),
        ("cuda", "cpu", "cpu"),
        ("cuda", "cuda:2", "cuda:2"),
        ("rocm", "cuda:2", "cuda:2"),
    ],
)
def test_device_numbers_and_names(tmp_path: Path, platform: str, device: str, expected: str) -> None:
    file = write(tmp_path, GOOD)
    profile = load_profile(file, platform, {"stages.codec.device": device})
    assert profile.stages["codec"].device == expected


def test_no_platform_means_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiles, "current_platform", lambda: "cuda")
    assert load_profile(write(tmp_path, GOOD)).platform == "cuda"


def test_profile_survives_the_way_to_a_worker(tmp_path: Path) -> None:
    profile = load_profile(write(tmp_path, GOOD), "cpu")
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(profile), type=Profile) == profile


@pytest.mark.parametrize(("given", "threads"), [("6", 3), ("1", 1), ("8,2", 4), ("", 5), ("all", 5)])
def test_workers_share_the_cores_that_may_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str, threads: int
) -> None:
    """OMP_NUM_THREADS says how many, as for any program; else all there are."""
    monkeypatch.setenv("OMP_NUM_THREADS", given)
    monkeypatch.setattr(fleet.os, "cpu_count", lambda: 10)
    apart = {"stages.codec.device": "cpu:1", "threads": "0"}
    profile = load_profile(write(tmp_path, GOOD), "cpu", apart)
    assert [plan.threads for plan in plan_workers(profile, ("talker", "codec"), tmp_path)] == [threads] * 2


def test_path_may_be_text_or_relative(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, GOOD)
    monkeypatch.chdir(tmp_path)
    for name in ("my.yaml", "./my.yaml", str(tmp_path / "my.yaml")):
        assert load_profile(name, "cpu").family == "tiny"


def test_later_failure_names_the_line_that_set_the_field(tmp_path: Path) -> None:
    file = write(tmp_path, GOOD)
    profile = load_profile(file, "cpu", {"stages.codec.slots": "9"})

    def place(field: str) -> str:
        return profile.error(field, "is too much").message.removesuffix(": is too much")

    assert place("stages.talker.slots") == f"{file}:7"
    assert place("stages.talker.kv_blocks") == f"{file}:15"
    assert place("stages.talker") == f"{file}:4"
    assert place("stages.codec.slots") == "override"
    assert place("stages.codec.dtype") == "is too much"  # a default: nobody set it


# --- mistakes in a file ------------------------------------------------------------------------

MISTAKES = {
    # text before -> after, line, dotted field, what is said of it
    "unknown top-level": ("max_waiting", "max_wait", 2, "max_wait", "did you mean 'max_waiting'?"),
    "unknown setting": ("slots: 4", "slot: 4", 7, "stages.talker.slot", "did you mean 'slots'?"),
    "unknown in a delta": ("kv_blocks", "kv_block", 15, "platforms.cpu.stages.talker.kv_block", "kv_blocks"),
    "delta not in use": ("slots: 64", "slotz: 64", 18, "platforms.cuda.stages.talker.slotz", "'slots'?"),
    "unknown platform": ("  cuda:\n", "  cude:\n", 16, "platforms.cude", "did you mean 'cuda'?"),
    "family in a delta": ("threads: 2", "family: x", 13, "platforms.cpu.family", "is not known"),
    "stage only in a delta": (
        "talker: {slots", "taker: {slots", 18, "platforms.cuda.stages.taker", "did you mean 'talker'?",
    ),
    "given twice": ("dtype: bfloat16", "device: 2", 6, "stages.talker.device", "twice, first on line 5"),
    "stage twice": ("codec:", "talker:", 9, "stages.talker", "twice, first on line 4"),
    "words for a number": (
        "slots: 4", "slots: many", 7, "stages.talker.slots",
        "is 'many'; expected a whole number of at least 1",
    ),
    "quoted number": ("slots: 4", "slots: '4'", 7, "stages.talker.slots", "is '4'; expected a whole number"),
    "no slots": ("slots: 4", "slots: 0", 7, "stages.talker.slots", "is '0'; expected a whole number"),
    "fraction of a slot": ("slots: 4", "slots: 1.5", 7, "stages.talker.slots", "is '1.5'; expected a whole"),
    "true is not 1": ("slots: 4", "slots: true", 7, "stages.talker.slots", "is 'true'; expected a whole"),
    "1 is not true": ("slots: 4", "prefix_cache: 1", 7, "stages.talker.prefix_cache", "true or false"),
    "empty value": ("slots: 4", "slots:", 7, "stages.talker.slots", "is empty; expected a whole number"),
    "list": ("slots: 4", "slots: [4]", 7, "stages.talker.slots", "is a list; expected a whole number"),
    "mapping": ("slots: 4", "slots: {n: 4}", 7, "stages.talker.slots", "is a mapping; expected a whole"),
    "foreign tag": ("slots: 4", "slots: !!python/name:os.getcwd", 7, "stages.talker.slots", "a whole"),
    "tag that lies": ("slots: 4", "slots: !!int many", 7, "stages.talker.slots", "is 'many'; expected"),
    "unknown dtype": (
        "bfloat16", "bf16", 6, "stages.talker.dtype",
        "is 'bf16'; expected one of auto, float32, bfloat16, float16",
    ),
    "more than all memory": ("0.5", "1.5", 8, "stages.talker.kv_memory", "above 0 and at most 1"),
    "not a number": ("0.5", ".nan", 8, "stages.talker.kv_memory", "above 0 and at most 1"),
    "device of no kind": ("device: 1", "device: gpu", 5, "stages.talker.device", "such as cuda:0"),
    "device without number": ("device: 1", "device: cuda", 5, "stages.talker.device", "such as cuda:0"),
    "device not here": (
        "device: cpu\n", "device: cuda:0\n", 10, "stages.codec.device",
        "is 'cuda:0', but the platform is cpu; expected a number or cpu",
    ),
    "both cache sizes": (
        "slots: 4", "kv_blocks: 4", 7, "stages.talker.kv_blocks", "excludes kv_memory; expected one",
    ),
    "stage's name": ("codec:", "Codec:", 9, "stages.Codec", "expected a name of small letters"),
    "family's name": ("tiny", "tiny-tts", 1, "family", "is 'tiny-tts'; expected a name of small letters"),
    "family missing": ("family: tiny", "threads: 0", 1, "family", "is missing"),
    "settings are text": ("device: cpu\n", "cpu\n", 9, "stages.codec", "is 'cpu'; expected settings ("),
}  # fmt: skip


@pytest.mark.parametrize(("before", "after", "line", "field", "problem"), MISTAKES.values(), ids=MISTAKES)
def test_mistake_names_file_line_and_field(
    tmp_path: Path, before: str, after: str, line: int, field: str, problem: str
) -> None:
    assert before in GOOD
    error = refusal(GOOD.replace(before, after, 1), tmp_path)
    assert error.message.startswith(f"{tmp_path}/my.yaml:{line}: {field} ")
    assert error.param == field
    assert problem in error.message


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "my.yaml: is empty; expected family and stages"),
        ("# nothing\n", "my.yaml: is empty"),
        ("family: [x", "my.yaml:1: not valid YAML: expected ',' or ']'"),
        ("family: x\n\tstages: y", "my.yaml:2: not valid YAML"),
        ("family: \x00", "my.yaml: not valid YAML"),
        ("family: *x", "my.yaml:1: not valid YAML: found undefined alias"),
        ("a: 1\n---\nb: 2\n", "my.yaml:2: not valid YAML: but found another document"),
        ("- family", "my.yaml:1: profile is a list; expected fields (family,"),
        ("family: x", "my.yaml:1: stages is missing"),
        ("family: x\nstages: {}\n", "my.yaml:2: stages is empty; expected at least one stage"),
        ("family: x\nstages: [talker]\n", "my.yaml:2: stages is a list; expected stages"),
        ("? [family]\n: x\n", "my.yaml:1: a list is not known"),
    ],
)
def test_file_that_is_no_profile(tmp_path: Path, text: str, problem: str) -> None:
    assert problem in refusal(text, tmp_path).message


def test_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="cannot be read: No such file"):
        load_profile(tmp_path / "none.yaml")
    file = tmp_path / "my.yaml"
    file.write_bytes(b"family: \xff")
    with pytest.raises(StartupError, match="is not UTF-8 text: invalid start byte at byte 8"):
        load_profile(file)


def test_unknown_name_lists_the_known() -> None:
    with pytest.raises(StartupError, match=r"did you mean 'qwen3_tts'\? known profiles: .*qwen3_tts"):
        load_profile("qwen3-tts", "cpu")


def test_unknown_platform_lists_the_known() -> None:
    with pytest.raises(StartupError, match=r"platform 'gpu' is not known; .*cuda, rocm, xpu, npu, cpu"):
        load_profile("qwen3_tts", "gpu")


# --- mistakes in overrides ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("stages.talker.slotz", "4", "did you mean 'stages.talker.slots'?"),
        ("stage.talker.slots", "4", "did you mean 'stages.talker.slots'?"),
        ("stages.taker.slots", "4", "known settings: max_waiting, threads, stages.talker, stages.codec"),
        ("stages.talker", "4", "is not known"),
        ("family", "other", "is not known"),
        ("platforms.cpu.threads", "4", "is not known"),
        ("threads", "many", "is 'many'; expected a whole number of at least 0"),
        ("threads", "", "is ''; expected a whole number of at least 0"),
        ("threads", "{", "is '{'; expected a whole number of at least 0"),
        ("threads", "[1]", "is '[1]'; expected a whole number of at least 0"),
        ("stages.codec.device", "cuda:0", "is 'cuda:0', but the platform is cpu"),
    ],
)
def test_mistaken_override_is_named(tmp_path: Path, field: str, value: str, problem: str) -> None:
    with pytest.raises(StartupError) as caught:
        load_profile(write(tmp_path, GOOD), "cpu", {field: value})
    assert caught.value.message.startswith(f"override: {field} ")
    assert problem in caught.value.message
    assert caught.value.param == field


def test_overrides_may_not_size_the_cache_twice(tmp_path: Path) -> None:
    sizes = {"stages__talker__kv_blocks": "4", "stages__talker__kv_memory": "0.5"}
    assert "excludes kv_memory; expected one of the two" in refusal(GOOD, tmp_path, **sizes).message


# --- against a family --------------------------------------------------------------------------


def test_profile_that_fits_its_family(tmp_path: Path) -> None:
    match_stages(load_profile(write(tmp_path, GOOD), "cpu"), STAGES)


def test_an_optional_stage_may_be_left_out(tmp_path: Path) -> None:
    stages = (*STAGES, Stage("third", StageKind.STREAMING, ChunkKind.PCM, feeds=(CLIENT,), optional=True))
    match_stages(load_profile(write(tmp_path, GOOD), "cpu"), stages)


@pytest.mark.parametrize(
    ("before", "after", "problem"),
    [
        ("  codec:", "  codecs:", "my.yaml:9: stages.codecs is not known; did you mean 'codec'?"),
        ("  codec:\n    device: cpu\n", "", "my.yaml:3: stages.codec is missing; tiny needs talker, codec"),
        ("device: cpu\n", "block_tokens: 16\n", "my.yaml:10: stages.codec.block_tokens has no effect"),
        ("slots: 4", "max_chunk_frames: 4", "my.yaml:7: stages.talker.max_chunk_frames has no effect"),
        (", kv_blocks: 32", "", "my.yaml:8: stages.talker.kv_memory is for accelerators"),
        ("dtype: bfloat16", "max_batch: 5", "my.yaml:6: stages.talker.max_batch is 5; expected at most its"),
    ],
    ids=["unknown", "missing", "KV in a codec", "chunks in a talker", "memory of a CPU", "batch > slots"],
)  # fmt: skip
def test_profile_that_does_not_fit_its_family(tmp_path: Path, before: str, after: str, problem: str) -> None:
    assert before in GOOD
    profile = load_profile(write(tmp_path, GOOD.replace(before, after, 1)), "cpu")
    with pytest.raises(StartupError, match=re.escape(problem)):
        match_stages(profile, STAGES)


def test_autoregressive_stage_needs_a_cache_size(tmp_path: Path) -> None:
    text = "family: tiny\nstages:\n  talker: {}\n  codec: {}\n"
    with pytest.raises(StartupError, match=r"my.yaml:3: stages.talker needs kv_blocks or kv_memory"):
        match_stages(load_profile(write(tmp_path, text), "cuda"), STAGES)


# --- platform ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cuda", "hip", "xpu", "expected"),
    [
        (True, None, False, "cuda"),
        (True, "7.2", False, "rocm"),
        (False, None, True, "xpu"),
        (False, None, False, "cpu"),
    ],
)
def test_platform_of_this_process(
    monkeypatch: pytest.MonkeyPatch, cuda: bool, hip: str | None, xpu: bool, expected: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.xpu, "is_available", lambda: xpu)
    assert current_platform() == expected
