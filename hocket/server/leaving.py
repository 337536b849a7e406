"""Clients that go away: noticed while their answer is being made."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
from starlette.requests import Request


class ClientLeft(Exception):
    """The connection closed, or took no bytes for too long."""


@asynccontextmanager
async def while_client_stays(request: Request) -> AsyncIterator[None]:
    """Cancels the block when the client's connection closes, and raises ClientLeft then.

    For use after the body has been read.
    """
    with anyio.CancelScope() as scope:

        async def watch() -> None:
            while (await request.receive())["type"] != "http.disconnect":
                pass
            scope.cancel()

        watcher = asyncio.create_task(watch())
        try:
            yield
        finally:
            watcher.cancel()
    if scope.cancelled_caught:
        raise ClientLeft
