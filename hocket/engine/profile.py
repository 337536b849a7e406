"""Profiles: the YAML that says which stages run where, and within what limits.

A profile is read strictly. Whatever is unknown, misspelt, doubled or out of range is a `StartupError` that
names file, line and dotted field, and says what was expected. Three layers make the result, later ones
winning: the file itself, its `platforms:` entry for the platform in use, and the caller's overrides.

What a setting means is said once, at `StageProfile` and `Profile`; docs/profiles.md is for users. Whether a
stage exists and can use a setting is known to the family: see `match_stages`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import NoReturn, TypeGuard

import msgspec
import yaml

from hocket.core import Stage, StageKind
from hocket.engine.platform import DEVICE_TYPES, PLATFORMS, current_platform
from hocket.errors import StartupError, clip


class StageProfile(msgspec.Struct, frozen=True, kw_only=True):
    """How one stage runs. A count is of what requests can use; padding rows and blocks come on top."""

    device: str = "cpu"  # a PyTorch device: "cpu", "cuda:0"
    dtype: str = "auto"  # of the weights; "auto": the checkpoint's own, float32 on a CPU
    slots: int = 16  # requests held at once
    max_batch: int = 16  # requests in one step; left out: as many as there are slots
    kv_blocks: int | None = None  # blocks of the KV cache, or
    kv_memory: float | None = None  # share of the device's memory, of what the weights leave free
    block_tokens: int = 16  # tokens a KV block
    max_context: int = 8192  # tokens of one request, prompt and frames; the model's own limit if that is less
    prefill_tokens: int = 512  # prompt tokens that surely run in less time than a frame lasts
    prefix_cache: bool = True  # reuse KV blocks of equal prompt beginnings
    replicas: int = 1  # copies of the stage
    tensor_parallel: int = 1  # devices that each copy is spread over, from its own on
    weights: str = "dtype"  # "float8": large matrices in half the bytes of bfloat16, a scale for each row
    max_chunk_frames: int = 8  # most frames decoded in one step of a stream


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """A profile merged for one platform and checked. `stages` is in the order of the file."""

    family: str
    platform: str
    stages: dict[str, StageProfile]
    max_waiting: int = 256  # requests that may queue before new ones are refused
    threads: int = 0  # PyTorch's CPU threads in each worker; 0: share the cores between the workers
    origins: dict[str, str] = {}  # dotted field -> "file:line" or "override", of the fields that were set

    def error(self, field: str, message: str) -> StartupError:
        """`message` about `field`, with the place that set it. For whoever finds out later that it fails."""
        origin = self.origins.get(field)
        return StartupError(f"{origin}: {message}" if origin else message, param=field)


def load_profile(
    path_or_name: str | Path, platform: str | None = None, overrides: Mapping[str, str] | None = None
) -> Profile:
    """The profile at a path, or the one that ships under a name, merged for `platform`.

    `platform` is one of `PLATFORMS`; None: this machine's. A string is a path if it contains a slash or
    ends in .yaml or .yml. `overrides` maps dotted fields to YAML scalars: `{"stages.talker.slots": "32"}`.

    Raises StartupError, naming file, line and field.
    """
    if platform is None:
        platform = current_platform()
    elif platform not in PLATFORMS:
        problem = unknown(platform, PLATFORMS, "platforms")
        raise StartupError(f"platform {platform!r} {problem}", param="platform")
    file, text = read(path_or_name)
    layers = Reader(file, text).layers()
    base = layers.pop("")
    given = [base, layers.get(platform, {}), read_overrides(overrides or {}, base)]
    return build(merge(given), platform)


def shipped_profiles() -> list[str]:
    """Names of the profiles that come with hocket."""
    names = [entry.name for entry in (files("hocket") / "profiles").iterdir()]
    return sorted(name.removesuffix(".yaml") for name in names if name.endswith(".yaml"))


def match_stages(profile: Profile, stages: Sequence[Stage]) -> None:
    """Check the profile against the stages of its family.

    Raises StartupError for a stage that is missing or unknown, a setting that the stage's kind cannot use,
    an autoregressive stage without a KV size, or a batch larger than its slots.
    """
    kinds = {stage.name: stage.kind for stage in stages}
    options = {stage.name: stage.options for stage in stages}
    optional = {stage.name for stage in stages if stage.optional}
    for name in profile.stages:
        if name not in kinds:
            problem = unknown(name, kinds, f"stages of {profile.family}")
            raise profile.error(f"stages.{name}", f"stages.{name} {problem}")
    for name, kind in kinds.items():
        field = f"stages.{name}"
        if name not in profile.stages:
            if name in optional:
                continue
            needed = ", ".join(k for k in kinds if k not in optional)
            raise profile.error("stages", f"{field} is missing; {profile.family} needs {needed}")
        stage = profile.stages[name]
        for setting in STAGE_SETTINGS:
            if f"{field}.{setting}" in profile.origins and setting in UNUSED[kind]:
                usable = ", ".join(s for s in STAGE_SETTINGS if s not in UNUSED[kind])
                what = kind.value.replace("_", "-")
                message = f"{field}.{setting} has no effect: the stage is {what}; its settings: {usable}"
                raise profile.error(f"{field}.{setting}", message)
        for setting, option in OPTIONS.items():
            value, usual = getattr(stage, setting), getattr(StageProfile(), setting)
            if value != usual and option not in options[name]:
                can = [k for k in kinds if option in options[k]]
                others = f"; of {profile.family}'s stages {', '.join(can)} can" if can else ""
                message = f"{field}.{setting} is {value}, which this stage cannot do; leave it out{others}"
                raise profile.error(f"{field}.{setting}", message)
        if kind is StageKind.AUTOREGRESSIVE and stage.kv_blocks is None and stage.kv_memory is None:
            raise profile.error(field, f"{field} needs kv_blocks or kv_memory")
        if stage.device.startswith("cpu") and stage.kv_memory is not None:
            message = f"{field}.kv_memory is for accelerators; a stage on the CPU needs kv_blocks"
            raise profile.error(f"{field}.kv_memory", message)
        if kind is not StageKind.ONE_SHOT and stage.max_batch > stage.slots:
            message = f"{field}.max_batch is {stage.max_batch}; expected at most its slots, {stage.slots}"
            raise profile.error(f"{field}.max_batch", message)


# --- what may be set ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Setting:
    """The values that one setting takes, as a test and in words."""

    accepts: Callable[[object], bool]
    expected: str


def whole(least: int) -> Setting:
    """A setting that takes whole numbers from `least` on."""
    return Setting(lambda v: is_whole(v) and v >= least, f"a whole number of at least {least}")


def is_whole(value: object) -> TypeGuard[int]:
    """Whether a YAML value is a whole number; YAML's true is none."""
    return isinstance(value, int) and not isinstance(value, bool)  # YAML's true is not 1


