"""JSON bodies: read within their limits, decoded into a typed struct, refused by naming the field.

The struct is the specification: its types, bounds and descriptions make both the error messages and
the OpenAPI document.
"""

from __future__ import annotations

import functools
import re
from typing import Any, TypeVar

import anyio
import msgspec
from msgspec import inspect
from starlette.requests import Request

from hocket.errors import InvalidRequest, clip
from hocket.server.edge import body_too_large
from hocket.server.errors import Refused
from hocket.server.serving import Serving
from hocket.server.settings import ServerSettings

T = TypeVar("T")

_INLINE_BYTES = 256 << 10  # decoding more than this takes milliseconds: not on the event loop


async def read_json(request: Request, kind: type[T], serving: Serving) -> T:
    """The body as `kind`, a msgspec Struct. Raises InvalidRequest naming the field, or Refused 408 or 413."""
    return await decoded(await read_body(request, serving.settings), kind, serving)


async def decoded(body: bytes | bytearray, kind: type[T], serving: Serving) -> T:
    """As `decode`, and off the event loop where the body is large."""
    if len(body) <= _INLINE_BYTES:
        return decode(body, kind)
    return await serving.offload(decode, body, kind)


async def read_body(request: Request, settings: ServerSettings) -> bytearray:
    """The request's body. Raises Refused: 413 when it is too large, 408 when it comes too slowly."""
    body = bytearray()
    try:
        with anyio.fail_after(settings.body_timeout_s):
            async for piece in request.stream():
                body += piece
                if len(body) > settings.max_body_mib << 20:
                    raise body_too_large(settings)
    except TimeoutError:
        message = f"the body did not arrive within {settings.body_timeout_s:g} s"
        raise Refused(408, message, code="body_timeout", headers={"Connection": "close"}) from None
    return body


def decode(body: bytes | bytearray, kind: type[T]) -> T:
    """`body` as `kind`. Unknown fields are ignored, null stands for an absent optional field."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _invalid_field(str(error), body, kind) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        wrong = f"not valid JSON: {clip(error)}" if body.strip() else "empty; send a JSON object"
        raise InvalidRequest(f"the body is {wrong}", code="invalid_json") from None
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply", code="invalid_json") from None


# --- messages ----------------------------------------------------------------------------------

_MISSING = re.compile(r"missing required field `(\w+)`")
_STEP = re.compile(r"\.(\w+)|\[(\d+)\]")


def _invalid_field(said: str, body: bytes | bytearray, kind: type[Any]) -> InvalidRequest:
    """msgspec's complaint about `body`, told in terms of what came and what was expected."""
    what, _, where = said.partition(" - at `$")
    path: list[str | int] = [name or int(index) for name, index in _STEP.findall(where)]
    missing = _MISSING.search(what)
    if missing:
        path.append(missing[1])
    param = ".".join(map(str, path))
    expected = expectation(_type_at(inspect.type_info(kind), path))
    if missing:
        return InvalidRequest(f"'{param}' is required: {expected}", param=param, code="missing_field")
    try:
        value = msgspec.json.decode(body)
        for step in path:
            value = value[step]
        came = _shown(value)
    except msgspec.ValidationError:
        came = "a number out of range"  # the only complaint that a decoder without a type has
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return InvalidRequest("the body is not valid JSON", code="invalid_json")
    if not param:
        return InvalidRequest(f"the body is {came}; send a JSON object", code="invalid_json")
    return InvalidRequest(f"'{param}' must be {expected}; got {came}", param=param)


def _shown(value: Any) -> str:
    if isinstance(value, str):
        return f"'{clip(value)}'"
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "a list"
    return clip(msgspec.json.encode(value).decode())


def _type_at(t: inspect.Type, path: list[str | int]) -> inspect.Type:
    for step in path:
        t = t.type if isinstance(t, inspect.Metadata) else t
        members = t.types if isinstance(t, inspect.UnionType) else (t,)
        if isinstance(step, int):
            t = next(m for m in members if isinstance(m, inspect.ListType)).item_type
        else:
            struct = next(m for m in members if isinstance(m, inspect.StructType))
            t = next(f for f in struct.fields if f.encode_name == step).type
    return t


@functools.singledispatch
def expectation(t: inspect.Type) -> str:
    """What a client should send where `t` is expected, as words that fit after "must be"."""
    return "another kind of value"


@expectation.register
def _(t: inspect.StrType) -> str:
    return f"a string that matches {t.pattern}" if t.pattern else "a string"


@expectation.register
def _(t: inspect.BoolType) -> str:
    return "true or false"


@expectation.register
def _(t: inspect.IntType) -> str:
    return "a whole number" + _range(t)


@expectation.register
def _(t: inspect.FloatType) -> str:
    return "a number" + _range(t)


@expectation.register
def _(t: inspect.LiteralType) -> str:
    return "one of " + ", ".join(str(value) for value in t.values)


@expectation.register
def _(t: inspect.ListType) -> str:
    return "a list, each item " + expectation(t.item_type)


@expectation.register
def _(t: inspect.DictType) -> str:
    return "an object"


@expectation.register
def _(t: inspect.RawType) -> str:
    return "an object"  # which is read by itself


@expectation.register
def _(t: inspect.StructType) -> str:
    return "an object with " + ", ".join(f"'{f.encode_name}'" for f in t.fields)


@expectation.register
def _(t: inspect.Metadata) -> str:
    return expectation(t.type)


@expectation.register
def _(t: inspect.UnionType) -> str:
    return " or ".join(expectation(m) for m in t.types if not isinstance(m, inspect.NoneType))


def _range(t: inspect.IntType | inspect.FloatType) -> str:
    above, least, most = (_told(bound) for bound in (t.gt, t.ge, t.le))
    if least and most:
        return f" from {least} to {most}"
    low = f"above {above}" if above else f"of at least {least}" if least else ""
    return f" {' and '.join(filter(None, (low, f'at most {most}' if most else '')))}".rstrip()


def _told(bound: float | None) -> str:
    return "" if bound is None else str(bound) if isinstance(bound, int) else f"{bound:g}"
