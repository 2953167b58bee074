"""Spans of answers for OpenTelemetry: how long one waited, read its prompt, wrote. No text is told.

FastAPI makes the span of each HTTP request, as a child of what `traceparent` names; those of the
answers stand below it. Names are those of the conventions for generative AI
(https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans/). Without a provider all of this
does nothing.
"""

import time
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

from fastapi.telemetry import TelemetryConfig
from opentelemetry import trace

from inkrt import __version__
from inkrt.errors import UsageError
from inkrt.runtime.request import Request
from inkrt.server.middleware import OPEN_PATHS

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider as SdkTracerProvider

Operation = Literal["chat", "text_completion"]
_NS = 1_000_000_000


class Traces:
    """Makes the spans of answers.

    Args:
        model_name: of the model in spans.
        provider: takes the spans; None for the process's own, which is none unless set.
    """

    def __init__(self, model_name: str, provider: trace.TracerProvider | None) -> None:
        self._model = model_name
        self._tracer = trace.get_tracer("inkrt.server", __version__, provider)

    def record(self, request: Request, operation: Operation, reason: str, num_tokens: int) -> None:
        """The spans of an answer that has just ended, below the current one.

        Args:
            request: of it.
            operation: what was asked for.
            reason: stop, length, tool_calls, or abort if it was given up.
            num_tokens: of the answer.
        """
        now_ns, now_s = time.time_ns(), time.perf_counter()

        def at(clock_s: float) -> int:
            return now_ns - int((now_s - clock_s) * _NS)

        span = self._tracer.start_span(f"{operation} {self._model}", start_time=at(request.asked_s))
        if not span.is_recording():
            return
        span.set_attributes(self._attributes(request, operation, reason, num_tokens))
        if reason == "abort":
            span.set_attribute("error.type", reason)
            span.set_status(trace.StatusCode.ERROR, "the answer was given up")
        times, context = request.metrics(), trace.set_span_in_context(span)
        start_s = request.asked_s
        for name, length_s in (
            ("queue", times.queue_s),
            ("prefill", times.prefill_s),
            ("decode", times.decode_s),
        ):
            phase = self._tracer.start_span(name, context, start_time=at(start_s))
            start_s += length_s
            phase.end(at(start_s))
        span.end(at(start_s))

    def _attributes(
        self, request: Request, operation: Operation, reason: str, num_tokens: int
    ) -> dict[str, Any]:
        params, generation = request.params, request.generation
        made: dict[str, Any] = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "inkrt",
            "gen_ai.request.model": self._model,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.response.finish_reasons": (reason,),
            "gen_ai.usage.input_tokens": len(request.prompt),
            "gen_ai.usage.cache_read.input_tokens": request.num_cached,
            "gen_ai.usage.output_tokens": num_tokens,
        }
        if params.max_tokens is not None:
            made["gen_ai.request.max_tokens"] = params.max_tokens
        if params.seed is not None:
            made["gen_ai.request.seed"] = params.seed
        if generation is not None and generation.stats.drafted:
            made["ink.spec_decode.num_draft_tokens"] = generation.stats.drafted
            made["ink.spec_decode.num_accepted_tokens"] = generation.stats.accepted
        return made


def http_telemetry(provider: trace.TracerProvider | None) -> TelemetryConfig:
    """What FastAPI is to tell: one span of each request, but for those about the server itself."""
    return {
        "tracer_provider": provider,
        "metrics": False,  # ours are at /metrics
        "logs": False,
        "operation_spans": False,
        "auto_configure": False,
        "exclude": lambda scope: scope.get("path") in OPEN_PATHS,
    }


def open_provider(endpoint: str) -> "SdkTracerProvider":
    """A provider that sends spans to a collector; shut it down to send the last ones.

    Args:
        endpoint: where a collector takes OTLP over HTTP, e.g. "http://127.0.0.1:4318/v1/traces".

    Raises:
        UsageError: that is no such address, or the libraries are not installed.
    """
    address = urlsplit(endpoint)
    if address.scheme not in ("http", "https") or not address.hostname:
        raise UsageError(
            f"--otlp-traces-endpoint is {endpoint!r}, it must be an address such as "
            "http://127.0.0.1:4318/v1/traces"
        )
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ModuleNotFoundError as error:
        raise UsageError(
            f"--otlp-traces-endpoint needs {error.name}, which is not installed: "
            'pip install "inkrt[traces]"'
        ) from None
    own = Resource({"service.name": "ink-serve", "service.version": __version__})
    # OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES win.
    provider = TracerProvider(resource=own.merge(OTELResourceDetector().detect()))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return provider
