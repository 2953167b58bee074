"""What the server says of itself: models, health, version, metrics, settings; and its tokenizer."""

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST

from inkrt import __version__
from inkrt.server.errors import ApiError, draining
from inkrt.server.fields import check_extra
from inkrt.server.messages import runtime_messages
from inkrt.server.protocol import DetokenizeRequest, TokenizeRequest
from inkrt.server.service import Service

router = APIRouter()
_Route = TypeVar("_Route", bound=Callable[..., Any])


def _get(path: str) -> Callable[[_Route], _Route]:
    """A route for GET, which answers HEAD too."""

    def add(route: _Route) -> _Route:
        router.head(path, include_in_schema=False)(route)
        return router.get(path)(route)

    return add


@_get("/health")
async def health(request: Request) -> Response:
    """Whether the engine runs."""
    if not _service(request).llm.is_alive:
        raise ApiError(503, "the engine takes no requests", kind="server_error", code="engine_dead")
    return Response()


@_get("/ready")
async def ready(request: Request) -> Response:
    """Whether new requests are taken."""
    if _service(request).is_draining:
        raise draining()
    return await health(request)


@_get("/version")
async def version() -> dict[str, str]:
    """The version of this software."""
    return {"version": __version__}


@_get("/metrics")
async def metrics(request: Request) -> Response:
    """What happens, in Prometheus' text form."""
    return Response(_service(request).metrics.text(), media_type=CONTENT_TYPE_LATEST)


@_get("/server_info")
async def server_info(request: Request) -> dict[str, Any]:
    """What is served and how; no keys, no paths."""
    service = _service(request)
    llm, config = service.llm.llm, service.llm.llm.engine.config
    return {
        "version": __version__,
        "models": list(service.names),
        "system_fingerprint": service.fingerprint,
        "engine": {
            "model_type": config.model.model_type,
            "dtype": config.model.dtype,
            "target": config.target,
            "tp_size": config.tp_size,
            "max_model_len": config.max_seq_len,
            "max_batch_size": config.state.num_slots,
            "reads": ["text", *(tower.kind for tower in config.towers)],
        },
        "speculation": llm.method,
        "answer_format": None if llm.engine.tokenizer is None else service.answer_format,
        "settings": {
            "has_api_keys": bool(service.settings.api_keys),
            "max_body_bytes": service.settings.max_body_bytes,
            "request_timeout_s": service.settings.request_timeout_s,
            "max_choices": service.settings.max_choices,
        },
    }


@_get("/v1/models")
async def models(request: Request) -> dict[str, Any]:
    """The models that are served: one, by all its names."""
    service = _service(request)
    return {"object": "list", "data": [_model(service, name) for name in service.names]}


@_get("/v1/models/{name:path}")
async def model(name: str, request: Request) -> dict[str, Any]:
    """One of them."""
    service = _service(request)
    service.check_model(name)
    return _model(service, name)


@router.post("/tokenize")
async def tokenize(body: TokenizeRequest, request: Request) -> Response:
    """Token ids of a text, or of a conversation as a request for a chat would read it."""
    service = _service(request)
    headers = check_extra(body.model_extra, request.state.request_id)
    service.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "give either prompt or messages", param="prompt")
    tokens = await asyncio.to_thread(_encode, body, service)
    made = {
        "count": len(tokens),
        "max_model_len": service.llm.llm.engine.config.max_seq_len,
        "tokens": tokens,
    }
    return JSONResponse(made, headers=headers)


@router.post("/detokenize")
async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
    """The text of token ids, special tokens included."""
    service = _service(request)
    headers = check_extra(body.model_extra, request.state.request_id)
    service.check_model(body.model)
    limit = service.llm.llm.engine.config.model.num_embeddings
    if any(not 0 <= token < limit for token in body.tokens):
        message = f"tokens must be ids of the model, 0..{limit - 1}"
        raise ApiError(400, message, param="tokens")
    decode = service.tokenizer.decode
    text = await asyncio.to_thread(decode, body.tokens, skip_special_tokens=False)
    return JSONResponse({"prompt": text}, headers=headers)


def _encode(body: TokenizeRequest, service: Service) -> list[int]:
    if body.prompt is not None:
        return service.tokenizer.encode(body.prompt)
    assert body.messages is not None
    prompt = service.llm.llm.chat_prompt(
        runtime_messages(body.messages),
        tools=body.tools,
        add_generation_prompt=body.add_generation_prompt is not False,
        variables=body.chat_template_kwargs,
    )
    return service.llm.llm.prompt_tokens(prompt)


def _model(service: Service, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "inkrt",
        "root": service.name,
        "max_model_len": service.llm.llm.engine.config.max_seq_len,
    }


def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service
