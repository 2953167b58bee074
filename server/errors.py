"""One form for all errors of the API, and which error gets which status.

    {"error": {"message": ..., "type": ..., "param": ..., "code": ...}}

Messages of the runtime name commands and folders of the machine that serves; those parts are left
out, and of unexpected errors everything is: the log has them, under the request's id.
"""

import re
from collections.abc import Sequence
from typing import Any

from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from inkrt.errors import (
    CancelledRequestError,
    CapacityError,
    ClosedError,
    ContextLengthError,
    DeviceError,
    QueueFullError,
    RequestError,
    UsageError,
)

_MOST_MESSAGE = 1000  # characters
_RETRY_AFTER_S = 1
# From here on messages speak to who built the engine.
_FOR_BUILDERS = re.compile(r"[;,]?(?: or)? (?:re)?build (?:it )?(?:with|from|an)\b.*", re.DOTALL)

# What pydantic calls a field's types.
_TYPE = re.compile(r"(str|int|float|list\[.*|dict\[.*)")


class ApiError(Exception):
    """An error as clients see it.

    Attributes:
        status: of HTTP.
        message: for people.
        kind: "type" of the envelope.
        code: for programs; None if the type says enough.
        param: the offending request field.
        retry_after_s: when to try again.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        # What clients sent may hold unpaired surrogates, which JSON in UTF-8 cannot.
        self.message = message[:_MOST_MESSAGE].encode("utf-8", "backslashreplace").decode()
        self.status = status
        self.kind = kind
        self.code = code
        self.param = None if param is None else param.encode("utf-8", "backslashreplace").decode()
        self.retry_after_s = retry_after_s

    def envelope(self) -> dict[str, Any]:
        """The body."""
        fields = {
            "message": self.message,
            "type": self.kind,
            "param": self.param,
            "code": self.code,
        }
        return {"error": fields}

    def response(self, request_id: str | None = None) -> JSONResponse:
        """The answer."""
        headers = {}
        if self.retry_after_s is not None:
            headers["retry-after"] = str(self.retry_after_s)
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        if request_id is not None:
            headers["x-request-id"] = request_id
        return JSONResponse(self.envelope(), self.status, headers)


class ClientGoneError(Exception):
    """The client closed the connection before its answer was complete."""


def unsupported(field: str, reason: str) -> ApiError:
    """The error for a known field that cannot be honoured."""
    return ApiError(
        400, f"{field} is not supported: {reason}", code="unsupported_parameter", param=field
    )


def draining() -> ApiError:
    """The error for requests that come while the server ends."""
    return ApiError(
        503,
        "the server is shutting down; ask another one",
        kind="server_error",
        code="draining",
        retry_after_s=_RETRY_AFTER_S,
    )


def api_error(error: BaseException) -> ApiError:
    """What clients are told of an error."""
    match error:
        case ApiError():
            return error
        case ContextLengthError():
            message = public_message(error)
            return ApiError(400, message, code="context_length_exceeded", param=error.param)
        case RequestError():
            return ApiError(400, public_message(error), param=error.param)
        case UsageError():  # a library that reads images or recordings is not installed
            return ApiError(400, public_message(error), code="unsupported_parameter")
    return _framework_error(error)


def _framework_error(error: BaseException) -> ApiError:
    match error:
        case RequestValidationError():
            return _validation_error(error.errors())
        case HTTPException():
            code = "route_not_found" if error.status_code == 404 else None
            return ApiError(error.status_code, str(error.detail), code=code)
    return _server_error(error)


def public_message(error: BaseException) -> str:
    """The message without what only the server's owner can do or may know."""
    return _FOR_BUILDERS.sub("", str(error))


def _server_error(error: BaseException) -> ApiError:
    match error:
        case QueueFullError():
            return ApiError(
                429,
                "too many requests are waiting; ask again later",
                kind="rate_limit_error",
                code="queue_full",
                retry_after_s=_RETRY_AFTER_S,
            )
        case CancelledRequestError():
            return ApiError(503, "the request was cancelled", kind="server_error", code="cancelled")
        case ClosedError() | DeviceError():
            return ApiError(
                503, "the engine takes no requests", kind="server_error", code="engine_dead"
            )
        case CapacityError():
            return ApiError(
                503,
                "the engine has no room for the request now; ask again later",
                kind="server_error",
                code="no_capacity",
                retry_after_s=_RETRY_AFTER_S,
            )
        case TimeoutError():
            return ApiError(
                504,
                "the answer took longer than this server allows",
                kind="server_error",
                code="timeout",
            )
    return ApiError(
        500,
        "an internal error; the server's log has it under the answer's x-request-id",
        kind="server_error",
        code="internal_error",
    )


def _validation_error(problems: Sequence[Any]) -> ApiError:
    """The first problem that pydantic found in a body.

    A field of several types has one for each of them; that which is farthest inside is of the type
    that was meant.
    """
    if problems[0]["type"] == "json_invalid":
        return ApiError(400, "the body is not valid JSON", code="invalid_json")
    places = [[item for item in each["loc"] if item != "body"] for each in problems]
    number = max(
        (i for i, place in enumerate(places) if place[:1] == places[0][:1]),
        key=lambda i: len(places[i]),
    )
    name = ""
    for depth, item in enumerate(places[number]):
        if depth == 1 and isinstance(item, str) and _TYPE.fullmatch(item):
            continue
        name += f"[{item}]" if isinstance(item, int) else f".{item}" if name else str(item)
    message = f"{name or 'the body'}: {problems[number]['msg']}"
    return ApiError(400, message, param=name or None)
