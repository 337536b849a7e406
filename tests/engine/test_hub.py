"""Models by folder and by hub name. The hubs are fakes that answer with a folder, or raise."""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import huggingface_hub
import numpy as np
import pytest
from huggingface_hub import errors as hf
from safetensors.numpy import save_file

from hocket.engine.hub import PATTERNS, SOURCE_VARIABLE, resolve_model
from hocket.errors import StartupError
from hocket.nn.synthetic import DRAWN

NAME = "ada/tiny-tts"


@pytest.fixture(autouse=True)
def _no_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SOURCE_VARIABLE, raising=False)


def checkpoint(folder: Path) -> Path:
    """The smallest folder that passes: a config, weights, and a codec with weights of its own."""
    for part in (folder, folder / "codec"):
        part.mkdir(parents=True, exist_ok=True)
        (part / "config.json").write_text(json.dumps({"model_type": "tiny"}))
        save_file({"weight": np.arange(6, dtype=np.float32)}, part / "model.safetensors")
    return folder


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return checkpoint(tmp_path / "model")


class FakeHub:
    """In place of a hub library's `snapshot_download`."""

    def __init__(self, result: Path | Exception) -> None:
        self.result = result
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def __call__(self, name: str, **options: Any) -> str:
        self.calls.append((name, options))
        if isinstance(self.result, Exception):
            raise self.result
        return str(self.result)


UseHub = Callable[[Path | Exception], FakeHub]


@pytest.fixture
def hugging_face(monkeypatch: pytest.MonkeyPatch) -> UseHub:
    def use(result: Path | Exception) -> FakeHub:
        hub = FakeHub(result)
        monkeypatch.setattr(huggingface_hub, "snapshot_download", hub)
        return hub

    return use


class HubError(Exception):
    pass


class NotExistError(HubError):
    pass


@pytest.fixture
def modelscope(monkeypatch: pytest.MonkeyPatch) -> UseHub:
    def use(result: Path | Exception) -> FakeHub:
        hub = FakeHub(result)
        package: Any = types.ModuleType("modelscope")
        errors: Any = types.ModuleType("modelscope.hub.errors")
        package.snapshot_download = hub
        errors.HubError, errors.NotExistError = HubError, NotExistError
        monkeypatch.setitem(sys.modules, "modelscope", package)
        monkeypatch.setitem(sys.modules, "modelscope.hub", types.ModuleType("modelscope.hub"))
        monkeypatch.setitem(sys.modules, "modelscope.hub.errors", errors)
        return hub

    return use


def refusal(name: str | Path, **options: Any) -> StartupError:
    with pytest.raises(StartupError) as caught:
        resolve_model(name, **options)
    return caught.value


# --- folders -----------------------------------------------------------------------------------


def test_folder_is_used_as_it_is(model: Path) -> None:
    assert resolve_model(model) == model
    assert resolve_model(str(model)) == model
    assert resolve_model(str(model), source="local") == model


def test_relative_folder_becomes_absolute_for_other_processes(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(model.parent)
    assert resolve_model("model") == model
    assert resolve_model("./model") == model


def test_home_is_expanded(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(model.parent))
    assert resolve_model("~/model") == model


def test_folder_wins_over_a_hub_of_the_same_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hugging_face: UseHub
) -> None:
    hub = hugging_face(tmp_path)
    folder = checkpoint(tmp_path / NAME)
    monkeypatch.chdir(tmp_path)
    assert resolve_model(NAME) == folder
    assert hub.calls == []


@pytest.mark.parametrize(
    "name", ["/no/such", "./such", "~/no-such-folder", "a/b/c", "~nobody-of-that-name/x"]
)
def test_missing_folder_is_not_looked_for_on_a_hub(name: str, hugging_face: UseHub) -> None:
    hub = hugging_face(Path())
    assert "there is no such folder" in refusal(name).message
    assert hub.calls == []


