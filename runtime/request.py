"""One request to an engine: what was asked, and what has come of it so far."""

import time
from dataclasses import dataclass, field

from inkrt.runtime.generation import Generation
from inkrt.runtime.media.encode import TowerInputs
from inkrt.runtime.output import CompletionOutput, Delta, RequestMetrics, RequestOutput
from inkrt.runtime.sampling_params import SamplingParams
from inkrt.runtime.tower_spec import Kind


@dataclass(slots=True, eq=False)
class Request:
    """A validated request, waiting while `generation` is None; made by `LLM.prepare`.

    Attributes:
        request_id: unique in its LLM.
        prompt: token ids, with all placeholders.
        params: sampling and stopping.
        media: what towers take of images and recordings, until they have read it.
        generation: runs the steps.
        num_cached: tokens of the prompt whose state was there already.
        deltas: what the steps have added.
        has_ended: whether its state was given back.
        asked_s: when it was made, as are the following by `time.perf_counter`.
        started_s: when it got its state; None before.
        first_s: when its first token came; None before.
        ended_s: when it ended; None before.
    """

    request_id: str
    prompt: list[int]
    params: SamplingParams
    media: dict[Kind, list[TowerInputs]] = field(default_factory=dict)
    generation: Generation | None = None
    num_cached: int = 0
    deltas: list[Delta] = field(default_factory=list)
    has_ended: bool = False
    asked_s: float = field(default_factory=time.perf_counter)
    started_s: float | None = None
    first_s: float | None = None
    ended_s: float | None = None

    def take(self, delta: Delta) -> None:
        """Add what a step has given."""
        self.deltas.append(delta)
        if self.first_s is None and delta.token_ids:
            self.first_s = time.perf_counter()

    def output(self) -> RequestOutput:
        """What became of it; it has had a step."""
        assert self.generation is not None
        completion = CompletionOutput.join(self.deltas)
        return RequestOutput(
            self.request_id,
            tuple(self.prompt),
            (completion,),
            speculation=self.generation.stats,
            metrics=self.metrics(),
        )

    def metrics(self) -> RequestMetrics:
        """Times so far; of phases that were not reached they are 0."""
        now = time.perf_counter() if self.ended_s is None else self.ended_s
        started = now if self.started_s is None else self.started_s
        first = now if self.first_s is None else self.first_s
        return RequestMetrics(
            queue_s=started - self.asked_s,
            prefill_s=first - started,
            decode_s=now - first,
            num_cached_tokens=self.num_cached,
        )
