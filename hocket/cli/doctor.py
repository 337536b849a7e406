"""`hocket doctor`: can this machine run hocket, and this model?

Looks without changing anything: nothing is downloaded, no weights are read.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.markup import escape

import hocket
from hocket.cli.player import find_player
from hocket.cli.report import Debug, reports_errors, settings_of
from hocket.errors import HocketError

if TYPE_CHECKING:
    import torch

    from hocket.core import StageKind
    from hocket.engine.profile import Profile, StageProfile

Verdict = Literal["ok", "note", "bad"]

_COLOURS: dict[Verdict, str] = {"ok": "green", "note": "yellow", "bad": "red"}
_GIB = 1 << 30
_LOOK = "YES"  # our word for offline, which Hugging Face's library takes too: look, do not fetch


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. Only "bad" makes the machine or the model unusable."""

    what: str
    verdict: Verdict
    text: str


@reports_errors
def doctor(
    model: Annotated[str | None, typer.Argument(help="Folder, or name on a hub, to look at too.")] = None,
    profile: Annotated[str | None, typer.Option(help="Name or path of a profile.")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="stage.field=value: a change of the profile.")
    ] = None,
    debug: Debug = False,
) -> None:
    """Check the machine and a model: what is there, what is missing, what memory it takes."""
    found = [*_machine(), *_optional()]
    if model is not None:
        found += _model(model, profile, settings_of(settings or []))
    out = Console(highlight=False)
    for finding in found:
        colour = _COLOURS[finding.verdict]
        line = f"{finding.what:<16}[{colour}]{finding.verdict:<5}[/]{escape(finding.text)}"
        out.print(line, soft_wrap=True)
    if any(finding.verdict == "bad" for finding in found):
        raise typer.Exit(1)


# --- the machine -------------------------------------------------------------------------------


def _machine() -> Iterator[Finding]:
    import torch

    from hocket.engine.platform import current_platform

    yield Finding("hocket", "ok", hocket.__version__)
    supported = (3, 10) <= sys.version_info[:2] <= (3, 13)
    text = f"{platform.python_version()}" + ("" if supported else "; 3.10 to 3.13 are supported")
    yield Finding("python", "ok" if supported else "note", f"{text}, {platform.platform()}")
    yield Finding("torch", "ok", f"{torch.__version__}, platform {current_platform()}")
    yield Finding("cpu", "ok", f"{os.cpu_count()} CPUs, PyTorch uses {torch.get_num_threads()} threads")
    memory = _memory()
    if memory is not None:
        yield Finding("memory", "ok", f"{_size(memory)}")
    yield from _devices(torch)
    yield from _encoders()


def _devices(torch: Any) -> Iterator[Finding]:
    if not torch.cuda.is_available():
        yield Finding("devices", "note", "no GPU that this PyTorch can use: models run on the CPU")
        return
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        text = f"{torch.cuda.get_device_name(index)}: {_size(free)} of {_size(total)} free"
        yield Finding(f"cuda:{index}", "ok", text)


def _encoders() -> Iterator[Finding]:
    from av.codec import codecs_available

    needed = {"mp3": "libmp3lame", "opus": "libopus", "aac": "aac", "flac": "flac"}
    lacking = [name for name, codec in needed.items() if codec not in codecs_available]
    if lacking:
        yield Finding("formats", "bad", f"this build of PyAV lacks {', '.join(lacking)}; reinstall av")
    else:
        yield Finding("formats", "ok", f"wav, pcm, {', '.join(needed)}")


def _optional() -> Iterator[Finding]:
    for package, use, remedy in (
        ("triton", "fused kernels on GPUs", "pip install 'hocket[gpu]'"),
        ("modelscope", "models from ModelScope", "pip install 'hocket[modelscope]'"),
        ("uvloop", "a faster event loop", "pip install uvloop"),
    ):
        there = importlib.util.find_spec(package) is not None
        yield Finding(
            package, "ok" if there else "note", use if there else f"not installed ({use}): {remedy}"
        )
    player = find_player()
    text = player or "none found: `hocket say --play` needs one, such as ffplay"
    yield Finding("player", "ok" if player else "note", text)


def _memory() -> int | None:
    """Bytes of memory of this machine, or of the part of it that this process may use."""
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError):  # Windows
        return None
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.is_file():
        text = limit.read_text().strip()
        total = min(total, int(text)) if text.isdecimal() else total
    return total


# --- the model ---------------------------------------------------------------------------------


