"""Text generation over an engine: the API most callers need.

An LLM may be used from several threads. One lock guards every step, so concurrent calls interleave
in no promised order; it is not held while a caller's code runs.
"""

import threading
import time
from collections import deque
from collections.abc import Collection, Generator, Mapping, Sequence
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import msgspec

from inkrt.errors import EngineFormatError, RequestError
from inkrt.runtime.engine import Engine
from inkrt.runtime.generation import Generation, check_request
from inkrt.runtime.logits import grammar_mask
from inkrt.runtime.media.encode import TowerInputs, encode
from inkrt.runtime.media.messages import media_of
from inkrt.runtime.media.prompt import expand, in_front
from inkrt.runtime.media.reader import MediaReader
from inkrt.runtime.media.rows import FeatureRows, place_rows, require_tower
from inkrt.runtime.output import Delta, RequestOutput
from inkrt.runtime.prefix_cache import PrefixCache
from inkrt.runtime.request import Request
from inkrt.runtime.sampling_params import SamplingParams
from inkrt.runtime.session import Session, check_tokens
from inkrt.runtime.spec.config import Method, SpeculativeConfig
from inkrt.runtime.spec.self_test import check_drafter
from inkrt.runtime.spec.stats import SpeculationStats
from inkrt.runtime.tower_spec import Kind

if TYPE_CHECKING:
    from inkrt.runtime.chat import Message

# A mapping has "prompt" or "prompt_token_ids", and may have "images" and "audio".
Prompt = str | Sequence[int] | Mapping[str, Any]
_MEDIA: dict[str, Kind] = {"images": "vision", "audio": "audio"}


