"""The playground: one page and what it is made of, from the package's folder `web`.

Everything is read once, when the server starts. The assets' address holds a digest of all of them, so a
browser may keep them for good, and a page never meets the assets of another version.
"""

from __future__ import annotations

import hashlib
from importlib import resources
from typing import Any

from fastapi import APIRouter, Request
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

import hocket
from hocket.server.serving import Serving

ASSETS = "/playground/"

_TYPES = {"css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}

# Scripts, styles and requests of this server alone; sound that the page itself made may be played.
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "media-src 'self' blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'self'"
    ),
    "Permissions-Policy": "microphone=(self), camera=(), geolocation=()",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class Page:
    """The page as bytes, and its assets by name."""

    def __init__(self) -> None:
        folder = resources.files("hocket") / "web"
        files = {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}
        html = files.pop("index.html")
        digest = hashlib.sha256()
        for name in sorted(files):
            digest.update(name.encode() + b"\0" + files[name])
        version = digest.hexdigest()[:16]
        address = f"{ASSETS}{version}".lstrip("/")  # relative: a proxy may serve us under a prefix
        self.html = html.replace(b"{{assets}}", address.encode())
        self.etag = f'"{hashlib.sha256(self.html).hexdigest()[:16]}"'
        self.assets = {f"{version}/{name}": content for name, content in files.items()}

    def answer(self, request: Request) -> Response:
        """The page, or 304 if the browser has it."""
        headers = {**_HEADERS, "Cache-Control": "no-cache", "ETag": self.etag, "Vary": "Accept"}
        if self.etag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(self.html, headers=headers, media_type="text/html")

    def asset(self, path: str) -> Response:
        content = self.assets.get(path)
        kind = _TYPES.get(path.rpartition(".")[2])
        if content is None or kind is None:
            raise HTTPException(404)
        headers = {**_HEADERS, "Cache-Control": "public, max-age=31536000, immutable"}
        return Response(content, headers=headers, media_type=kind)


def wants_page(request: Request) -> bool:
    """Whether a browser asks: it names text/html, which clients of the API do not."""
    named = request.headers.get("accept", "").lower().split(",")
    return any(part.partition(";")[0].strip() == "text/html" for part in named)


def router(serving: Serving) -> APIRouter:
    """The routes of this resource."""
    router = APIRouter()
    page = Page()

    @router.get("/", tags=["operation"], response_model=dict[str, str])
    async def root(request: Request) -> Any:
        """What answers here; for a browser, the playground."""
        if wants_page(request):
            return page.answer(request)
        headers = {"Vary": "Accept"}
        return JSONResponse({"name": "hocket", "version": hocket.__version__}, headers=headers)

    @router.get(ASSETS + "{path:path}", include_in_schema=False)
    async def asset(path: str) -> Response:
        return page.asset(path)

    return router