def one_of(*words: str) -> Setting:
    """A setting that takes one of `words`."""
    return Setting(lambda v: v in words, f"one of {', '.join(words)}")


def is_device(value: object) -> bool:
    """Whether a value names a device: a number from 0, cpu, or KIND:NUMBER."""
    if is_whole(value):
        return value >= 0
    return isinstance(value, str) and re.fullmatch(r"cpu|(cpu|cuda|xpu|npu):\d+", value) is not None


NAME = Setting(
    lambda v: isinstance(v, str) and re.fullmatch(r"[a-z][a-z0-9_]*", v) is not None,
    "a name of small letters, digits and underscores",
)
DEVICE = Setting(is_device, "the number of a visible device, cpu, or a device such as cuda:0")
SHARE = Setting(
    lambda v: (is_whole(v) or isinstance(v, float)) and 0 < v <= 1,
    "a share above 0 and at most 1",
)
SWITCH = Setting(lambda v: isinstance(v, bool), "true or false")

STAGE_SETTINGS: dict[str, Setting] = {
    "device": DEVICE,
    "dtype": one_of("auto", "float32", "bfloat16", "float16"),
    "slots": whole(1),
    "max_batch": whole(1),
    "kv_blocks": whole(1),
    "kv_memory": SHARE,
    "block_tokens": whole(1),
    "max_context": whole(1),
    "prefill_tokens": whole(1),
    "prefix_cache": SWITCH,
    "replicas": whole(1),
    "tensor_parallel": whole(1),
    "weights": one_of("dtype", "float8"),
    "max_chunk_frames": whole(1),
}
GLOBAL_SETTINGS: dict[str, Setting] = {"max_waiting": whole(0), "threads": whole(0)}

