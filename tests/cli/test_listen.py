"""The socket that `hocket serve` listens on."""

from __future__ import annotations

import socket

import pytest

from hocket.cli.serve import _listen
from hocket.errors import StartupError


@pytest.mark.skipif(not hasattr(socket, "TCP_NODELAY"), reason="needs TCP_NODELAY")
def test_small_writes_are_not_held_back() -> None:
    """A first chunk that follows the headers must not wait for the client's acknowledgement of them."""
    with _listen("127.0.0.1", 0) as listener:
        with socket.create_connection(listener.getsockname()), listener.accept()[0] as connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        with pytest.raises(StartupError, match="choose another"):
            _listen("127.0.0.1", listener.getsockname()[1])
