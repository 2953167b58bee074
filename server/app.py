"""The application: routes, what surrounds them, and one form for all errors."""

from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from opentelemetry.trace import TracerProvider
from starlette.exceptions import HTTPException

from inkrt import __version__
from inkrt.errors import InkError
from inkrt.runtime.async_llm import AsyncLLM
from inkrt.server import chat, completions, page, responses, status
from inkrt.server.errors import ApiError, ClientGoneError, api_error
from inkrt.server.middleware import BodyLimits, Keys, RequestIds
from inkrt.server.service import Service
from inkrt.server.settings import ServerSettings
from inkrt.server.traces import http_telemetry

_ENVELOPE: dict[str, Any] = {
    "description": "An error.",
    "content": {
        "application/json": {
            "schema": {
                "type": "object",
                "required": ["error"],
                "properties": {
                    "error": {
                        "type": "object",
                        "required": ["message", "type", "param", "code"],
                        "properties": {
                            "message": {"type": "string"},
                            "type": {"type": "string"},
                            "param": {"type": ["string", "null"]},
                            "code": {"type": ["string", "null"]},
                        },
                    }
                },
            }
        }
    },
}
_STATUSES = (400, 401, 404, 408, 413, 429, 500, 503, 504)


def create_app(
    llm: AsyncLLM,
    settings: ServerSettings | None = None,
    tracer_provider: TracerProvider | None = None,
) -> FastAPI:
    """An ASGI application that serves an engine.

    Args:
        llm: the engine; whoever opened it closes it.
        settings: of the server.
        tracer_provider: takes spans; None for the process's own, which is none unless set.
    """
    chosen = ServerSettings() if settings is None else settings
    service = Service(llm, chosen, tracer_provider)
    app = FastAPI(
        title="InkRT",
        version=__version__,
        docs_url=None,  # both load scripts of others
        redoc_url=None,
        telemetry=http_telemetry(tracer_provider),
        responses=dict.fromkeys(_STATUSES, _ENVELOPE),
    )
    app.state.service = service
    for module in (status, chat, completions, responses, page):
        app.include_router(module.router)
    for kind in (ApiError, InkError, RequestValidationError, HTTPException, TimeoutError):
        app.add_exception_handler(kind, _answer_error)
    app.add_exception_handler(ClientGoneError, _answer_nobody)
    app.add_exception_handler(Exception, _answer_error)
    # The last is the outermost.
    app.add_middleware(BodyLimits, max_bytes=chosen.max_body_bytes, timeout_s=chosen.body_timeout_s)
    app.add_middleware(Keys, keys=chosen.api_keys)
    app.add_middleware(RequestIds, count_error=service.metrics.count_error)
    return app


async def _answer_error(request: Request, error: Exception) -> Response:
    service: Service = request.app.state.service
    told = api_error(error)
    service.log_failure(error, told)
    request_id = getattr(request.state, "request_id", None)
    # Handlers of Exception answer from outside of what adds the id.
    return told.response(request_id if told.status == 500 else None)


async def _answer_nobody(request: Request, error: Exception) -> Response:  # noqa: ARG001
    return Response(status_code=499)