ALTERNATIVES = {"kv_blocks": "kv_memory", "kv_memory": "kv_blocks"}
"""Two ways to say one thing: setting one in a later layer takes back the other."""

PAGED = ("kv_blocks", "kv_memory", "block_tokens", "max_context", "prefill_tokens", "prefix_cache")
UNUSED: dict[StageKind, tuple[str, ...]] = {
    StageKind.AUTOREGRESSIVE: ("max_chunk_frames",),
    StageKind.STREAMING: (*PAGED, "tensor_parallel", "weights"),
    StageKind.ONE_SHOT: (*PAGED, "slots", "max_chunk_frames", "tensor_parallel", "weights"),
}
OPTIONS = {"tensor_parallel": "shard", "weights": "float8"}
"""Settings that a stage can use only if its family says so -> what `Stage.options` calls them."""


# --- reading -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Found:
    """A value and the place that gave it."""

    value: object
    origin: str


Layer = dict[str, Found]  # by dotted field


def read(path_or_name: str | Path) -> tuple[str, str]:
    """-> the file as messages name it, its text"""
    name = str(path_or_name)
    is_path = isinstance(path_or_name, Path) or "/" in name or name.endswith((".yaml", ".yml"))
    if not is_path and name not in shipped_profiles():
        problem = unknown(name, shipped_profiles(), "profiles")
        raise StartupError(f"profile {clip(name)!r} {problem}; or give the path of a file", param="profile")
    file = Path(name).expanduser() if is_path else files("hocket") / "profiles" / f"{name}.yaml"
    try:
        return str(file), file.read_text("utf-8")
    except OSError as e:
        raise StartupError(f"profile {name} cannot be read: {e.strerror}", param="profile") from e
    except UnicodeDecodeError as e:
        message = f"profile {name} is not UTF-8 text: {e.reason} at byte {e.start}"
        raise StartupError(message, param="profile") from e


@dataclass(frozen=True, slots=True)
class Entry:
    """A value in the file, and the line of the key it belongs to."""

    node: yaml.Node
    line: int


