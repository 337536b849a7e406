"""Where a model's files are: a local folder, or a snapshot of a hub's repository, checked to be whole.

Downloads and their progress bars are the hub libraries' own, and so are their caches and access tokens. What
the files mean is the family's business; here they are only counted and measured, so that half a download is
reported as such and not as a missing tensor.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args

import huggingface_hub
from huggingface_hub import errors as hf
from safetensors import SafetensorError, safe_open

from hocket.errors import StartupError, clip
from hocket.nn.synthetic import DRAWN

Source = Literal["auto", "huggingface", "modelscope", "local"]

SOURCES: tuple[Source, ...] = get_args(Source)
SOURCE_VARIABLE = "HOCKET_MODEL_SOURCE"

PATTERNS = ["*.json", "*.jinja", "*.safetensors", "*.txt", "pytorch_model.bin", "audiovae.pth"]
"""What is downloaded, from sub-folders too: configs, templates, vocabularies, merges, and weights
in one format; the last two are VoxCPM's."""


def resolve_model(name: str | Path, source: Source = "auto", revision: str | None = None) -> Path:
    """The folder that holds the files of model `name`, downloaded if need be.

    name      a folder, or owner/name on a hub
    source    "auto": the folder if there is one, else the hub that HOCKET_MODEL_SOURCE names or, if it
              is not set, Hugging Face
    revision  branch, tag or commit on the hub; None: its main branch

    Raises StartupError, naming what is missing and what helps, if the model cannot be found, may not be
    read, or is incomplete.
    """
    text = str(name)
    hub = chosen(source)
    folder = Path(os.path.expanduser(text))  # unlike Path.expanduser, leaves an unknown ~user alone
    is_local = hub == "local" or isinstance(name, Path) or is_path(text)
    if is_local or (source == "auto" and folder.exists()):
        if revision is not None:
            fail(text, f"is a folder, which has no revision {revision!r}", param="revision")
        if not folder.exists():
            fail(text, "there is no such folder; expected a folder, or owner/name of a model on a hub")
        if not folder.is_dir():
            fail(text, "is a file; expected the folder that holds config.json and the weights")
        folder = folder.absolute()
    elif not REPOSITORY.fullmatch(text):
        fail(text, "is neither a folder nor a hub's name; expected owner/name")
    elif hub == "modelscope":
        folder = from_modelscope(text, revision)
    else:
        folder = from_hugging_face(text, revision)
    check_whole(text, folder)
    return folder


REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)


def chosen(source: str) -> str:
    """`source`, or what the environment puts in place of "auto"."""
    where = "source"
    if source == "auto":
        where, source = SOURCE_VARIABLE, os.environ.get(SOURCE_VARIABLE) or "auto"
    if source not in SOURCES:
        message = f"{where} is {clip(source)!r}; expected one of {', '.join(SOURCES)}"
        raise StartupError(message, param="source")
    return source


def is_path(text: str) -> bool:
    """Whether the name can only be a path, so that a missing folder is not looked for on a hub."""
    return text.startswith((".", "/", "~")) or text.count("/") > 1


# --- the hubs ----------------------------------------------------------------------------------

HTTP_ERROR: Any = hf.HfHubHTTPError.__bases__[0]
"""The base of the HTTP library's errors: which library that is depends on the release of huggingface_hub."""


def from_hugging_face(name: str, revision: str | None) -> Path:
    """A snapshot of a Hugging Face repository, from the cache if it is there. Raises StartupError."""
    try:
        return Path(huggingface_hub.snapshot_download(name, revision=revision, allow_patterns=PATTERNS))
    except hf.GatedRepoError as e:
        remedy = (
            f"ask for access at its page on Hugging Face, then run `hf auth login` or set HF_TOKEN; {LOCAL}"
        )
        fail(name, f"access to it is restricted; {remedy}", e)
    except hf.RepositoryNotFoundError as e:
        remedy = "check the spelling; a private model needs `hf auth login` or HF_TOKEN"
        fail(name, f"there is no such folder, and no such model on Hugging Face; {remedy}", e)
    except hf.RevisionNotFoundError as e:
        fail(name, f"it has no revision {clip(revision)!r} on Hugging Face", e, param="revision")
    except hf.LocalEntryNotFoundError as e:
        if isinstance(e.__cause__, hf.OfflineModeIsEnabled):
            remedy = f"unset it, {LOCAL}"
            fail(name, f"its files are not in the cache, and HF_HUB_OFFLINE forbids a download; {remedy}", e)
        fail(name, f"its files are not in the cache, and Hugging Face cannot be reached; {ELSEWHERE}", e)
    except (HTTP_ERROR, OSError) as e:
        fail(name, f"the download from Hugging Face failed: {clip(e, 300)}; {ELSEWHERE}", e)


