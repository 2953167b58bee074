"""What a choice of speculation means on an engine: drafters, widths, costs, the self-test."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from fake import VOCAB, FakeExecutor, expected_logits, write_engine
from numpy.typing import NDArray

from inkrt.errors import ConfigError, EngineFormatError, RequestError
from inkrt.runtime.engine import Engine
from inkrt.runtime.engine_file import DraftSpec, EngineConfig, StepSpec
from inkrt.runtime.llm import LLM
from inkrt.runtime.session import Session
from inkrt.runtime.spec.config import SpeculativeConfig
from inkrt.runtime.spec.costs import COSTS_NAME, CostTable, engine_hash
from inkrt.runtime.spec.drafter import EngineDrafter, NgramDrafter
from inkrt.runtime.spec.self_test import check_drafter
from inkrt.runtime.spec.width import ConfidenceThreshold, CostAware, FixedWidth, RoundCosts

SURE = DraftSpec("dspark", 5, "rnn", has_confidence=True)
PLAIN = DraftSpec("dspark", 5, "rnn", has_confidence=False)


def table_of(config: EngineConfig, **changes: Any) -> CostTable:
    fields = {
        "engine": engine_hash(config),
        "device": "a machine",
        "contexts": (100, 1000),
        "decode_s": (1.0, 2.0),
        "verify_s": (tuple(1.1 + 0.1 * n for n in range(8)), tuple(2.1 + n for n in range(8))),
        "draft_s": (0.5, 0.6),
    }
    return CostTable(**{**fields, **changes})


def test_auto_is_the_engines_drafter_if_it_has_one(tmp_path: Path) -> None:
    without, with_ = write_engine(tmp_path / "a"), write_engine(tmp_path / "b", draft=PLAIN)
    assert SpeculativeConfig().resolve(tmp_path / "a", without) is None
    assert SpeculativeConfig("none").resolve(tmp_path / "b", with_) is None
    own = SpeculativeConfig().resolve(tmp_path / "b", with_)
    assert own is not None
    assert (own.method, own.num_draft_tokens, own.accept) == ("dspark", 5, "coupled")
    assert isinstance(own.make_drafter(), EngineDrafter)
    assert own.make_policy() == FixedWidth()
    ngram = SpeculativeConfig("ngram", accept="probabilistic").resolve(tmp_path / "b", with_)
    assert ngram is not None
    assert (ngram.method, ngram.num_draft_tokens, ngram.accept) == ("ngram", 7, "probabilistic")
    assert isinstance(ngram.make_drafter(), NgramDrafter)
    # Every session gets its own.
    assert ngram.make_drafter() is not ngram.make_drafter()


@pytest.mark.parametrize(
    ("chosen", "draft", "message"),
    [
        (
            SpeculativeConfig("dspark"),
            None,
            "no drafter of its own; choose method=ngram, or rebuild",
        ),
        (SpeculativeConfig("dspark", 6), SURE, "gives 5 at once; ask for at most 5"),
        (SpeculativeConfig("ngram", width="confidence"), SURE, "without confidences here; choose"),
        (SpeculativeConfig("auto", width="confidence"), PLAIN, "without confidences here; choose"),
        (SpeculativeConfig("auto", width="cost"), SURE, "has none; measure them with: ink-bench"),
    ],
)
def test_what_an_engine_lacks_is_told(
    tmp_path: Path, chosen: SpeculativeConfig, draft: DraftSpec | None, message: str
) -> None:
    config = write_engine(tmp_path / "engine", draft=draft)
    with pytest.raises(RequestError, match=message):
        chosen.resolve(tmp_path / "engine", config)


def test_widths_by_confidence_and_by_cost(tmp_path: Path) -> None:
    folder = tmp_path / "engine"
    config = write_engine(folder, draft=SURE)
    chosen = SpeculativeConfig(width="confidence", confidence_threshold=0.25)
    speculation = chosen.resolve(folder, config)
    assert speculation is not None
    assert speculation.make_policy() == ConfidenceThreshold(0.25)

    table_of(config).write(folder)
    assert sorted(path.name for path in folder.glob("*costs*")) == [COSTS_NAME]
    assert Engine.check(folder, verify=True) == []  # no part of the engine
    own = SpeculativeConfig(width="cost").resolve(folder, config)
    ngram = SpeculativeConfig("ngram", 2, width="cost").resolve(folder, config)
    assert own is not None
    assert ngram is not None
    policy: Any = own.make_policy()
    assert isinstance(policy, CostAware)
    assert policy.costs(0).plain == policy.costs(100).plain == 1.0
    assert policy.costs(101).plain == policy.costs(10**6).plain == 2.0
    # Anchor and up to five drafts, and drafting itself.
    assert policy.costs(7).rounds == pytest.approx([1.6, 1.7, 1.8, 1.9, 2.0, 2.1])
    policy = ngram.make_policy()
    assert policy.costs(500) == RoundCosts(2.0, [2.1, 3.1, 4.1])


def test_times_that_do_not_fit_the_engine_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "engine"
    config = write_engine(folder, draft=SURE)
    narrow = tuple(row[:3] for row in table_of(config).verify_s)
    path = folder / COSTS_NAME
    sound = json.loads(table_of(config).encode())
    for damage, message in (
        ({"engine": "0"}, "with another engine"),
        ({"contexts": [5, 5]}, "contexts do not rise"),
        ({"contexts": []}, "contexts do not rise"),
        ({"contexts": [-1, 5]}, "contexts below 0"),
        ({"decode_s": [1.0]}, "rows of different lengths"),
        ({"verify_s": [[1.0], [1.0, 2.0]]}, "rows of different lengths"),
        ({"decode_s": [0.0, 1.0]}, "not above 0"),
        ({"draft_s": [0.5, -1]}, "not above 0"),
        ({"decode_s": [1.0, float("nan")]}, "JSON is malformed"),
        ({"decode_s": [1.0, float("inf")]}, "JSON is malformed"),
        ({"verify_s": [[], []]}, "times of 0 widths, not of 8"),
        ({"verify_s": narrow}, "times of 3 widths, not of 8"),
        ({"draft_s": None}, "times of a draft step are where there is none, or the other way"),
        ({"more": 1}, "unknown field"),
        (b"{", "truncated"),
        (b"", "truncated"),
        (b"\xff\x00", "malformed"),
        (b"[" * 10**5, "Expected `object`"),
        (b"null", "Expected `object`"),
    ):
        is_raw = isinstance(damage, bytes)
        path.write_bytes(damage if is_raw else json.dumps({**sound, **damage}).encode())
        # By default too: times that are there are never passed over in silence.
        for width in ("cost", "auto"):
            with pytest.raises(EngineFormatError, match=message) as error:
                SpeculativeConfig(width=width).resolve(folder, config)
            line = str(error.value)
            assert line.startswith(f"{path} ")
            assert line.endswith(
                f"; choose width=fixed or measure again with: ink-bench engine {folder} --costs"
            )
            assert "\n" not in line
        for chosen in (SpeculativeConfig(width="fixed"), SpeculativeConfig(width="confidence")):
            assert chosen.resolve(folder, config) is not None


def test_a_table_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    config = write_engine(tmp_path / "engine")
    blocked = tmp_path / "engine" / COSTS_NAME
    blocked.mkdir()
    with pytest.raises(ConfigError, match="cannot write"):
        table_of(config).write(tmp_path / "engine")
    assert [path.name for path in (tmp_path / "engine").glob(".*")] == []
    with pytest.raises(ConfigError, match="cannot write"):
        table_of(config).write(tmp_path / "nowhere")


def test_values_out_of_range() -> None:
    for given, param in (
        ({"accept": "most"}, "accept"),
        ({"width": "all"}, "width"),
        ({"confidence_threshold": 1.1}, "confidence_threshold"),
        ({"confidence_threshold": True}, "confidence_threshold"),
        ({"confidence_threshold": float("nan")}, "confidence_threshold"),
    ):
        with pytest.raises(RequestError) as error:
            SpeculativeConfig(**given)  # type: ignore[arg-type]
        assert error.value.param == param


@pytest.mark.parametrize("given", ["ngram", {"method": "ngram"}, "", SpeculativeConfig])
def test_what_is_no_configuration_is_refused(tmp_path: Path, given: Any) -> None:
    with pytest.raises(RequestError, match="it must be a SpeculativeConfig or None") as error:
        LLM(tmp_path, speculative=given)
    assert error.value.param == "speculative"


Draft = Callable[[list[int]], NDArray[np.float32]]


def sound(text: list[int]) -> NDArray[np.float32]:
    return np.stack([expected_logits([*text, row]) for row in range(SURE.block_size)])


def sound_but_unsure(text: list[int]) -> NDArray[np.float32]:
    """Its confidences are NaN."""
    return sound(text)


def reserved(text: list[int]) -> NDArray[np.float32]:
    """The last token has the embedding of all first tokens if it is one of them: none is used."""
    return sound([*text[:-1], max(text[-1], 105)])


def constant(_: list[int]) -> NDArray[np.float32]:
    return sound([1, 2, 3])


def one_token(text: list[int]) -> NDArray[np.float32]:
    """Always proposes token 7, but is not blind: a bad drafter may do so, and it is no bug."""
    logits = sound(text)
    logits[:, 7] = 100
    return logits


def trimmed_and_flat(_: list[int]) -> NDArray[np.float32]:
    logits = np.zeros((SURE.block_size, VOCAB), np.float32)
    logits[:, 100:] = -np.inf
    return logits


def with_value(value: float, row: Any, token: Any) -> Draft:
    def draft(text: list[int]) -> NDArray[np.float32]:
        logits = sound(text)
        logits[row, token] = value
        return logits

    return draft


@pytest.mark.parametrize(
    ("draft", "seen"),
    [
        (sound, None),
        (sound_but_unsure, r"confidences are not numbers \(NaN\)"),
        (reserved, None),
        (one_token, None),
        (with_value(-np.inf, slice(None), slice(0, VOCAB // 2)), None),  # a trimmed vocabulary
        (with_value(np.nan, 4, 17), r"not numbers \(NaN\)"),
        (with_value(np.inf, 0, 0), "infinite"),
        (with_value(-np.inf, 3, slice(None)), "infinite"),
        (with_value(0.0, slice(None), slice(None)), "all tokens equally likely"),
        (trimmed_and_flat, "all tokens equally likely"),
        (constant, "the same behind tokens 133 and 200"),
        (lambda text: sound(text[-1:]), "the same behind two different contexts"),
    ],
)
def test_a_drafter_that_says_nothing_is_refused(
    tmp_path: Path,
    fake_executors: list[FakeExecutor],
    monkeypatch: pytest.MonkeyPatch,
    draft: Draft,
    seen: str | None,
) -> None:
    confidences = np.full(SURE.block_size, 0.5, np.float32)
    if draft is sound_but_unsure:
        confidences[3] = np.nan

    def step(self: Session, token: int, *_: Any, **options: Any) -> Any:
        assert options == {"coupled": True, "wants_logits": True}
        return SimpleNamespace(logits=draft([*self.tokens, token]), confidences=confidences)

    monkeypatch.setattr(Session, "draft", step, raising=False)
    write_engine(tmp_path / "engine", draft=SURE)
    if seen is None:
        with LLM(tmp_path / "engine") as llm:
            assert llm.method == "dspark"
            assert llm.engine.states.num_free_slots == 3
        return
    with pytest.raises(EngineFormatError, match=f"nothing useful: .*{seen}") as error:
        LLM(tmp_path / "engine")
    assert "turn speculation off with method=none or rebuild with: " in str(error.value)
    assert fake_executors[0].is_closed
    with LLM(tmp_path / "engine", speculative=SpeculativeConfig("none")) as llm:
        assert llm.method == "none"


def test_the_self_test_fits_the_shortest_context(
    tmp_path: Path, fake_executors: list[FakeExecutor], monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = []

    def step(self: Session, token: int, *_: Any, **_options: Any) -> Any:
        lengths.append(self.length)
        return SimpleNamespace(logits=sound([*self.tokens, token]), confidences=None)

    monkeypatch.setattr(Session, "draft", step, raising=False)
    config = write_engine(tmp_path / "engine", draft=SURE)
    short = msgspec.structs.replace(config, max_seq_len=4)
    with Engine(tmp_path / "engine", short, FakeExecutor(short)) as engine:
        check_drafter(engine)
    assert lengths == [3, 3, 3]


def test_an_engine_without_a_verify_step_opens_and_does_not_draft(
    tmp_path: Path, fake_executors: list[FakeExecutor]
) -> None:
    steps = (StepSpec("decode", 1, 1), StepSpec("prefill64", 64, 1))
    write_engine(tmp_path / "engine", draft=SURE, steps=steps)
    with LLM(tmp_path / "engine") as llm:
        assert llm.method == "none"
    with pytest.raises(RequestError, match="need a verify step of 2"):
        LLM(tmp_path / "engine", speculative=SpeculativeConfig("dspark"))
    assert len(fake_executors) == 2