class LLM:
    """Generates text with an engine.

    Parameters that a call does not give come from the model's generation_config.json, else they are
    `SamplingParams()`.

    Args:
        folder: an engine folder, written by ink-build.
        verify: also compare the sha256 of every file.
        speculative: who proposes tokens and what becomes of them; None for `SpeculativeConfig()`:
            the engine's own drafter, if it has one. What is generated does not depend on it, but
            for accept "probabilistic": there other tokens of the same distribution come.
        prefix_cache: keep the state of requests that have ended, for prompts that begin as they do
            (see `prefix_cache`). What was read in other pieces may round otherwise, so tokens can
            then depend on earlier requests, where two are about equally likely.

    Attributes:
        engine: the open engine; its sessions must not run beside this object's calls.
        default_params: used where a call gives none.
        method: who proposes tokens: "none", "ngram", "dspark" or "mtp".
        speculation: what speculation has done in all requests that have ended.

    Raises:
        RequestError: the engine cannot speculate like this.
        EngineFormatError: its drafter proposes nothing useful.
        InkError: see `Engine.open`.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        verify: bool = False,
        speculative: SpeculativeConfig | None = None,
        prefix_cache: bool = False,
    ) -> None:
        chosen = SpeculativeConfig() if speculative is None else speculative
        if not isinstance(chosen, SpeculativeConfig):
            raise RequestError(
                f"speculative is {chosen!r}, it must be a SpeculativeConfig or None",
                param="speculative",
            )
        self.default_params = _default_params(Path(folder))
        self.engine = Engine.open(folder, verify=verify)
        self.speculation = SpeculationStats()
        try:
            self._drafting = chosen.resolve(self.engine.folder, self.engine.config)
            self.method: Method = "none" if self._drafting is None else self._drafting.method
            if self.method not in ("none", "ngram"):
                check_drafter(self.engine)
        except BaseException:
            self.engine.close()
            raise
        # Reentrant: the garbage collector may close a forgotten stream while its thread holds it.
        self._lock = threading.RLock()
        self._numbers = count()
        self._media = MediaReader(self.engine.folder, self.engine.config)
        self._cache = PrefixCache(self.engine) if prefix_cache else None

    def generate(
        self,
        prompts: str | Mapping[str, Any] | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts; as many as the engine has room for take turns, step by step.

        Args:
            prompts: texts, lists of token ids, or objects with either as "prompt" or
                "prompt_token_ids". Text is encoded as ordinary text: role markers in it mean
                nothing. A single text or object may stand alone. An object may have "images" and
                "audio", lists of bytes, paths or, of audio, (samples, rate); token ids have
                placeholders for them (see `media.prompt`), and text stands behind all of them.
            params: for all prompts, or one per prompt.

        Returns:
            One output per prompt, in the order of the prompts.

        Raises:
            RequestError: a prompt is invalid (the message names it); nothing has run then.
            CapacityError: other requests hold all slots.
        """
        many = [prompts] if isinstance(prompts, str | Mapping) else list(prompts)
        each = list(params) if isinstance(params, Sequence) else [params] * len(many)
        if len(each) != len(many):
            raise RequestError(
                f"{len(each)} params for {len(many)} prompts; give one for all or one per prompt",
                param="params",
            )
        requests = []
        for i, prompt in enumerate(many):
            try:
                requests += self.prepare(prompt, [each[i]])
            except RequestError as error:
                raise RequestError(f"prompts[{i}]: {error}", param=error.param) from None
        waiting, running = deque(requests), deque[Request]()
        try:
            while waiting or running:
                while waiting and self.try_start(waiting[0], must=not running):
                    running.append(waiting.popleft())
                if self.advance(running[0]).finish_reason is None:
                    running.rotate(-1)
                else:
                    self.end(running.popleft())
        finally:
            for request in running:
                self.end(request)
        return [request.output() for request in requests]

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None
    ) -> Generator[Delta, None, None]:
        """Complete one prompt, handing out what each step adds; deltas, not the text so far.

        Nothing runs before the first item is asked for. Closing the generator cancels the request
        and frees its state.

        Raises:
            RequestError: the prompt is invalid; raised by this call.
            CapacityError: other requests hold all slots; raised with the first item.
        """
        return self._stream(*self.prepare(prompt, [params]))

    def chat(
        self, messages: "Sequence[Message]", params: SamplingParams | None = None
    ) -> RequestOutput:
        """Answer one conversation.

        Args:
            messages: objects with "role" and "content", optionally "name", "reasoning_content",
                "tool_calls" and "tool_call_id". Content is a string or a list of parts (see
                `media.messages`).
            params: sampling and stopping.

        Raises:
            RequestError: invalid messages, or the engine has no chat template.
            CapacityError: other requests hold all slots.
        """
        return self.generate([self.chat_prompt(messages)], params)[0]

    def chat_stream(
        self, messages: "Sequence[Message]", params: SamplingParams | None = None
    ) -> Generator[Delta, None, None]:
        """Answer one conversation as `stream` does; arguments and errors are those of `chat`."""
        return self.stream(self.chat_prompt(messages), params)

    def chat_prompt(
        self,
        messages: "Sequence[Message]",
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, object] | None = None,
    ) -> dict[str, Any]:
        """The prompt that a conversation is, for the other methods.

        Args:
            messages: as for `chat`.
            tools: function declarations; see `tool_messages`.
            add_generation_prompt: end with the beginning of an answer.
            variables: further ones of the chat template, e.g. reasoning_effort.

        Raises:
            RequestError: invalid messages or tools, or the engine has no chat template.
        """
        template, tokenizer = self.engine.chat_template, self.engine.tokenizer
        if template is None or tokenizer is None:
            raise RequestError(
                "the engine has no chat template; use generate, or rebuild it from a checkpoint "
                "with chat_template.jinja and tokenizer.json",
                param="messages",
            )
        taken = ("messages", "tools", "add_generation_prompt", "tokenizer", "strftime_now")
        own = dict(variables or {})
        if name := next((name for name in own if name in taken), None):
            raise RequestError(f"{name} is no variable to be set; leave it out", param=name)
        tokens = template.encode_chat(
            messages, tokenizer, add_generation_prompt=add_generation_prompt, tools=tools, **own
        )
        return {"prompt_token_ids": tokens, **media_of(messages)}

    def prompt_tokens(self, prompt: "Prompt | Sequence[Message]") -> list[int]:
        """The token ids of a prompt or of messages, as a request reads them.

        Raises:
            RequestError: it is invalid.
        """
        is_chat = isinstance(prompt, Sequence) and any(isinstance(x, Mapping) for x in prompt)
        given: Any = self.chat_prompt(prompt) if is_chat else prompt  # type: ignore[arg-type]
        return list(self._read(given)[0])

    def close(self) -> None:
        """Release all memory; running streams end with an error. May be called again."""
        with self._lock:
            if self._cache is not None:
                self._cache.clear()
            self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def prepare(self, prompt: Prompt, params: Sequence[SamplingParams | None]) -> list[Request]:
        """Check requests for one prompt and read its media; takes nothing of the engine yet.

        `try_start`, `advance` until a delta has a finish reason, and `end` run one; `generate` and
        `stream` are made of them.

        Args:
            prompt: as for `stream`.
            params: one request each.

        Raises:
            RequestError: the prompt is invalid, or the engine cannot do what is asked.
        """
        tokens, media = self._read(prompt)
        config, has_tokenizer = self.engine.config, self.engine.tokenizer is not None
        requests = []
        for each in params:
            own = each or self.default_params
            ids = check_request(tokens, own, config, has_tokenizer=has_tokenizer)
            grammar_mask(own, len(ids), config, self.engine.tokenizer)  # raises what is wrong
            name = f"request-{next(self._numbers)}"
            requests.append(Request(name, ids, own, dict(media)))
        return requests

    def _read(self, prompt: Prompt) -> tuple[Sequence[int], dict[Kind, list[TowerInputs]]]:
        """Token ids with all placeholders, and what towers take of images and recordings."""
        config, tokenizer = self.engine.config, self.engine.tokenizer
        fields = dict(prompt) if isinstance(prompt, Mapping) else {"prompt": prompt}
        given: dict[Kind, Any] = {kind: fields.pop(name, ()) for name, kind in _MEDIA.items()}
        if len(fields) != 1 or not fields.keys() <= {"prompt", "prompt_token_ids"}:
            raise RequestError(
                f"a prompt object has the keys {sorted(prompt)}, it must have prompt or "
                f"prompt_token_ids, and may have {' and '.join(_MEDIA)}",
                param="prompt",
            )
        tokens = self._tokens(fields.get("prompt", fields.get("prompt_token_ids")), fields.keys())
        media = {kind: self._media.read(kind, sources) for kind, sources in given.items()}
        counts = {kind: [item.num_rows for item in items] for kind, items in media.items()}
        place = in_front if isinstance(fields.get("prompt"), str) else expand
        ids = place(tokens, counts, config, tokenizer.special_ids if tokenizer else {})
        return ids, {kind: items for kind, items in media.items() if items}

    def _tokens(self, prompt: object, keys: Collection[str]) -> Sequence[int]:
        """Token ids of a prompt, under the one key of a prompt object that may hold text or not."""
        if isinstance(prompt, str) and "prompt" in keys:
            if self.engine.tokenizer is None:
                raise RequestError(
                    "the engine has no tokenizer.json; give token ids or rebuild it from a "
                    "checkpoint with a tokenizer",
                    param="prompt",
                )
            return self.engine.tokenizer.encode(prompt)
        if not isinstance(prompt, Sequence) or isinstance(prompt, str | bytes):
            raise RequestError(
                f"a prompt is of type {type(prompt).__name__}, it must be a string, "
                'a list of token ids or {"prompt_token_ids": [...]}',
                param="prompt",
            )
        return check_tokens(prompt, self.engine.config)

    def _session(self) -> Session:
        """An empty session; what is kept for others makes room."""
        return self.engine.session() if self._cache is None else self._cache.open(())

    def _features(self, request: Request) -> FeatureRows | None:
        """What stands in place of the embeddings of the request's placeholders."""
        if not request.media:
            return None
        config = self.engine.config
        rows = {
            kind: encode(
                self.engine.executor, require_tower(kind, config), items, config.model.hidden_size
            )
            for kind, items in request.media.items()
        }
        return place_rows(request.prompt, rows, config)

    def _stream(self, request: Request) -> Generator[Delta, None, None]:
        try:
            self.try_start(request, must=True)
            delta = Delta("", ())
            while delta.finish_reason is None:
                delta = self.advance(request)
                if delta.token_ids:
                    yield delta
        finally:
            self.end(request)

    def try_start(self, request: Request, *, must: bool) -> bool:
        """Give a request its state.

        Returns:
            Whether there was room; if `must`, raises CapacityError instead of returning false.
        """
        with self._lock:
            cache = self._cache
            has_room = self.engine.states.num_free_slots > 0 if cache is None else cache.has_room
            if not must and not has_room:
                return False
            features = self._features(request)
            request.media.clear()  # large, and read
            if features is not None:
                cache = None  # placeholders of other images are the same tokens
            session = self._session() if cache is None else cache.open(request.prompt)
            request.num_cached = session.length
            request.generation = Generation(
                session,
                request.prompt,
                request.params,
                self.engine.tokenizer,
                None if self._drafting is None else self._drafting.speculator(),
                features,
                cache,
            )
            request.started_s = time.perf_counter()
            return True

    def advance(self, request: Request) -> Delta:
        """Run one step of a started request, and keep what it adds."""
        assert request.generation is not None
        with self._lock:
            delta = request.generation.advance()
        request.take(delta)
        return delta

    def end(self, request: Request) -> None:
        """Give back the state of a request, if it has any; may be called again."""
        with self._lock:
            if request.has_ended:
                return
            request.has_ended = True
            request.ended_s = time.perf_counter()
            if request.generation is not None:
                request.generation.close()
                self.speculation.add(request.generation.stats)


def _default_params(folder: Path) -> SamplingParams:
    path = folder / "generation_config.json"
    if not path.is_file():
        return SamplingParams()
    try:
        config = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        return SamplingParams.from_generation_config(config)
    except (OSError, msgspec.MsgspecError, RequestError) as error:
        raise EngineFormatError(
            f"cannot use {path}: {error}; mend the file or rebuild the engine"
        ) from None
