"""Every exception hocket raises on purpose.

    HocketError
    ├── InvalidRequest       what the client sent cannot be served; names the field
    │   ├── NotFound         no such model, voice or request
    │   ├── Forbidden        a source the server must not read
    │   └── Unsupported      the route or field exists, this model or build lacks it
    ├── Overloaded           no room now; try again after `retry_after_s`
    ├── DeadlineExceeded     the request's deadline passed before its first audio
    ├── RequestFailed        this request failed inside; others are unaffected
    │   ├── WorkerDied       the process that ran it is gone
    │   └── Cancelled        it was aborted by its owner
    └── StartupError         a profile, checkpoint or device cannot be used

The engine raises meanings; `hocket.server` alone maps them to status codes.
"""

from __future__ import annotations


class HocketError(Exception):
    """Base of all. `code` is a stable snake_case word, `param` a dotted field path or None."""

    code: str | None = None

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        if code is not None:
            self.code = code


class InvalidRequest(HocketError):
    """What the client sent cannot be served; `param` names the field."""

    code = "invalid_value"


class NotFound(InvalidRequest):
    """No such model, voice or request."""

    code = "not_found"


class Forbidden(InvalidRequest):
    """A source that the server must not read."""

    code = "forbidden_source"


class Unsupported(InvalidRequest):
    """The route or field exists; this model or build lacks it."""

    code = "not_implemented"


class Overloaded(HocketError):
    """No room now; `retry_after_s` says when to try again."""

    code = "overloaded"

    def __init__(self, message: str, *, retry_after_s: float = 1.0, **where: str | None) -> None:
        super().__init__(message, **where)
        self.retry_after_s = retry_after_s


class DeadlineExceeded(HocketError):
    """The request's deadline passed before its first audio."""

    code = "deadline_exceeded"


class RequestFailed(HocketError):
    """This request failed inside; others are unaffected."""

    code = "request_failed"


class WorkerDied(RequestFailed):
    """The process that ran the request is gone."""

    code = "worker_died"


class Cancelled(RequestFailed):
    """The request was aborted by its owner."""

    code = "cancelled"


class StartupError(HocketError):
    """A profile, checkpoint or device cannot be used."""

    code = "startup_failed"


def clip(value: object, limit: int = 80) -> str:
    """`value` as text of at most `limit` characters, for quoting a client's input in a message."""
    text = str(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"