def test_local_never_asks_a_hub(hugging_face: UseHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = hugging_face(Path())
    assert "there is no such folder" in refusal(NAME, source="local").message
    monkeypatch.setenv(SOURCE_VARIABLE, "local")
    assert "there is no such folder" in refusal(NAME).message
    assert hub.calls == []


def test_file_in_place_of_a_folder(model: Path) -> None:
    assert "is a file; expected the folder" in refusal(model / "config.json").message


def test_folder_has_no_revisions(model: Path) -> None:
    error = refusal(model, revision="v1")
    assert error.param == "revision"
    assert "'v1'" in error.message


# --- what makes a folder whole -----------------------------------------------------------------


def remove(file: str) -> Callable[[Path], object]:
    return lambda folder: (folder / file).unlink()


def write(file: str, content: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / file).write_bytes(content)


def cut(file: str, keep: int) -> Callable[[Path], object]:
    return lambda folder: (folder / file).write_bytes((folder / file).read_bytes()[:keep])


def dangle(file: str) -> Callable[[Path], object]:
    def spoil(folder: Path) -> None:
        (folder / file).unlink()
        (folder / file).symlink_to("gone")

    return spoil


SPOILED = {
    "no config": (remove("config.json"), "has no config.json"),
    "config is no JSON": (write("config.json", b"{"), "config.json is not JSON"),
    "config is a list": (write("config.json", b"[]"), "config.json holds no JSON object"),
    "no weights": (remove("model.safetensors"), "has no *.safetensors file"),
    "empty weights": (write("model.safetensors", b""), "model.safetensors is cut short or damaged"),
    "header cut short": (cut("model.safetensors", 20), "model.safetensors is cut short or damaged"),
    "weights cut short": (cut("model.safetensors", -1), "model.safetensors is cut short or damaged"),
    "codec cut short": (cut("codec/model.safetensors", -1), "codec/model.safetensors is cut short"),
    "other bytes": (write("model.safetensors", b"\x80\x02ctorch\n"), "model.safetensors is cut short or"),
    "link to nothing": (dangle("model.safetensors"), "model.safetensors is a link to a file that is gone"),
    "Git LFS pointer": (
        write("model.safetensors", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"),
        "run `git lfs pull`",
    ),
    "index without map": (write("model.safetensors.index.json", b"{}"), "has no weight_map"),
    "shards missing": (
        write(
            "model.safetensors.index.json",
            b'{"weight_map": {"a": "m-1.safetensors", "b": "m-2.safetensors", "c": "model.safetensors"}}',
        ),
        "it has no m-1.safetensors, m-2.safetensors; download it again",
    ),
}


@pytest.mark.parametrize(("spoil", "problem"), SPOILED.values(), ids=SPOILED)
def test_incomplete_folder_is_refused(model: Path, spoil: Callable[[Path], object], problem: str) -> None:
    spoil(model)
    error = refusal(model)
    assert problem in error.message
    assert str(model) in error.message
    assert error.param == "model"


def test_sharded_weights_are_whole(model: Path) -> None:
    (model / "model.safetensors").rename(model / "m-1.safetensors")
    (model / "model.safetensors.index.json").write_text('{"weight_map": {"weight": "m-1.safetensors"}}')
    assert resolve_model(model) == model


@pytest.mark.parametrize("other", ["pytorch_model.bin", DRAWN])
def test_weights_in_other_files_are_taken(model: Path, other: str) -> None:
    """VoxCPM-0.5B is published as a pickled file; random weights are drawn by whoever reads them."""
    (model / "model.safetensors").rename(model / other)
    assert resolve_model(model) == model


# --- Hugging Face ------------------------------------------------------------------------------


def hub_cache(root: Path) -> Path:
    """A snapshot as the hub library keeps it: links into a folder of blobs."""
    whole = checkpoint(root / "whole")
    cache = root / "models--ada--tiny-tts"
    snapshot = cache / "snapshots" / "0123abcd"
    (cache / "blobs").mkdir(parents=True)
    files = [file for file in whole.rglob("*") if file.is_file()]
    for number, file in enumerate(files):
        link = snapshot / file.relative_to(whole)
        link.parent.mkdir(parents=True, exist_ok=True)
        blob = cache / "blobs" / str(number)
        file.rename(blob)
        link.symlink_to(Path(*[".."] * len(link.parent.relative_to(cache).parts)) / "blobs" / str(number))
    return snapshot


def test_hub_name_is_downloaded_once_and_only_what_is_read(tmp_path: Path, hugging_face: UseHub) -> None:
    hub = hugging_face(hub_cache(tmp_path))
    assert resolve_model(NAME, revision="v1") == hub.result
    assert hub.calls == [(NAME, {"revision": "v1", "allow_patterns": PATTERNS})]


def test_snapshot_of_links_can_be_given_as_a_folder(tmp_path: Path) -> None:
    snapshot = hub_cache(tmp_path)
    assert (snapshot / "codec/model.safetensors").is_symlink()
    assert resolve_model(snapshot) == snapshot


def test_snapshot_without_its_blobs_is_refused(tmp_path: Path) -> None:
    snapshot = hub_cache(tmp_path)
    (snapshot / "codec/model.safetensors").resolve().unlink()
    assert "codec/model.safetensors is a link to a file that is gone" in refusal(snapshot).message


def test_cache_folder_in_place_of_its_snapshot_names_the_snapshot(tmp_path: Path) -> None:
    snapshot = hub_cache(tmp_path)
    assert refusal(snapshot.parent.parent).message.endswith(f"give the snapshot in it: {snapshot}")


def test_incomplete_download_is_refused(model: Path, hugging_face: UseHub) -> None:
    (model / "model.safetensors").unlink()
    hugging_face(model)
    assert "has no *.safetensors file" in refusal(NAME).message


def response(status: int) -> httpx2.Response:
    return httpx2.Response(status, request=httpx2.Request("GET", "https://hub.test/"))


def offline() -> Exception:
    error = hf.LocalEntryNotFoundError("no snapshot")
    error.__cause__ = hf.OfflineModeIsEnabled("offline")
    return error


HUGGING_FACE_REFUSALS = {
    "gated": (hf.GatedRepoError("403", response=response(403)), "`hf auth login`"),
    "unknown": (hf.RepositoryNotFoundError("401", response=response(401)), "no such model on Hugging Face"),
    "revision": (hf.RevisionNotFoundError("404", response=response(404)), "has no revision 'v9'"),
    "offline mode": (offline(), "HF_HUB_OFFLINE forbids a download"),
    "no network": (hf.LocalEntryNotFoundError("no snapshot"), f"set {SOURCE_VARIABLE}=modelscope"),
    "server error": (hf.HfHubHTTPError("503 busy", response=response(503)), "failed: 503 busy"),
    "broken off": (httpx2.ReadError("connection lost"), "failed: connection lost"),
    "disk full": (OSError(28, "No space left on device"), "No space left on device"),
}


@pytest.mark.parametrize(("raised", "problem"), HUGGING_FACE_REFUSALS.values(), ids=HUGGING_FACE_REFUSALS)
def test_what_hugging_face_refuses_says_what_helps(
    raised: Exception, problem: str, hugging_face: UseHub
) -> None:
    hugging_face(raised)
    error = refusal(NAME, revision="v9")
    assert problem in error.message
    assert error.message.startswith(f"model '{NAME}': ")
    assert error.__cause__ is raised


@pytest.mark.parametrize("name", ["", "two words", "a//b", "ada/", "-x/y", "ada/tiny\n"])
def test_what_cannot_be_a_hub_name_is_not_sent_to_a_hub(name: str, hugging_face: UseHub) -> None:
    hub = hugging_face(Path())
    refusal(name, source="huggingface")
    assert hub.calls == []


# --- ModelScope, and the choice of a hub -------------------------------------------------------


def test_modelscope_is_asked_when_named(model: Path, modelscope: UseHub, hugging_face: UseHub) -> None:
    other, hub = hugging_face(Path()), modelscope(model)
    assert resolve_model(NAME, source="modelscope") == model
    assert hub.calls == [(NAME, {"revision": None, "allow_patterns": PATTERNS})]
    assert other.calls == []


def test_environment_chooses_the_hub_unless_one_is_named(
    model: Path, modelscope: UseHub, hugging_face: UseHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SOURCE_VARIABLE, "modelscope")
    first, second = hugging_face(model), modelscope(model)
    resolve_model(NAME)
    assert (len(first.calls), len(second.calls)) == (0, 1)
    resolve_model(NAME, source="huggingface")
    assert (len(first.calls), len(second.calls)) == (1, 1)


@pytest.mark.parametrize("where", ["source", SOURCE_VARIABLE])
def test_unknown_source_names_where_it_came_from(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"source": "hf"} if where == "source" else {}
    monkeypatch.setenv(SOURCE_VARIABLE, "hf")
    message = f"{where} is 'hf'; expected one of auto, huggingface, modelscope, local"
    assert refusal(NAME, **options).message == message


def test_missing_modelscope_package_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "modelscope", None)
    assert "pip install 'hocket[modelscope]'" in refusal(NAME, source="modelscope").message


@pytest.mark.parametrize(
    ("raised", "problem"),
    [
        (NotExistError("404"), "there is no such model on ModelScope"),
        (HubError("denied"), "failed: denied"),
        (ConnectionError("unreachable"), "failed: unreachable"),
    ],
    ids=["unknown", "denied", "no network"],
)
def test_what_modelscope_refuses_says_what_helps(raised: Exception, problem: str, modelscope: UseHub) -> None:
    modelscope(raised)
    assert problem in refusal(NAME, source="modelscope").message
