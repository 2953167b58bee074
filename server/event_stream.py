"""Answers that come as server-sent events, and what ends when the client leaves.

A framework that only notices a closed connection when it sends something would let the engine work
for nobody while it reads a long prompt; a handler that sends nothing would never notice. Both are
raced against the connection here.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from inkrt.server.errors import ClientGoneError

DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"

_T = TypeVar("_T")


def event(body: Mapping[str, Any], name: str | None = None) -> bytes:
    """One event with a JSON body, of a named kind or of the only one."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + json.dumps(body, ensure_ascii=False).encode() + b"\n\n"


class EventStream(Response):
    """A response of events.

    Args:
        events: made by `event`.
        on_end: called once at the end, whether or not the events have begun.
        headers: further ones.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        on_end: Callable[[], None],
        headers: Mapping[str, str],
    ) -> None:
        super().__init__(
            headers={**headers, "cache-control": "no-store", "x-accel-buffering": "no"}
        )
        del self.headers["content-length"]
        self._events = events
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        """Send the events; end with the client."""
        try:
            await _race(self._send_all(send), receive)
        except ClientGoneError:
            pass  # nobody is left to be told
        finally:
            await self._events.aclose()
            self._on_end()

    async def _send_all(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        async for chunk in self._events:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def unless_gone(request: Request, work: Coroutine[Any, Any, _T]) -> _T:
    """The result of some work, which is cancelled when the client leaves.

    Raises:
        ClientGoneError: it has left.
    """
    return await _race(work, request.receive)


async def _race(work: Coroutine[Any, Any, _T], receive: Receive) -> _T:
    worker = asyncio.create_task(work)
    watcher = asyncio.create_task(_disconnect(receive))
    try:
        await asyncio.wait((worker, watcher), return_when=asyncio.FIRST_COMPLETED)
        if worker.done():
            return worker.result()
        raise ClientGoneError
    finally:
        worker.cancel()
        watcher.cancel()
        await asyncio.gather(worker, watcher, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    """Wait until the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass
