"""Reads a request's JSON: bounded in size, strict, and never slow."""

from __future__ import annotations

import json
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from app.errors import ApiError, invalid, of_validation

BODY_LIMIT = 4 << 20
"""Bytes. A prompt of a million characters fits."""

B = TypeVar("B", bound=BaseModel)


async def read_body(request: Request, kind: type[B], limit: int = BODY_LIMIT) -> B:
    """The request's body, checked.

    Raises:
        ApiError: 413 when it is too large, 400 for any other fault.
    """
    data = json_of(await _bytes(request, limit))
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        raise of_validation(error) from None


async def _bytes(request: Request, limit: int) -> bytes:
    too_large = ApiError(413, f"The body exceeds {limit} bytes", code="request_too_large")
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit:
        raise too_large
    parts, size = [], 0
    try:
        async for part in request.stream():
            size += len(part)
            if size > limit:
                raise too_large
            parts.append(part)
    except ClientDisconnect:
        raise invalid("The client went while it sent the body", None) from None
    return b"".join(parts)


def json_of(data: bytes) -> dict[str, Any]:
    """A JSON object.

    Raises:
        ApiError: it is none, or holds what no text or number can be made of.
    """
    try:
        text = data.decode("utf-8")
        found = json.loads(text, parse_constant=_refuse)
        if "\\ud" in text or "\\uD" in text:
            json.dumps(found, ensure_ascii=False).encode("utf-8")  # half a surrogate pair has no bytes
    except RecursionError:
        raise invalid("The body is nested too deeply", None, "invalid_json") from None
    except ValueError as error:
        raise invalid(f"The body is not valid JSON: {error}", None, "invalid_json") from None
    if not isinstance(found, dict):
        raise invalid("The body must be a JSON object", None, "invalid_json")
    return found


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")
