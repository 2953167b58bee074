"""Logits of engines against the reference implementation, over prompt lengths and chunkings."""

import pytest
import torch
from test_verify import verify, verify_changed

from inkrt.commands.parity import ParityCheck, PromptReport, Reference
from inkrt.engines.interface import EXACT_PARITY
from inkrt.runtime.engine import Engine

WINDOW = 22
# Chunks 1, 3, 4 and 7 take decode and verify steps, the others prefill steps, full and padded.
QUICK = [
    (1, None), (2, 1), (3, None), (5, 3), (WINDOW - 1, 4), (WINDOW, None), (WINDOW + 1, 7),
    (3 * WINDOW + 2, None), (7 * WINDOW, 64),
]  # fmt: skip
LENGTHS = (1, 2, 3, 5, WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW + 2, 7 * WINDOW)
ALL = [(length, chunk) for length in LENGTHS for chunk in (1, 3, 4, 7, 64, None)]


# All layers in bfloat16, where every bit has to agree. In float32 the five sliding layers and the
# full one that modules share the engine of.
ENGINES = {"bfloat16": {"max_verify_tokens": 3}, "float32": {"num_layers": 6, "max_batch_size": 8}}


@pytest.fixture(scope="module", params=ENGINES)
def check(request, make_checkpoint, make_engine):
    dtype, options = request.param, ENGINES[request.param]
    checkpoint = make_checkpoint(dtype, options.get("num_layers", 14))
    with Engine.open(make_engine(dtype, **options)) as engine:
        yield ParityCheck(engine, Reference(checkpoint, dtype))


def _run(check: ParityCheck, length: int, chunk: int | None, num_decoded: int) -> PromptReport:
    generator = torch.Generator().manual_seed(length)
    vocab_size = check.engine.config.model.vocab_size
    prompt = torch.randint(vocab_size, (length,), generator=generator).tolist()
    return check.run(prompt, chunk, num_decoded)


def _require_parity(check: ParityCheck, report: PromptReport) -> None:
    dtype = check.engine.config.model.dtype
    assert report.max_relative_error <= EXACT_PARITY[dtype].relative_error
    assert report.top1_agreement == 1
    # The order of additions is the same in steps of one row, and in bfloat16 the roundings hide
    # what differs in padded prefill steps.
    if dtype == "bfloat16" or report.chunk in (1, 3, 4, 7):
        assert report.equal_rows == 1
        assert report.first_divergence is None


@pytest.mark.parametrize(("length", "chunk"), QUICK)
def test_prompt_and_a_few_tokens(check, length, chunk):
    _require_parity(check, _run(check, length, chunk, num_decoded=2))


def test_decodes_64_tokens_across_windows(check):
    _require_parity(check, _run(check, 2 * WINDOW + 3, None, num_decoded=64))


@pytest.mark.slow
@pytest.mark.parametrize(("length", "chunk"), ALL)
def test_every_length_in_every_chunking(check, length, chunk):
    _require_parity(check, _run(check, length, chunk, num_decoded=64))


def test_a_wrong_weight_is_found_in_its_layer(check):
    weight = check.engine.executor._ranks[0].weights["layers.3.mlp.down"]
    kept = weight.clone()
    try:
        weight *= 1.5
        report = _run(check, 5, None, num_decoded=0)
    finally:
        weight.copy_(kept)
    assert report.equal_rows == 0
    assert report.first_divergence == (0, 3)


def test_equal_rows_need_no_float32(make_checkpoint, make_engine, monkeypatch):
    monkeypatch.setattr("inkrt.commands.rounding.compare_with_float32", None)  # not to be called
    options = "--lengths 5 --chunks 3 --decode 2"
    engine = make_engine("bfloat16", **ENGINES["bfloat16"])
    result = verify(engine, make_checkpoint("bfloat16"), options)
    assert result.exit_code == 0, result.output
    assert "3 rows: worst relative error 0.00e+00, worst top-1 100.00%\n" in result.output


def test_float32_engines_have_the_bound_alone(make_checkpoint, make_engine, monkeypatch):
    def change(engine: Engine):
        engine.executor._ranks[0].weights["layers.3.mlp.down"].mul_(1.0001)

    monkeypatch.setattr("inkrt.commands.rounding.compare_with_float32", None)  # not to be called
    folders = make_engine("float32", **ENGINES["float32"]), make_checkpoint("float32", 6)
    result = verify_changed(monkeypatch, change, *folders, "--lengths 5 --chunks 0 --decode 2")
    assert result.exit_code == 1, result.output
    assert "bound 2e-06, top-1 at least 100%\n" in result.output
    assert "parity failed; 3 rows" in result.output
    assert "float32 as" not in result.output
    assert "worst top-1 100.00%\n" in result.output
