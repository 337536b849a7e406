"""`python -m hocket`, the same as `hocket`."""

from hocket.cli import app

app()
