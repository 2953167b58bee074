"""Spans of OpenTelemetry: below which they stand, what they tell, that they reach a collector."""

import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import httpx2
import pytest
from served import HEADERS, MESSAGES, SETTINGS, Scripted

from inkrt import SpeculativeConfig
from inkrt.errors import UsageError
from inkrt.server.app import create_app
from inkrt.server.traces import open_provider

CHAT = "/v1/chat/completions"
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Traced:
    """A server in this process, and the spans that it makes."""

    def __init__(self, llm: Any) -> None:
        sdk = pytest.importorskip("opentelemetry.sdk.trace")
        export = pytest.importorskip("opentelemetry.sdk.trace.export")
        memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
        self._exporter = memory.InMemorySpanExporter()
        provider = sdk.TracerProvider()
        provider.add_span_processor(export.SimpleSpanProcessor(self._exporter))
        self._transport = httpx2.ASGITransport(app=create_app(llm, SETTINGS, provider))

    async def post(self, path: str, body: Any, **headers: str) -> tuple[Any, list[Any]]:
        """The answer, and the spans in order of their ends."""
        async with httpx2.AsyncClient(
            transport=self._transport, base_url="http://a", headers={**HEADERS, **headers}
        ) as client:
            answer = await client.post(path, json=body)
            await client.get("/health")
        spans = list(self._exporter.get_finished_spans())
        self._exporter.clear()
        return answer, spans


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "prompt", "limit"),
    [
        (CHAT, {"messages": MESSAGES}, "max_completion_tokens"),
        ("/v1/responses", {"input": "hello"}, "max_output_tokens"),
        ("/v1/completions", {"prompt": "hello"}, "max_tokens"),
    ],
)
@pytest.mark.anyio
async def test_an_answer_stands_below_its_request(
    scripted: Scripted, path: str, prompt: Any, limit: str, stream: bool
) -> None:
    llm, executor = scripted(speculative=SpeculativeConfig(method="none"))
    executor.step_s = 0.002
    body = {**prompt, limit: 5, "ignore_eos": True, "temperature": 0.5, "seed": 3, "stream": stream}
    answer, spans = await Traced(llm).post(
        path, body, traceparent=f"00-{TRACE}-{PARENT}-01", tracestate=""
    )
    assert answer.status_code == 200
    *phases, made, http = spans
    assert [span.name for span in phases] == ["queue", "prefill", "decode"]
    assert http.name == f"POST {path}"
    assert {format(span.context.trace_id, "032x") for span in spans} == {TRACE}
    assert format(http.parent.span_id, "016x") == PARENT
    assert made.parent.span_id == http.context.span_id
    assert {span.parent.span_id for span in phases} == {made.context.span_id}
    operation = "text_completion" if path == "/v1/completions" else "chat"
    assert made.name == f"{operation} m"
    told = dict(made.attributes)
    assert told.pop("gen_ai.usage.input_tokens") > 0
    assert told == {
        "gen_ai.operation.name": operation, "gen_ai.provider.name": "inkrt",
        "gen_ai.request.model": "m", "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 1.0, "gen_ai.request.max_tokens": 5, "gen_ai.request.seed": 3,
        "gen_ai.response.finish_reasons": ("length",), "gen_ai.usage.output_tokens": 5,
        "gen_ai.usage.cache_read.input_tokens": 0,
    }  # fmt: skip
    # Phases follow each other without gaps, and take what the steps took: four behind the first.
    places = [made.start_time, *(span.end_time for span in phases)]
    assert [span.start_time for span in phases] == places[:-1]
    assert made.end_time == places[-1]
    assert http.start_time - 1_000_000 <= made.start_time
    assert made.end_time <= http.end_time + 1_000_000
    assert phases[2].end_time - phases[2].start_time >= 4 * 2_000_000
    assert "hello" not in str([dict(span.attributes) for span in spans])


@pytest.mark.anyio
async def test_several_answers_and_errors(scripted: Scripted) -> None:
    llm, _ = scripted()
    traced = Traced(llm)
    body = {"messages": MESSAGES, "max_tokens": 2, "n": 3, "ignore_eos": True}
    _, spans = await traced.post(CHAT, body)
    assert [span.name for span in spans].count("chat m") == 3
    answer, spans = await traced.post(CHAT, {**body, "temperature": -1})
    assert (answer.status_code, [span.name for span in spans]) == (400, [f"POST {CHAT}"])
    assert spans[0].attributes["http.response.status_code"] == 400


@pytest.mark.anyio
async def test_an_answer_that_is_given_up(scripted: Scripted) -> None:
    llm, executor = scripted()
    traced = Traced(llm)

    def fail(*_: object) -> Any:
        raise ZeroDivisionError("not to be told")

    executor._run = fail  # type: ignore[method-assign]
    answer, spans = await traced.post(CHAT, {"messages": MESSAGES, "stream": True})
    assert "internal_error" in answer.text
    (made,) = (span for span in spans if span.name == "chat m")
    assert made.attributes["error.type"] == "abort"
    assert not made.status.is_ok
    assert "not to be told" not in str([span.to_json() for span in spans])


def test_spans_reach_a_collector() -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    service = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
    bodies: list[tuple[str, bytes]] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            length = int(self.headers["content-length"])
            bodies.append((self.path, self.rfile.read(length)))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Collector) as server:
        threading.Thread(target=server.serve_forever).start()
        provider = open_provider(f"http://127.0.0.1:{server.server_port}/v1/traces")
        provider.get_tracer("a").start_span("one").end()
        provider.shutdown()
        server.shutdown()
    ((path, body),) = bodies
    assert path == "/v1/traces"
    (of_resource,) = service.ExportTraceServiceRequest.FromString(body).resource_spans
    names = {item.key: item.value.string_value for item in of_resource.resource.attributes}
    assert names["service.name"] == "ink-serve"
    assert [span.name for of_scope in of_resource.scope_spans for span in of_scope.spans] == ["one"]


@pytest.mark.parametrize("endpoint", ["localhost:4317", "", "ftp://a/b", "http://"])
def test_an_address_that_is_none(endpoint: str) -> None:
    with pytest.raises(UsageError, match=r"--otlp-traces-endpoint is .* it must be an address"):
        open_provider(endpoint)


def test_libraries_that_are_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "opentelemetry.exporter.otlp.proto.http.trace_exporter"
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UsageError, match=r'which is not installed: pip install "inkrt\[traces\]"'):
        open_provider("http://127.0.0.1:4318/v1/traces")
