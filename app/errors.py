"""Errors in the shape of OpenAI's API: ``{"error": {message, type, param, code}}``."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError
from starlette.responses import JSONResponse

from scd_core import errors

log = logging.getLogger("scd.api")


class ApiError(Exception):
    """A request that is answered with an error."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        if self.status == 429:
            kind = "rate_limit_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body, self.status, headers=self.headers)


def invalid(message: str, param: str | None, code: str | None = None) -> ApiError:
    """400."""
    return ApiError(400, message, param=param, code=code)


def of_validation(error: ValidationError) -> ApiError:
    """The first fault that pydantic found, with the parameter's name."""
    fault = error.errors(include_url=False, include_context=False)[0]
    where = itertools.takewhile(lambda part: isinstance(part, int) or _is_name(part), fault["loc"])
    param = ".".join(map(str, where)) or None
    if fault["type"] == "extra_forbidden":
        return invalid(f"Unrecognized or unsupported parameter: '{param}'", param, "unsupported_parameter")
    if fault["type"] == "missing":
        return invalid(f"Missing required parameter: '{param}'", param, "missing_required_parameter")
    message = fault["msg"].removeprefix("Value error, ")
    return invalid(f"Invalid value for '{param}': {message}" if param else message, param, "invalid_value")


def _is_name(part: str) -> bool:
    """Whether a part of a fault's place is what the client wrote, and not a member of a union of types."""
    return part.isidentifier() and part != "str"


def of_exception(error: BaseException, prompt_param: str) -> ApiError:
    """Any error as what the client is told; the unexpected is logged, and not told.

    Args:
        prompt_param: the parameter that holds the prompt.
    """
    if isinstance(error, ApiError):
        return error
    message = str(error)
    if isinstance(error, errors.ContextLengthError):
        return invalid(message, prompt_param, "context_length_exceeded")
    if isinstance(error, errors.PromptError):
        return invalid(message, prompt_param, "invalid_prompt")
    if isinstance(error, errors.UnknownSpecialistError):
        return ApiError(404, message, param="model", code="model_not_found")
    if isinstance(error, errors.OverloadedError):
        return ApiError(429, message, code="overloaded", headers={"Retry-After": "1"})
    if isinstance(error, errors.SpecialistUnavailableError | errors.EngineStoppedError):
        return ApiError(503, message, param="model", code="model_unavailable", headers={"Retry-After": "5"})
    log.error("unexpected error", exc_info=error)
    return ApiError(500, "The server had an error while it processed the request", code="internal_error")