def from_modelscope(name: str, revision: str | None) -> Path:
    """A snapshot of a ModelScope repository, from the cache if it is there. Raises StartupError."""
    try:
        import modelscope
        from modelscope.hub.errors import HubError, NotExistError
    except ImportError as e:
        fail(name, "downloads from ModelScope need a package: pip install 'hocket[modelscope]'", e)
    try:
        return Path(modelscope.snapshot_download(name, revision=revision, allow_patterns=PATTERNS))
    except NotExistError as e:
        at = f" at revision {clip(revision)!r}" if revision else ""
        fail(name, f"there is no such model on ModelScope{at}; check the spelling", e)
    except (HubError, OSError) as e:
        fail(name, f"the download from ModelScope failed: {clip(e, 300)}; {LOCAL}", e)


LOCAL = "or copy the files into a folder and give its path"
ELSEWHERE = f"check the connection, set {SOURCE_VARIABLE}=modelscope, {LOCAL}"


# --- is it whole? ------------------------------------------------------------------------------

OTHERS = ("pytorch_model.bin", DRAWN)  # weights of VoxCPM-0.5B as published, and random ones that are drawn


def check_whole(name: str, folder: Path) -> None:
    """Check that the folder has a config and weights, and that no weight file is missing or cut short."""
    config = folder / "config.json"
    if not config.is_file():
        snapshots = sorted(folder.glob("snapshots/*/config.json"))
        if snapshots:
            fail(name, f"is a hub's cache folder; give the snapshot in it: {snapshots[0].parent}")
        fail(name, f"{folder} has no config.json; expected the folder of a checkpoint")
    read_object(name, config)

    weights = sorted(folder.rglob("*.safetensors"))
    for index in sorted(folder.rglob("*.safetensors.index.json")):
        shards = read_object(name, index).get("weight_map")
        if not isinstance(shards, dict):
            fail(name, f"{index} has no weight_map")
        missing = sorted({shard for shard in shards.values() if index.parent / shard not in weights})
        if missing:
            fail(name, f"{index.parent} is incomplete: it has no {', '.join(missing)}; download it again")
    if not any(file.parent == folder for file in weights) and not any((folder / n).is_file() for n in OTHERS):
        fail(name, f"{folder} has no *.safetensors file; other weight formats are not read")
    for file in weights:
        problem = defect(file)
        if problem:
            fail(name, f"{file} {problem}; download it again")


def read_object(name: str, file: Path) -> dict[str, object]:
    """The JSON object in `file`. Raises StartupError, naming the model."""
    try:
        value = json.loads(file.read_bytes())
    except ValueError as e:
        fail(name, f"{file} is not JSON: {e}", e)
    except OSError as e:
        fail(name, f"{file} cannot be read: {e.strerror}", e)
    if not isinstance(value, dict):
        fail(name, f"{file} holds no JSON object")
    return value


def defect(file: Path) -> str | None:
    """What is wrong with a safetensors file, as far as its header and size tell; None: nothing."""
    try:
        with file.open("rb") as f:
            if f.read(8) == b"version ":
                return "is a Git LFS pointer, not the weights: run `git lfs pull`"
        with safe_open(file, framework="np"):  # reads the header, and compares the size it speaks of
            return None
    except FileNotFoundError:
        return "is a link to a file that is gone"
    except OSError as e:
        return f"cannot be read: {e.strerror}"
    except SafetensorError as e:
        return f"is cut short or damaged ({e})"


def fail(name: str, problem: str, cause: Exception | None = None, param: str = "model") -> NoReturn:
    """Raises StartupError: what is wrong with model `name`."""
    raise StartupError(f"model {clip(name)!r}: {problem}", param=param) from cause
