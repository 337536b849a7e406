"""What `import hocket` promises. A name here is kept; a change to this file is a change for users."""

from __future__ import annotations

import subprocess
import sys

import pytest

import hocket
import hocket.core

PUBLIC = {
    "AsyncEngine",
    "Chat",
    "Engine",
    "Media",
    "Message",
    "Reference",
    "Sampling",
    "SpeechRequest",
    "__version__",
    "errors",
}

ERRORS = {
    "Cancelled": "RequestFailed",
    "DeadlineExceeded": "HocketError",
    "Forbidden": "InvalidRequest",
    "HocketError": "Exception",
    "InvalidRequest": "HocketError",
    "NotFound": "InvalidRequest",
    "Overloaded": "HocketError",
    "RequestFailed": "HocketError",
    "StartupError": "HocketError",
    "Unsupported": "InvalidRequest",
    "WorkerDied": "RequestFailed",
}


def test_public_names() -> None:
    assert set(hocket.__all__) == PUBLIC


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(hocket, name) is not None
    assert name in dir(hocket)


@pytest.mark.parametrize("name", ["Reference", "Sampling", "SpeechRequest"])
def test_request_types_are_the_ones_every_layer_speaks(name: str) -> None:
    assert getattr(hocket, name) is getattr(hocket.core, name)


def test_errors_form_one_tree() -> None:
    found = {
        name: value.__bases__[0].__name__
        for name, value in vars(hocket.errors).items()
        if isinstance(value, type) and issubclass(value, Exception)
    }
    assert found == ERRORS


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="Enigne"):
        hocket.Enigne  # noqa: B018


def test_import_is_light() -> None:
    """`hocket --help` and a program that only catches errors do not wait for PyTorch."""
    code = "import sys, hocket, hocket.errors; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
