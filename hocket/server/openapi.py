"""What the OpenAPI document says beyond the routes' signatures: bodies read by hand, and errors."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

_REFS = "#/components/schemas/{name}"

_NULLABLE_STRING = {"anyOf": [{"type": "string"}, {"type": "null"}]}
_ERROR_SCHEMA = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string", "maxLength": 1000},
                "type": {"type": "string"},
                "param": _NULLABLE_STRING,
                "code": _NULLABLE_STRING,
            },
        }
    },
}

_ERROR_CONTENT = {"application/json": {"schema": {"$ref": _REFS.format(name="Error")}}}

ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"description": "The request cannot be served as it is", "content": _ERROR_CONTENT},
    "5XX": {"description": "The server failed, or has no room now", "content": _ERROR_CONTENT},
}

_bodies: dict[str, Any] = {}


def body_schema(kind: type[Any]) -> dict[str, Any]:
    """`openapi_extra` of a route whose body is read as the msgspec Struct `kind`."""
    (reference,), components = msgspec.json.schema_components([kind], ref_template=_REFS)
    _bodies.update(components)
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": reference}}}}


def install(app: FastAPI, description: str) -> None:
    """Make `app.openapi()` give the whole document."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = get_openapi(
                title=app.title, version=app.version, description=description, routes=app.routes
            )
            schemas = document.setdefault("components", {}).setdefault("schemas", {})
            schemas.update(_bodies, Error=_ERROR_SCHEMA)
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]
