"""The token loop of one request: prompt in, tokens and text out, one step at a time.

Several generations of one engine can take turns; each `advance` asks for exactly one step. Where
one has a GPU for itself, steps run ahead of it, and text is made while the next one runs.
"""

import secrets
from collections.abc import Iterator, Sequence
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from inkrt.errors import ContextLengthError, RequestError
from inkrt.runtime.engine_file import EngineConfig
from inkrt.runtime.executor import Sampling
from inkrt.runtime.logits import LogitsProcessor, check_processing, draw_rows
from inkrt.runtime.media.rows import FeatureRows
from inkrt.runtime.output import Delta, FinishReason
from inkrt.runtime.rebuild import rebuild_with
from inkrt.runtime.sampling_params import LEAST_TEMPERATURE, MAX_SEED, SamplingParams
from inkrt.runtime.session import Session, check_tokens
from inkrt.runtime.spec.round import Speculator
from inkrt.runtime.spec.stats import SpeculationStats
from inkrt.runtime.stop import StopMatcher
from inkrt.runtime.tokenizer import IncrementalDecoder, Tokenizer


def check_request(
    prompt: Sequence[int], params: SamplingParams, config: EngineConfig, *, has_tokenizer: bool
) -> list[int]:
    """The prompt as plain integers, if the engine can run the request.

    Raises:
        RequestError: invalid tokens, no room for one output token, text without a tokenizer, or
            token ids that the model does not generate.
    """
    ids = check_tokens(prompt, config)
    if len(ids) >= config.max_seq_len:
        rebuild = rebuild_with(config.rebuild_command, "--max-seq-len", len(ids) + 1)
        raise ContextLengthError(
            f"the prompt has {len(ids)} tokens, this engine holds {config.max_seq_len} with the "
            f"output; shorten it to at most {config.max_seq_len - 1} or rebuild with: {rebuild}",
            param="prompt",
        )
    if params.stop and not has_tokenizer:
        raise RequestError(
            "stop strings need text, but the engine has no tokenizer.json; use stop_token_ids",
            param="stop",
        )
    check_processing(params, config.model.vocab_size, has_tokenizer=has_tokenizer)
    return ids


class SessionKeeper(Protocol):
    """Who wants the sessions of requests that have ended."""

    def keep(self, session: Session) -> None:
        """Take over a session that nobody else uses any more."""
        ...

    def mark(self, session: Session) -> None:
        """Look at a session that holds a whole prompt and nothing else; it goes on."""
        ...


