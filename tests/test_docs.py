"""What the documents show is run in order, as a reader would, and their links lead somewhere.

In a document, a block whose first line is a comment with a file's name is written to that file. Other
`python` blocks run in one namespace a document. Of `sh` blocks run: `python FILE` and `pytest FILE` where the
document wrote the file, and in docs/cli.md `hocket …`. A line `<!-- not run: why -->` before a block, and a
line's comment that begins with `not run`, say so.

The working directory is empty but for models under the names the documents use, with tiny random weights,
and `voice.wav`, a recording of a person.
"""

from __future__ import annotations

import importlib
import re
import runpy
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from typer.testing import CliRunner

from hocket.engine import client
from hocket.engine.profile import Profile, load_profile

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
SOON = [0, 30.0]  # the end is drawn after a few frames: examples need not say how long to speak
MODELS = {
    "Qwen/Qwen3-TTS-12Hz-1.7B-CustomVoice": {"size": "tiny", "variant": "custom_voice", "end_like": SOON},
    "Qwen/Qwen3-TTS-12Hz-0.6B-Base": {"size": "tiny-0.6b", "variant": "base", "end_like": SOON},
}

_BLOCK = re.compile(r"(?P<note><!-- not run[^\n]*-->\n)?^```(?P<kind>\w+)\n(?P<body>.*?)^```$", re.M | re.S)
_FILE = re.compile(r"# (?P<name>[\w./-]+\.(?:py|toml|yaml))\n")
_LINK = re.compile(r"\]\((?P<path>[^)#\s]*)(?:#(?P<anchor>[^)\s]*))?\)|(?:src|srcset)=\"(?P<image>[^\"]+)\"")


class Block(NamedTuple):
    kind: str
    body: str
    line: int
    file: str | None


def blocks(document: Path) -> Iterator[Block]:
    text = document.read_text("utf-8")
    for found in _BLOCK.finditer(text):
        if found["note"] is None:
            named = _FILE.match(found["body"])
            line = text.count("\n", 0, found.start("body")) + 1
            yield Block(found["kind"], found["body"], line, named and named["name"])


def one_thread(name: Any, platform: Any, overrides: Any) -> Profile:
    """For models so small that a second thread costs more than it gives."""
    return load_profile(name, platform, {"threads": "1", **(overrides or {})})


def named(document: Path) -> str:
    return document.relative_to(ROOT).as_posix()


def runnable(document: Path) -> bool:
    if named(document) == "docs/api.md":
        return False  # tests/server/test_api_docs.py runs it, beside servers
    return named(document) == "docs/cli.md" or any(block.kind == "python" for block in blocks(document))


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checkpoint: Callable[..., Path]) -> Iterator[Path]:
    """The reader's working directory; whatever is imported from it is forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(client, "load_profile", one_thread)
    for name, options in MODELS.items():
        model = tmp_path / name
        model.parent.mkdir(exist_ok=True)
        model.symlink_to(checkpoint(**options), target_is_directory=True)
    shutil.copyfile(ROOT / "tests/data/please_hold.wav", tmp_path / "voice.wav")
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.mark.parametrize("document", list(filter(runnable, DOCUMENTS)), ids=named)
def test_document_does_what_it_says(document: Path, desk: Path) -> None:
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks(document):
        if block.file is not None:
            file = desk / block.file
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(block.body, "utf-8")
            if file.name == "pyproject.toml":
                install(desk, block.body)
        elif block.kind == "python":
            # Blank lines in front: an error names the line of the document.
            exec(compile("\n" * (block.line - 1) + block.body, document, "exec"), namespace)
        elif block.kind == "sh":
            for line in block.body.splitlines():
                run_line(line, desk, commands=named(document) == "docs/cli.md")


def install(desk: Path, pyproject: str) -> None:
    """What `pip install --editable .` leaves behind, as far as families are found by it."""
    (group,) = re.findall(
        r'^\[project\.entry-points\."hocket\.models"\]\n((?:\w+ = ".*"\n?)+)', pyproject, re.M
    )
    folder = desk / "family-0.1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: family\nVersion: 0.1\n")
    (folder / "entry_points.txt").write_text("[hocket.models]\n" + group.replace('"', ""))
    importlib.invalidate_caches()


def run_line(line: str, desk: Path, *, commands: bool) -> None:
    command, _, comment = line.partition("#")
    words = shlex.split(command)
    if not words or comment.strip().startswith("not run"):
        return
    if words[0] == "hocket" and commands:
        from hocket.cli import app

        result = CliRunner().invoke(app, words[1:])
        assert result.exit_code == 0, (line, result.output, result.exception)
    elif words[0] == "python" and (desk / words[-1]).is_file():
        runpy.run_path(words[-1], run_name="__main__")
    elif words[0] == "pytest" and (desk / words[-1]).is_file():
        module = importlib.import_module(Path(words[-1]).stem)
        for name in [name for name in vars(module) if name.startswith("test_")]:
            getattr(module, name)()


# --- links -------------------------------------------------------------------------------------


def slug(heading: str) -> str:
    """The anchor that GitHub gives a heading."""
    plain = re.sub(r"\[([^]]*)]\([^)]*\)|[`*]", r"\1", heading).strip().lower()
    return re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")


@pytest.mark.parametrize("document", DOCUMENTS, ids=named)
def test_links_lead_somewhere(document: Path) -> None:
    prose = re.sub(r"^```.*?^```$", "", document.read_text("utf-8"), flags=re.M | re.S)
    for link in _LINK.finditer(prose):
        path = link["image"] or link["path"]
        if path.startswith(("http:", "https:", "mailto:")):
            continue
        target = (document.parent / path).resolve() if path else document
        assert target.exists(), f"{document.name}: {path}"
        if link["anchor"]:
            headings = re.findall(r"^#+ (.*)$", target.read_text("utf-8"), re.M)
            assert link["anchor"] in map(slug, headings), f"{document.name}: {path}#{link['anchor']}"


def test_every_document_is_in_the_index() -> None:
    index = (ROOT / "docs/index.md").read_text("utf-8")
    for document in (ROOT / "docs").glob("*.md"):
        assert document.name == "index.md" or f"({document.name})" in index, document.name


def test_every_decision_is_in_its_table() -> None:
    table = (ROOT / "docs/decisions/README.md").read_text("utf-8")
    for decision in (ROOT / "docs/decisions").glob("0*.md"):
        number, title = re.match(r"# (\d+)\. (.*)", decision.read_text("utf-8")).groups()
        assert f"| [{number}]({decision.name}) | {title} |" in table, decision.name
