"""Serving on a socket: start, signals, and the way to the end.

The first SIGTERM or SIGINT refuses new requests and lets those that run finish, for so long; the
second ends at once. If the engine fails, the process ends with an error, for a supervisor to start
it again. Only this module sets signal handlers.
"""

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Callable, Iterator

import uvicorn
from fastapi import FastAPI

from inkrt.errors import DeviceError, UsageError
from inkrt.server.service import Service

_log = logging.getLogger("inkrt.server")
_BEAT_S = 0.5
_BACKLOG = 2048


def open_socket(host: str, port: int) -> socket.socket:
    """Listen.

    Args:
        host: an address or a name of this machine.
        port: 0 takes a free one.

    Raises:
        UsageError: that address cannot be listened on.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        made = socket.socket(family, socket.SOCK_STREAM)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
        made.listen(_BACKLOG)
    except (OSError, OverflowError) as error:
        raise UsageError(
            f"--host {host} --port {port}: cannot listen there: {error}; choose others"
        ) from None
    return made


def serve(app: FastAPI, listener: socket.socket, shutdown_timeout_s: float) -> None:
    """Serve until a signal comes.

    Args:
        app: made by `create_app`.
        listener: made by `open_socket`.
        shutdown_timeout_s: given to running requests after the first signal.

    Raises:
        DeviceError: the engine has failed.
    """
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=int(shutdown_timeout_s) + 10,
        lifespan="off",
    )
    asyncio.run(_serve(_Server(config), app.state.service, listener, shutdown_timeout_s))


class _Server(uvicorn.Server):
    """Leaves signals to us: they stop what runs only after it had time to finish."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Nothing."""
        yield


async def _serve(
    server: uvicorn.Server, service: Service, listener: socket.socket, timeout_s: float
) -> None:
    ending: list[asyncio.Task[None]] = []

    async def end() -> None:
        await service.drain(timeout_s)
        server.should_exit = True

    def on_signal() -> None:
        if ending:
            _log.warning("second signal: ending at once")
            server.should_exit = server.force_exit = True
            return
        _log.info("draining: no new requests are taken")
        ending.append(asyncio.create_task(end()))

    with _handlers(on_signal):
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        while not serving.done():
            await asyncio.wait((serving,), timeout=_BEAT_S)
            if not service.llm.is_alive:
                server.should_exit = server.force_exit = True
        await serving
        for task in ending:
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)
    if not service.llm.is_alive:
        raise DeviceError("the engine has failed; the log above says why. Start the server again")


@contextlib.contextmanager
def _handlers(on_signal: Callable[[], None]) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    numbers = (signal.SIGINT, signal.SIGTERM)
    for number in numbers:
        loop.add_signal_handler(number, on_signal)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
