"""What happens on a server, for Prometheus. The names are a promise; tests hold the list.

Seconds and tokens are the units. They are vLLM's names with the prefix `ink_`, so that dashboards
move over by renaming.
"""

import time
from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from inkrt import __version__
from inkrt.runtime.async_llm import AsyncLLM
from inkrt.runtime.output import Delta
from inkrt.runtime.request import Request

_LABELS = ("model_name",)
# In seconds. Decoding of one user is faster than what others' buckets begin with.
_TOKEN_S = (
    *(0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2),
    *(0.3, 0.4, 0.5, 0.75, 1.0, 2.5),
)
_FIRST_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0),
    *(7.5, 10.0, 20.0, 40.0, 80.0),
)
_REQUEST_S = (
    *(0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0),
    *(50.0, 60.0, 120.0, 240.0, 480.0, 960.0),
)
_NUM_TOKENS = tuple(float(2**i) for i in range(21))


class Metrics:
    """The metrics of one server, in a registry of their own.

    Args:
        llm: the engine.
        model_name: label of all of them.
    """

    def __init__(self, llm: AsyncLLM, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._model = model_name
        self._last_s: dict[Request, float] = {}
        self._make_gauges(llm)
        self.registry.register(_SpeculationCollector(llm, model_name))
        self._prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts.")
        self._generation_tokens = self._counter("generation_tokens", "Tokens generated.")
        self._cache_queries = self._counter(
            "prefix_cache_queries", "Tokens of prompts whose state might have been there."
        )
        self._cache_hits = self._counter(
            "prefix_cache_hits", "Tokens of prompts that were not read: their state was there."
        )
        self._success = Counter(
            "ink_request_success",
            "Answers that are complete.",
            (*_LABELS, "finished_reason"),
            registry=self.registry,
        )
        self._errors = Counter(
            "ink_request_error",
            "Answers of HTTP that are errors, by status.",
            (*_LABELS, "code"),
            registry=self.registry,
        )
        self._first = self._histogram(
            "time_to_first_token_seconds", "From asking to the first token.", _FIRST_S
        )
        self._between = self._histogram(
            "inter_token_latency_seconds",
            "From token to token; tokens of one step share its time.",
            _TOKEN_S,
        )
        self._per_token = self._histogram(
            "request_time_per_output_token_seconds",
            "Of a request, from the first to the last token, per token behind the first.",
            _TOKEN_S,
        )
        self._total = self._histogram(
            "e2e_request_latency_seconds", "From asking to the last token.", _REQUEST_S
        )
        self._queue = self._histogram(
            "request_queue_time_seconds", "From asking until the engine begins.", _REQUEST_S
        )
        self._prefill = self._histogram(
            "request_prefill_time_seconds", "From then to the first token.", _REQUEST_S
        )
        self._decode = self._histogram(
            "request_decode_time_seconds", "From the first to the last token.", _REQUEST_S
        )
        self._request_prompt = self._histogram(
            "request_prompt_tokens", "Tokens of a prompt.", _NUM_TOKENS
        )
        self._request_generation = self._histogram(
            "request_generation_tokens", "Tokens of an answer.", _NUM_TOKENS
        )

    def count_delta(self, request: Request, delta: Delta) -> None:
        """A step has given tokens."""
        now = time.perf_counter()
        if (last := self._last_s.get(request)) is not None:
            count = len(delta.token_ids)
            for _ in range(count):
                self._between.observe((now - last) / count)
        self._last_s[request] = now

    def count_answer(self, request: Request, reason: str, num_tokens: int) -> None:
        """An answer is complete, or was given up for the reason "abort".

        Args:
            request: of it.
            reason: stop, length, tool_calls or abort.
            num_tokens: of the answer.
        """
        self._last_s.pop(request, None)
        self._success.labels(self._model, reason).inc()
        self._prompt_tokens.inc(len(request.prompt))
        self._generation_tokens.inc(num_tokens)
        self._cache_queries.inc(len(request.prompt))
        self._cache_hits.inc(request.num_cached)
        if reason == "abort":
            return
        times = request.metrics()
        self._first.observe(times.queue_s + times.prefill_s)
        self._total.observe(times.queue_s + times.prefill_s + times.decode_s)
        self._queue.observe(times.queue_s)
        self._prefill.observe(times.prefill_s)
        self._decode.observe(times.decode_s)
        if num_tokens > 1:
            self._per_token.observe(times.decode_s / (num_tokens - 1))
        self._request_prompt.observe(len(request.prompt))
        self._request_generation.observe(num_tokens)

    def count_error(self, status: int) -> None:
        """An answer of HTTP is an error."""
        self._errors.labels(self._model, str(status)).inc()

    def text(self) -> bytes:
        """All of them in Prometheus' text form."""
        return generate_latest(self.registry)

    def _counter(self, name: str, help_text: str) -> Counter:
        made = Counter(f"ink_{name}", help_text, _LABELS, registry=self.registry)
        return made.labels(self._model)

    def _histogram(self, name: str, help_text: str, buckets: Iterable[float]) -> Histogram:
        made = Histogram(
            f"ink_{name}", help_text, _LABELS, registry=self.registry, buckets=tuple(buckets)
        )
        return made.labels(self._model)

    def _make_gauges(self, llm: AsyncLLM) -> None:
        def gauge(name: str, help_text: str) -> Gauge:
            made = Gauge(f"ink_{name}", help_text, _LABELS, registry=self.registry)
            return made.labels(self._model)

        def usage() -> float:
            stats = llm.stats()
            return 1 - stats.num_free_pages / stats.num_pages if stats.num_pages else 0.0

        gauge("num_requests_running", "Requests that take turns.").set_function(
            lambda: llm.stats().num_running
        )
        gauge("num_requests_waiting", "Requests that wait for the engine.").set_function(
            lambda: llm.stats().num_waiting
        )
        gauge("kv_cache_usage_perc", "Share of pages in use, 0 to 1.").set_function(usage)
        gauge("kv_pages_total", "Pages of state.").set(llm.stats().num_pages)
        config = llm.llm.engine.config
        Gauge(
            "ink_engine_info",
            "1; what is served.",
            (*_LABELS, "version", "target", "model_type", "speculation"),
            registry=self.registry,
        ).labels(
            self._model, __version__, config.target, config.model.model_type, llm.llm.method
        ).set(1)


class _SpeculationCollector(Collector):
    """Counters that the engine keeps itself: read when asked for, never counted twice."""

    def __init__(self, llm: AsyncLLM, model_name: str) -> None:
        self._llm = llm
        self._model = model_name

    def collect(self) -> Iterator[Metric]:
        stats = self._llm.stats().speculation
        for name, help_text, value in (
            ("drafts", "Rounds of speculation.", stats.rounds),
            ("draft_tokens", "Drafts that were verified.", stats.drafted),
            (
                "accepted_tokens",
                "Drafts that became output. Mean acceptance length = 1 + this / drafts.",
                stats.accepted,
            ),
        ):
            yield self._family(f"ink_spec_decode_num_{name}", help_text, [((), value)])
        places = [((str(place),), count) for place, count in enumerate(stats.accepted_at)]
        yield self._family(
            "ink_spec_decode_num_accepted_tokens_per_pos",
            "Rounds whose draft at that position became output.",
            places,
            "position",
        )

    def _family(
        self,
        name: str,
        help_text: str,
        values: Iterable[tuple[tuple[str, ...], int]],
        *labels: str,
    ) -> CounterMetricFamily:
        family = CounterMetricFamily(name, help_text, labels=(*_LABELS, *labels))
        for extra, value in values:
            family.add_metric((self._model, *extra), value)
        return family