class Generation:
    """One running request. It owns its session and closes it, or hands it on, when it ends.

    Args:
        session: new; empty, or with the beginning of the prompt, which is not read again.
        prompt: checked by `check_request`.
        params: sampling and stopping.
        tokenizer: makes the text; None leaves it empty.
        speculator: takes several tokens a step where it can; None takes one.
        features: rows in place of the embeddings of some tokens of the prompt.
        keeper: gets the session when the request ends, unless a step has failed.

    Raises:
        RequestError: from the constructor, if a bad word has no tokens; the session is closed.

    Attributes:
        state: "prefill" until the prompt is read, then "decode", at last "finished".
        stats: what speculation has done so far.
    """

    def __init__(
        self,
        session: Session,
        prompt: Sequence[int],
        params: SamplingParams,
        tokenizer: Tokenizer | None,
        speculator: Speculator | None = None,
        features: FeatureRows | None = None,
        keeper: SessionKeeper | None = None,
    ) -> None:
        config = session.config
        assert session.tokens == list(prompt[: session.length]), "of another prompt"
        assert session.length < len(prompt), "the last token's row is needed"
        self.state: Literal["prefill", "decode", "finished"] = "prefill"
        self._session = session
        self._prompt = prompt
        self._features = features
        self._keeper = keeper
        self._params = params
        self._eos = frozenset(() if params.ignore_eos else config.model.eos_token_ids)
        self._stop_ids = self._eos.union(params.stop_token_ids)
        self._sampling = Sampling(
            temperature=0.0 if params.temperature < LEAST_TEMPERATURE else params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
            seed=secrets.randbelow(MAX_SEED + 1) if params.seed is None else params.seed,
        )
        room = config.max_seq_len - len(prompt)
        self._num_left = room if params.max_tokens is None else min(room, params.max_tokens)
        self.stats = SpeculationStats()
        self._speculator = speculator
        self._timeline = list(prompt)  # with the token that no step has read yet
        try:
            self._processor = LogitsProcessor.make(params, len(prompt), config, tokenizer)
        except BaseException:
            self.close()
            raise
        self._decoder = (
            IncrementalDecoder(tokenizer, skip_special_tokens=params.skip_special_tokens)
            if tokenizer
            else None
        )
        self._matcher = StopMatcher(params.stop, include_match=params.include_stop_str_in_output)

    def advance(self) -> Delta:
        """Run one step: a piece of the prompt, one token, or a round of speculation.

        Raises:
            CapacityError: the pages are exhausted.
            RequestError: the request bans every token that could come next.
            Whatever it raises, the generation has ended.
        """
        assert self.state != "finished", "the generation has ended"
        try:
            if self.state == "decode":
                return self._decode()
            start = self._session.length
            piece = self._prompt[start : start + self._session.widest_step]
            is_last = start + len(piece) == len(self._prompt)
            rows = self._features.within(start, start + len(piece)) if self._features else None
            output = self._session.prefill(
                piece,
                self._sampling,
                wants_logits=is_last and self._processor is not None,
                features=rows,
            )
            if not is_last:
                return Delta("", ())
            self.state = "decode"
            if self._keeper is not None:
                self._keeper.mark(self._session)
            if self._processor is None:
                return self._take(int(output.tokens[-1]))
            return self._take(self._draw(self._processor, output.logits))
        except BaseException:
            self._keeper = None  # nobody knows what the session holds
            self.close()
            raise

    def __iter__(self) -> Iterator[Delta]:
        """Run to the end."""
        while self.state != "finished":
            yield self.advance()

    def close(self) -> None:
        """End the generation and give back its state; may be called again."""
        if self.state == "finished":
            return
        self.state = "finished"
        if self._keeper is None:
            self._session.close()
        else:
            self._keeper.keep(self._session)

    def _decode(self) -> Delta:
        if self._speculator is None and self._processor is not None:
            output = self._session.step(self._timeline[-1:], self._sampling)
            return self._take(self._draw(self._processor, output.logits))
        if self._speculator is None:
            num_more = self._num_left - 1
            return self._take(
                self._session.decode(self._timeline[-1], self._sampling, num_more=num_more)
            )
        step = self._speculator.run(
            self._session,
            self._timeline,
            self._sampling,
            self._num_left,
            self._processor,
            self._stop_ids,
        )
        deltas: list[Delta] = []
        for token in step.tokens:  # what stands behind the end was never asked for
            deltas.append(self._take(token))
            if self.state == "finished":
                break
        accepted = min(len(deltas), len(step.tokens) - 1)
        self.stats.count(
            step.drafted,
            accepted,
            len(deltas),
            proposed=step.proposed,
            on_device=step.on_device,
        )
        return Delta.of_round(deltas, accepted)

    def _draw(self, processor: LogitsProcessor, logits: NDArray[np.float32]) -> int:
        """The token behind the timeline, from the one row of logits that follows it."""
        return draw_rows(logits, processor, self._sampling, self._timeline)[0]

    def _take(self, token: int) -> Delta:
        reader = None if self._processor is None else self._processor.logprobs
        logprobs = () if reader is None else (reader.take(token, len(self._timeline)),)
        self._timeline.append(token)
        self._num_left -= 1
        is_eos = token in self._eos
        is_stop_token = token in self._stop_ids
        is_last = is_stop_token or self._num_left == 0
        is_visible = not is_stop_token or self._params.include_stop_str_in_output
        text = self._text([token] if is_visible else [], is_last)
        finish_reason: FinishReason | None = None
        stop_reason: int | str | None = None
        if is_stop_token:
            finish_reason, stop_reason = "stop", None if is_eos else token
        elif self._matcher.matched is not None:
            finish_reason, stop_reason = "stop", self._matcher.matched
        elif is_last:
            finish_reason = "length"
        if finish_reason is not None:
            self.close()
        return Delta(text, (token,), finish_reason, stop_reason, logprobs=logprobs)

    def _text(self, tokens: Sequence[int], is_last: bool) -> str:
        if self._decoder is None:
            return ""
        text = "".join(self._decoder.push(token) for token in tokens)
        if is_last:
            text += self._decoder.flush()
        if len(self._timeline) - len(self._prompt) <= self._params.min_tokens:
            return text  # too early for a stop string
        text = self._matcher.push(text)
        return text + self._matcher.flush() if is_last else text