class Reader:
    """One file's YAML, read by its nodes, which know their lines."""

    def __init__(self, file: str, text: str) -> None:
        self.file = file
        try:
            self.loader = yaml.SafeLoader(text)
            root = self.loader.get_single_node()
        except yaml.MarkedYAMLError as e:
            mark = e.problem_mark or e.context_mark
            place = f"{file}:{mark.line + 1}" if mark else file
            raise StartupError(f"{place}: not valid YAML: {e.problem or e.context}", param="profile") from e
        except yaml.YAMLError as e:  # characters that YAML does not allow: no line is known
            raise StartupError(f"{file}: not valid YAML: {clip(e)}", param="profile") from e
        if root is None:
            raise StartupError(f"{file}: is empty; expected family and stages", param="profile")
        self.root = Entry(root, root.start_mark.line + 1)

    def layers(self) -> dict[str, Layer]:
        """The file's own settings under "", each platform's differences under its name."""
        top = self.mapping(self.root, "", ("family", *GLOBAL_SETTINGS, "stages", "platforms"), "fields")
        for key in ("family", "stages"):
            if key not in top:
                self.fail(self.root, key, "is missing")
        platforms = top.pop("platforms", None)
        layers = {"": self.layer(top, "", None)}
        if platforms is not None:
            stages = stage_names(layers[""])
            for name, entry in self.mapping(platforms, "platforms", PLATFORMS, "platforms").items():
                field = f"platforms.{name}"
                delta = self.mapping(entry, field, (*GLOBAL_SETTINGS, "stages"), "fields")
                layers[name] = self.layer(delta, f"{field}.", stages)
        return layers

    def layer(self, entries: Mapping[str, Entry], prefix: str, stages: Collection[str] | None) -> Layer:
        """Settings by dotted field, without `prefix`. `stages`: the names allowed; None: any."""
        found: Layer = {}
        for key, entry in entries.items():
            if key == "stages":
                found |= self.stages(entry, prefix, stages)
            else:
                found[key] = self.scalar(entry, prefix + key, GLOBAL_SETTINGS.get(key, NAME))
        return found

    def stages(self, entry: Entry, prefix: str, known: Collection[str] | None) -> Layer:
        by_name = self.mapping(entry, f"{prefix}stages", known, "stages")
        if not by_name:
            self.fail(entry, f"{prefix}stages", "is empty; expected at least one stage")
        found: Layer = {"stages": Found(None, self.origin(entry))}
        for name, stage in by_name.items():
            field = f"stages.{name}"
            if not NAME.accepts(name):
                self.fail(stage, prefix + field, f"is not a stage's name; expected {NAME.expected}")
            settings = self.mapping(stage, prefix + field, tuple(STAGE_SETTINGS), "settings")
            found[field] = Found(None, self.origin(stage))
            for key, value in settings.items():
                if ALTERNATIVES.get(key) in settings:
                    problem = f"excludes {ALTERNATIVES[key]}; expected one of the two"
                    self.fail(value, f"{prefix}{field}.{key}", problem)
                found[f"{field}.{key}"] = self.scalar(value, f"{prefix}{field}.{key}", STAGE_SETTINGS[key])
        return found

    def mapping(self, entry: Entry, field: str, known: Collection[str] | None, what: str) -> dict[str, Entry]:
        """The entries of a mapping; each key is a string, given once, and one of `known` (None: any)."""
        if not isinstance(entry.node, yaml.MappingNode):
            expected = f"{what} ({', '.join(known)})" if known else what
            self.fail(entry, field or "profile", f"is {describe(entry.node)}; expected {expected}")
        entries: dict[str, Entry] = {}
        for key_node, node in entry.node.value:
            key = key_node.value if isinstance(key_node, yaml.ScalarNode) else describe(key_node)
            here = Entry(node, key_node.start_mark.line + 1)
            dotted = f"{field}.{key}" if field else key
            if known is not None and key not in known:
                self.fail(here, dotted, unknown(key, known, what))
            if key in entries:
                self.fail(here, dotted, f"is given twice, first on line {entries[key].line}")
            entries[key] = here
        return entries

    def scalar(self, entry: Entry, field: str, setting: Setting) -> Found:
        value = self.value(entry.node)
        if not setting.accepts(value):
            self.fail(entry, field, f"is {describe(entry.node)}; expected {setting.expected}")
        return Found(value, self.origin(entry))

    def value(self, node: yaml.Node) -> object:
        """A plain Python value; the node itself, which no setting accepts, where YAML has none for it."""
        if not isinstance(node, yaml.ScalarNode) or node.tag not in PLAIN:
            return node
        try:
            return self.loader.construct_object(node)
        except ValueError:  # `!!int many`
            return node

    def origin(self, entry: Entry) -> str:
        return f"{self.file}:{entry.line}"

    def fail(self, entry: Entry, field: str, problem: str) -> NoReturn:
        raise StartupError(f"{self.origin(entry)}: {field} {problem}", param=field)


PLAIN = tuple(f"tag:yaml.org,2002:{tag}" for tag in ("int", "float", "bool", "str"))


def describe(node: yaml.Node) -> str:
    """What a YAML node holds, for an error message."""
    if isinstance(node, yaml.ScalarNode):
        return "empty" if not node.value and node.style is None else repr(clip(node.value))
    return "a mapping" if isinstance(node, yaml.MappingNode) else "a list"


