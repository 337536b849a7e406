"""How the page and its assets are sent."""

from __future__ import annotations

import re

import pytest
from starlette.testclient import TestClient

import hocket
from hocket.engine.client import AsyncEngine
from hocket.server.app import create_app
from hocket.server.page import Page
from hocket.server.settings import ServerSettings

HTML = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
TYPES = {"css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}


@pytest.fixture(scope="module")
def client() -> TestClient:
    """A server that has loaded nothing, and that asks for a key."""
    return TestClient(create_app(AsyncEngine("nowhere"), ServerSettings(model="nowhere", api_keys=("k",))))


def test_browsers_get_the_page_and_clients_what_answers(client: TestClient) -> None:
    page = client.get("/", headers=HTML)
    assert page.headers["Content-Type"] == "text/html; charset=utf-8"
    assert page.text.startswith("<!doctype html>")
    for accept in ("*/*", "application/json"):
        answer = client.get("/", headers={"Accept": accept})
        assert answer.json() == {"name": "hocket", "version": hocket.__version__}
        assert answer.headers["Vary"] == page.headers["Vary"] == "Accept"


def test_page_takes_nothing_from_elsewhere(client: TestClient) -> None:
    page = client.get("/", headers=HTML)
    policy = page.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert page.headers["X-Content-Type-Options"] == "nosniff"
    for name, content in {"index.html": page.content, **Page().assets}.items():
        links = set(re.findall(rb"https?://[\w./-]+", content)) - {b"http://www.w3.org/2000/svg"}
        assert not links, name
        assert name.endswith(".js") or not re.search(rb"\bstyle=|\bon\w+=", content), name


def test_assets_are_open_and_kept_for_good(client: TestClient) -> None:
    html = client.get("/", headers=HTML).text
    linked = re.findall(r'(?:href|src)="(playground/[^"]+)"', html)
    assert {address.rpartition(".")[2] for address in linked} == set(TYPES)
    for address in linked:
        asset = client.get(f"/{address}")
        assert asset.status_code == 200
        assert asset.headers["Content-Type"].partition(";")[0] == TYPES[address.rpartition(".")[2]]
        assert "immutable" in asset.headers["Cache-Control"]
    folder = linked[0].rpartition("/")[0]
    for module in re.findall(r'from "\./([^"]+)"', client.get(f"/{folder}/main.js").text):
        assert client.get(f"/{folder}/{module}").status_code == 200


def test_page_is_asked_for_anew_and_not_sent_twice(client: TestClient) -> None:
    page = client.get("/", headers=HTML)
    assert page.headers["Cache-Control"] == "no-cache"
    again = client.get("/", headers={**HTML, "If-None-Match": page.headers["ETag"]})
    assert (again.status_code, again.content) == (304, b"")


@pytest.mark.parametrize(
    "path", ["/playground/", "/playground/0/main.js", "/playground/../page.py", "/playground/%2e%2e/app.py"]
)
def test_other_paths_are_not_found(client: TestClient, path: str) -> None:
    answer = client.get(path, headers={"Authorization": "Bearer k"})
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "route_not_found"
