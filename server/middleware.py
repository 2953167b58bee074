"""What every request goes through before a route sees it: an id, a key, limits of its body."""

import asyncio
import hmac
import json
import logging
import re
import secrets
import time
from collections.abc import Callable, Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from inkrt.server.errors import ApiError
from inkrt.server.page import PATHS

_log = logging.getLogger("inkrt.server")
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
# Open without a key: whether the server is there, and how it is.
OPEN_PATHS = (*PATHS, "/health", "/ready", "/version", "/metrics")


class RequestIds:
    """Gives each request an id, returns it as x-request-id, and logs one line when it ends.

    Args:
        app: the next.
        count_error: called with the status of each answer that is an error.
    """

    def __init__(self, app: ASGIApp, count_error: Callable[[int], None]) -> None:
        self._app = app
        self._count_error = count_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(12)
        scope.setdefault("state", {})["request_id"] = request_id
        began_s = time.perf_counter()
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        finally:
            if status >= 400:
                self._count_error(status)
            fields = {
                "request_id": request_id,
                "method": scope["method"],
                "path": scope["path"],
                "status": status or 499,
                "duration_s": round(time.perf_counter() - began_s, 6),
            }
            _log.info("request %s", json.dumps(fields), extra={"fields": fields})


class Keys:
    """Lets requests with a known key through, and those to open paths.

    Args:
        app: the next.
        keys: any of them will do; none at all lets everything through.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        is_open = scope["type"] != "http" or not self._keys or scope["path"] in OPEN_PATHS
        if is_open or self._is_known(Headers(scope=scope).get("authorization", "")):
            await self._app(scope, receive, send)
            return
        error = ApiError(
            401,
            "the API key is missing or wrong; send it as authorization: Bearer KEY",
            code="invalid_api_key",
        )
        await error.response()(scope, receive, send)

    def _is_known(self, header: str) -> bool:
        scheme, _, given = header.partition(" ")
        # All are compared, each in a time that does not depend on where it differs.
        found = [hmac.compare_digest(given.strip().encode(), key) for key in self._keys]
        return scheme.lower() == "bearer" and any(found)


class BodyLimits:
    """Reads bodies before anything else does, and refuses those that are too long or too slow.

    Args:
        app: the next.
        max_bytes: longest body.
        timeout_s: in which it must have come.
    """

    def __init__(self, app: ASGIApp, max_bytes: int, timeout_s: float) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        if scope["type"] != "http" or scope["method"] not in ("POST", "PUT", "PATCH"):
            await self._app(scope, receive, send)
            return
        try:
            async with asyncio.timeout(self._timeout_s):
                body = await self._read(Headers(scope=scope), receive)
        except TimeoutError:
            late = ApiError(408, "the body did not come in time", code="request_timeout")
            await late.response()(scope, receive, send)
            return
        except ApiError as error:
            await error.response()(scope, receive, send)
            return
        if body is None:
            return  # the client has left
        is_given = False

        async def receive_again() -> Message:
            nonlocal is_given
            if is_given:
                return await receive()
            is_given = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self._app(scope, receive_again, send)

    async def _read(self, headers: Headers, receive: Receive) -> bytes | None:
        announced = headers.get("content-length", "0")
        if announced.isdecimal() and int(announced[:20]) > self._max_bytes:
            raise self._too_large()
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            body += message.get("body", b"")
            if len(body) > self._max_bytes:
                raise self._too_large()
            if not message.get("more_body", False):
                return bytes(body)

    def _too_large(self) -> ApiError:
        return ApiError(
            413,
            f"the body is longer than {self._max_bytes} bytes; send less",
            code="request_too_large",
        )
