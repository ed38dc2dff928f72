"""The HTTP interface, in the form of OpenAI's API.

Convention: every error, also of routing, has OpenAI's shape; a request's id stands in its answer, in the header
``x-request-id`` and in the logs, and no prompt does.
"""

from __future__ import annotations

import hmac
import logging
import time
from collections.abc import Sequence
from typing import Any
from uuid import uuid4

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from app.body import BODY_LIMIT, read_body
from app.errors import ApiError, of_exception
from app.render import Renderer
from app.schemas import ChatBody, CompletionBody, GenerationBody
from app.sse import ClientGoneError, stream_response, while_connected
from deployments.names import Standing
from deployments.pool import Pool
from deployments.request import GenerateRequest

log = logging.getLogger("scd.api")

CLIENT_GONE = 499
"""What a log says of a request whose client went; nobody receives it."""


def create_app(pool: Pool, body_limit: int = BODY_LIMIT, token: str | None = None) -> FastAPI:
    """The application over a pool.

    Args:
        token: who presents it may have the pool reconciled with its registry; None: nobody may.
    """
    app = FastAPI(title="Semantic Cache Distillation", docs_url=None, redoc_url=None, openapi_url=None)
    started = int(time.time())

    @app.get("/healthz")
    async def healthz() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        serving = [s.name for s in await pool.standings() if s.serves]
        return {"object": "list", "data": [_card(name, started) for name in serving]}

    @app.get("/v1/models/{name}")
    async def model(name: str) -> dict[str, Any]:
        if not any(s.serves and s.name == name for s in await pool.standings()):
            raise ApiError(404, f"The model '{name}' does not exist", param="model", code="model_not_found")
        return _card(name, started)

    @app.get("/v1/scd/stats")
    async def stats() -> dict[str, Any]:
        return await pool.stats()

    @app.get("/v1/scd/specialists")
    async def specialists() -> dict[str, Any]:
        return _rows(await pool.standings())

    @app.post("/v1/scd/reconcile")
    async def reconcile(request: Request) -> dict[str, Any]:
        given = request.headers.get("authorization", "").encode()
        if token is None or not hmac.compare_digest(given, f"Bearer {token}".encode()):
            raise ApiError(401, "This needs the pool's own token", code="invalid_token")
        return _rows(await pool.reconcile(request.query_params.get("retry")))

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        body = await read_body(request, CompletionBody, body_limit)
        prompt = body.single_prompt()
        if isinstance(prompt, str):
            asked = GenerateRequest(uuid4().hex, body.params, text=prompt, codes=body.scd.codes)
        else:
            asked = GenerateRequest(uuid4().hex, body.params, token_ids=prompt, codes=body.scd.codes)
        return await _answer(pool, request, body, asked)

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        body = await read_body(request, ChatBody, body_limit)
        messages = [message.as_dict() for message in body.messages]
        asked = GenerateRequest(uuid4().hex, body.params, messages=messages, codes=body.scd.codes)
        return await _answer(pool, request, body, asked)

    app.add_exception_handler(ApiError, _show_api_error)
    app.add_exception_handler(HTTPException, _show_routing_error)
    app.add_exception_handler(Exception, _show_unexpected)
    return app


async def _answer(pool: Pool, request: Request, body: GenerationBody, asked: GenerateRequest) -> Response:
    """Generate, and answer in one or as a stream."""
    renderer = Renderer(body, asked.request_id)
    pieces = pool.generate(body.model, asked)
    start = time.perf_counter()
    try:
        response: Response
        if body.stream:
            response = await stream_response(request, renderer.chunks(pieces), body.prompt_param)
        else:
            response = JSONResponse(await while_connected(request, renderer.whole(pieces)))
    except ClientGoneError:
        response = Response(status_code=CLIENT_GONE)
    except Exception as error:
        response = of_exception(error, body.prompt_param).response()
    seconds = time.perf_counter() - start
    log.info("%s %s: %d after %.3f s", asked.request_id, body.model, response.status_code, seconds)
    response.headers["x-request-id"] = asked.request_id
    return response


def _card(name: str, created: int) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": created, "owned_by": "scd"}


def _rows(standings: Sequence[Standing]) -> dict[str, Any]:
    rows = [{"name": s.name, "status": s.status, "message": s.message} for s in standings]
    return {"object": "list", "data": rows}


async def _show_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)  # the handler is registered for it
    return error.response()


async def _show_routing_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    where = f"{request.method} {request.url.path}"
    messages = {404: f"Unknown route: {where}", 405: f"Method not allowed: {where}"}
    message = messages.get(error.status_code, str(error.detail))
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
    return ApiError(error.status_code, message, code=code, headers=error.headers).response()


async def _show_unexpected(request: Request, error: Exception) -> Response:
    return of_exception(error, "").response()
