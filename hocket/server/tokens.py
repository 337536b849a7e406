"""POST /tokenize and /detokenize: text and the ids that the model reads."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Request
from msgspec import Meta, Struct

from hocket.errors import InvalidRequest
from hocket.server.body import read_json
from hocket.server.names import check_model
from hocket.server.openapi import ERRORS, body_schema
from hocket.server.serving import Serving


class TokenizeBody(Struct):
    prompt: Annotated[str, Meta(description="The text.")]
    model: str | None = None


class DetokenizeBody(Struct):
    tokens: Annotated[
        list[Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]], Meta(description="Ids of text tokens.")
    ]
    model: str | None = None


def router(serving: Serving) -> APIRouter:
    """The routes of this resource."""
    router = APIRouter(tags=["models"], responses=ERRORS)

    @router.post("/tokenize", openapi_extra=body_schema(TokenizeBody))
    async def tokenize(request: Request) -> dict[str, Any]:
        """The ids of a text. Control tokens are never among them."""
        serving.check_open()
        body = await read_json(request, TokenizeBody, serving)
        check_model(body.model, serving.settings)
        limit = serving.settings.max_input_chars
        if len(body.prompt) > limit:
            message = f"'prompt' has {len(body.prompt)} characters; at most {limit} are accepted"
            raise InvalidRequest(message, param="prompt", code="input_too_long")
        ids = await serving.offload(serving.engine.front_end.tokenize, body.prompt)
        return {"tokens": ids, "count": len(ids)}

    @router.post("/detokenize", openapi_extra=body_schema(DetokenizeBody))
    async def detokenize(request: Request) -> dict[str, Any]:
        """The text of ids; ids of no token give nothing."""
        serving.check_open()
        body = await read_json(request, DetokenizeBody, serving)
        check_model(body.model, serving.settings)
        limit = serving.settings.max_input_chars
        if len(body.tokens) > limit:
            message = f"'tokens' holds {len(body.tokens)} ids; at most {limit} are accepted"
            raise InvalidRequest(message, param="tokens", code="input_too_long")
        return {"prompt": await serving.offload(serving.engine.front_end.detokenize, body.tokens)}

    return router