def read_overrides(overrides: Mapping[str, str], base: Layer) -> Layer:
    """The caller's settings as the last layer. `base` says which stages there are."""
    stages = [f"stages.{name}" for name in stage_names(base)]
    known = GLOBAL_SETTINGS | {f"{stage}.{key}": s for stage in stages for key, s in STAGE_SETTINGS.items()}
    found: Layer = {}
    for field, text in overrides.items():
        owner, _, key = field.rpartition(".")
        if field not in known:
            near = (
                [f"{owner}.{k}" for k in STAGE_SETTINGS] if owner in stages else [*GLOBAL_SETTINGS, *stages]
            )
            problem = unknown(field, known, "settings", shown=near)
            raise StartupError(f"override: {clip(field)} {problem}", param=clip(field))
        if key in ALTERNATIVES and f"{owner}.{ALTERNATIVES[key]}" in overrides:
            problem = f"excludes {ALTERNATIVES[key]}; expected one of the two"
            raise StartupError(f"override: {field} {problem}", param=field)
        value = yaml_scalar(text)
        if not known[field].accepts(value):
            problem = f"is {clip(text)!r}; expected {known[field].expected}"
            raise StartupError(f"override: {field} {problem}", param=field)
        found[field] = Found(value, "override")
    return found


def yaml_scalar(text: str) -> object:
    """The value a text would have in a profile; None, which no setting accepts, if it would be none."""
    try:
        reader = Reader("override", text)
    except StartupError:
        return None
    return reader.value(reader.root.node)


def stage_names(layer: Layer) -> list[str]:
    """Names of the stages that a layer speaks of, in its order."""
    return [field.split(".")[1] for field in layer if field.count(".") == 1]


def unknown(word: str, known: Iterable[str], what: str, shown: Iterable[str] | None = None) -> str:
    """What to say of a word that is not among the known ones: the nearest of them, and the list."""
    known = list(known)
    close = difflib.get_close_matches(word, known, n=1)
    guess = f" did you mean {close[0]!r}?" if close else ""
    return f"is not known;{guess} known {what}: {', '.join(known if shown is None else shown)}"


# --- merging -----------------------------------------------------------------------------------


def merge(layers: Sequence[Layer]) -> Layer:
    """All layers in one, later ones winning."""
    merged: Layer = {}
    for layer in layers:
        for field, found in layer.items():
            owner, _, key = field.rpartition(".")
            if key in ALTERNATIVES:
                merged.pop(f"{owner}.{ALTERNATIVES[key]}", None)
            if found.value is None and field in merged:
                continue  # a stage that a platform only amends keeps the line of its definition
            merged[field] = found
    return merged


def build(merged: Layer, platform: str) -> Profile:
    """The checked profile of a merged layer. Raises StartupError, naming file, line and field."""
    stages: dict[str, StageProfile] = {}
    for name in stage_names(merged):
        own = {key: merged.get(f"stages.{name}.{key}") for key in STAGE_SETTINGS}
        settings = {key: found.value for key, found in own.items() if found is not None}
        settings["device"] = place(own["device"], platform, f"stages.{name}.device")
        settings.setdefault("max_batch", settings.get("slots", StageProfile().slots))
        stages[name] = msgspec.convert(settings, StageProfile)
    top = {key: merged[key].value for key in ("family", *GLOBAL_SETTINGS) if key in merged}
    origins = {field: found.origin for field, found in merged.items()}
    return msgspec.convert({**top, "platform": platform, "stages": stages, "origins": origins}, Profile)


def place(found: Found | None, platform: str, field: str) -> str:
    """The PyTorch device that a stage's `device` means on `platform`; left out, it is device 0."""
    kind = DEVICE_TYPES[platform]
    value = found.value if found else 0
    if isinstance(value, int):
        return "cpu" if kind == "cpu" else f"{kind}:{value}"
    assert found is not None
    assert isinstance(value, str)
    if value.split(":")[0] not in ("cpu", kind):
        expected = "a number or cpu" if kind == "cpu" else f"a number, cpu or {kind}:n"
        message = f"{field} is {value!r}, but the platform is {platform}; expected {expected}"
        raise StartupError(f"{found.origin}: {message}", param=field)
    return value
