"""ink-serve: serve an engine over HTTP, as OpenAI's clients expect it.

Logs go to stderr; nothing goes to stdout but what --show-config shows.
"""

import ipaddress
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from inkrt.commands import console, spec_options
from inkrt.errors import UsageError

if TYPE_CHECKING:
    from inkrt.server.settings import ServerSettings

_log = logging.getLogger("inkrt.server")


def serve(
    engine: Annotated[Path, typer.Argument(metavar="ENGINE", help="Engine folder.")],
    *,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")
    ] = 8000,
    chat_template: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="A chat template in Jinja2.  [default: the engine's own]",
        ),
    ] = None,
    api_key: Annotated[
        list[str] | None, typer.Option(help="Clients must send it; may be given several times.")
    ] = None,
    api_key_file: Annotated[
        Path | None, typer.Option(help="A file with such keys, one a line.")
    ] = None,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(
            help="What clients call the model; may be repeated.  [default: the folder's name]"
        ),
    ] = None,
    max_waiting: Annotated[
        int, typer.Option(min=1, help="Requests that may wait for the engine; more get 429.")
    ] = 64,
    prefix_cache: Annotated[
        bool,
        typer.Option(help="Keep the state of ended requests, for prompts that begin as they do."),
    ] = True,
    max_body_mib: Annotated[int, typer.Option(min=1, help="Longest request, in MiB.")] = 32,
    request_timeout: Annotated[
        float | None,
        typer.Option(min=0.001, help="Seconds that an answer may take.  [default: any]"),
    ] = None,
    shutdown_timeout: Annotated[
        float, typer.Option(min=0, help="Seconds that running requests get after SIGTERM.")
    ] = 30.0,
    otlp_traces_endpoint: Annotated[
        str | None,
        typer.Option(metavar="URL", help="An OpenTelemetry collector that takes OTLP over HTTP."),
    ] = None,
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], typer.Option(help="Least level to log.")
    ] = "info",
    log_format: Annotated[
        Literal["console", "json"], typer.Option(help="Lines for people or for programs.")
    ] = "console",
    options: spec_options.SpecOptions,
) -> None:
    """Serve an engine over HTTP, as OpenAI's clients expect it."""
    _set_up_logs(log_level, log_format)
    keys = (*(api_key or ()), *_keys_of(api_key_file))
    if any(not key or not key.isascii() or not key.isprintable() for key in keys):
        raise UsageError("--api-key: a key must be printable ASCII and not empty")
    try:
        from inkrt.server.app import create_app
        from inkrt.server.run import open_socket
        from inkrt.server.run import serve as run_server
        from inkrt.server.settings import ServerSettings
        from inkrt.server.traces import open_provider
    except ModuleNotFoundError as error:
        raise UsageError(
            f'ink-serve needs {error.name}, which is not installed: pip install "inkrt[serve]"'
        ) from None
    from inkrt.runtime.async_llm import AsyncLLM
    from inkrt.runtime.chat import ChatTemplate

    provider = None if otlp_traces_endpoint is None else open_provider(otlp_traces_endpoint)
    template = None if chat_template is None else ChatTemplate.load(engine, chat_template)
    settings = ServerSettings(
        served_names=tuple(served_model_name or ()),
        api_keys=keys,
        max_body_bytes=max_body_mib * 2**20,
        request_timeout_s=request_timeout,
    )
    # Before loading, which may take minutes; clients are answered once it is done.
    with open_socket(host, port) as listener:
        llm = AsyncLLM(
            engine,
            speculative=options.config(),
            prefix_cache=prefix_cache,
            max_waiting=max_waiting,
        )
        try:
            options.require_use(llm.llm)
            if template is not None:
                llm.llm.engine.chat_template = template
            address = listener.getsockname()
            _announce(settings, address[0], address[1], llm.llm.method)
            run_server(create_app(llm, settings, provider), listener, shutdown_timeout)
        finally:
            llm.close_now()
            if provider is not None:
                provider.shutdown()  # sends what is left


def _announce(settings: "ServerSettings", host: str, port: int, method: str) -> None:
    place = f"[{host}]" if ":" in host else host
    _log.info("serving at http://%s:%d/v1, speculation: %s", place, port, method)
    if not settings.api_keys and not ipaddress.ip_address(host).is_loopback:
        _log.warning(
            "no API key is set and %s can be reached by others: anyone may use it; set --api-key",
            host,
        )


def _keys_of(path: Path | None) -> list[str]:
    if path is None:
        return []
    try:
        keys = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--api-key-file: cannot read it: {error}") from None
    if not any(keys):
        raise UsageError(f"--api-key-file: {path} has no key; write one a line")
    return [key for key in keys if key]


def _set_up_logs(level: str, form: str) -> None:
    """One handler on stderr for all, at the level that was asked for."""
    root = logging.getLogger()
    if form == "json":
        from inkrt.server.log import JsonFormatter

        for handler in root.handlers:
            handler.setFormatter(JsonFormatter())
    logging.getLogger("inkrt").setLevel(level.upper())


def make_app() -> typer.Typer:
    """The application."""
    app = console.make_app("ink-serve", "Serve an engine over HTTP.", variables=True)
    console.add_command(
        app,
        serve,
        options=spec_options.SpecOptions,
        api_names=spec_options.API_NAMES,
        secrets=("api_key",),
    )
    return app


def main() -> None:
    """Entry point."""
    console.run(make_app())


if __name__ == "__main__":
    main()