def _model(name: str, profile_name: str | None, overrides: dict[str, str]) -> Iterator[Finding]:
    offline = os.environ.setdefault("HF_HUB_OFFLINE", _LOOK)  # before the hub's library is imported
    from hocket.engine.hub import resolve_model
    from hocket.engine.profile import load_profile, match_stages
    from hocket.models import family_of, load_family

    try:
        folder = resolve_model(name)
        family_name = family_of(folder)
        family = load_family(family_name)
        info = family.front_end(folder).info
    except HocketError as error:
        missing, ours, _ = error.message.partition(", and HF_HUB_OFFLINE")
        if ours and offline == _LOOK:
            yield Finding("model", "bad", f"{missing}; its first use downloads them")
        else:
            yield Finding("model", "bad", error.message)
        return
    yield Finding("model", "ok", f"{folder}: {family_name}, {', '.join(info.tasks)}")
    disk = shutil.disk_usage(folder)
    size = sum(file.stat().st_size for file in folder.rglob("*.safetensors"))
    yield Finding("weights", "ok", f"{_size(size)} on disk; {_size(disk.free)} free there")
    try:
        profile = load_profile(profile_name or family.profile, overrides=overrides)
        match_stages(profile, family.stages)
    except HocketError as error:
        yield Finding("profile", "bad", error.message)
        return
    yield Finding("profile", "ok", f"{profile.family} on {profile.platform}")
    yield from _plan(family, folder, profile)


def _plan(family: Any, folder: Path, profile: Profile) -> Iterator[Finding]:
    """What each stage takes on its device, and whether that fits."""
    import torch

    from hocket.engine.worker import dtype_of, load_options
    from hocket.nn.parallel import Shard

    kinds = {stage.name: stage.kind for stage in family.stages}
    needed: dict[str, int] = {}
    for name in (name for name in family.used_stages(folder) if name in profile.stages):
        stage = profile.stages[name]
        dtype = dtype_of(stage.dtype, torch.device(stage.device))
        # On the meta device tensors have shapes and no content: the plan costs no memory.
        try:
            options = load_options(stage, Shard(0, stage.tensor_parallel))
            program = family.load(name, folder, torch.device("meta"), dtype, **options)
        except HocketError as error:
            yield Finding(f"stage {name}", "note", f"{stage.device}: no memory plan: {error.message}")
            return
        weights = sum(t.numel() * t.element_size() for t in _tensors(program, set()))
        state = _state_bytes(kinds[name], program, stage)
        kind, _, number = stage.device.partition(":")
        for n in range(stage.replicas * stage.tensor_parallel):  # one device after the other
            device = f"{kind}:{int(number) + n}" if number else kind
            needed[device] = needed.get(device, 0) + weights + state
        text = f"{stage.device}, {_short(dtype)}: weights {_size(weights)}"
        if stage.tensor_parallel > 1:
            text += f" on each of {stage.tensor_parallel} devices"
        if state:
            text += f", state {_size(state)} for {stage.slots} slots"
        yield Finding(f"stage {name}", "ok", text)
    for device, count in needed.items():
        there = _memory() if device == "cpu" else torch.cuda.get_device_properties(device).total_memory
        text = f"{_size(count)} when all slots are in use"
        if there is None:
            yield Finding(f"plan {device}", "note", text)
        elif count > there:
            remedy = "lower slots or kv_blocks with --set, or take a smaller model"
            yield Finding(f"plan {device}", "bad", f"{text}, but it has {_size(there)}; {remedy}")
        else:
            yield Finding(f"plan {device}", "ok", f"{text} of {_size(there)}")


def _tensors(thing: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    """Every tensor that can be reached from a program."""
    import torch

    if id(thing) in seen:
        return
    seen.add(id(thing))
    if isinstance(thing, torch.Tensor):
        yield thing
        return
    parts: list[Any] = []
    if isinstance(thing, Mapping):
        parts = list(thing.values())
    elif isinstance(thing, list | tuple):
        parts = list(thing)
    elif isinstance(thing, torch.nn.Module):
        parts = [*thing.parameters(), *thing.buffers()]
    elif is_dataclass(thing) or hasattr(thing, "__dict__"):  # a program or its weights, whoever wrote it
        names = [*getattr(thing, "__dict__", ()), *getattr(type(thing), "__slots__", ())]
        parts = [getattr(thing, name) for name in names if hasattr(thing, name)]
    for part in parts:
        yield from _tensors(part, seen)


def _state_bytes(kind: StageKind, program: Any, stage: StageProfile) -> int:
    """What the runtime allocates for the program's state, KV blocks included."""
    from hocket.core import StageKind, leaves
    from hocket.runtime.state import allocate

    if kind is StageKind.ONE_SHOT:
        return 0
    blocks, context = 0, 0
    if kind is StageKind.AUTOREGRESSIVE:
        blocks = (stage.kv_blocks or 1024) + 1
        context = min(program.max_tokens, blocks * stage.block_tokens)
    state = allocate(
        program.declare(),
        slots=stage.slots + 1,
        device="meta",
        blocks=blocks,
        block_tokens=stage.block_tokens,
        max_blocks=-(-context // stage.block_tokens),
    )
    return sum(tensor.numel() * tensor.element_size() for tensor in leaves(state.tensors))


def _size(count: int) -> str:
    return f"{count / _GIB:.2f} GiB" if count >= _GIB // 10 else f"{count / (1 << 20):.1f} MiB"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
