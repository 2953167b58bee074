"""Prefill steps of a small Flint on the GPU: launches and logits against the CPU, and each other.

Chunks of 128 beside a window of 513: a ring of 640 rows, which is ten pages.
"""

import json

import numpy as np
import pytest
from both_targets import (
    FLIPPED,
    TYPICAL,
    check_launches,
    make_prompt,
    open_both,
    relative_error,
)

from inkrt.builder.build import build_engine
from inkrt.builder.options import BuildOptions
from inkrt.commands.launch_parity import compare_launches
from inkrt.runtime.engine import Engine
from inkrt.runtime.executor import Sampling

pytestmark = pytest.mark.gpu

CHUNK = 128


@pytest.fixture(scope="module", params=["nvfp4", "bf16"])
def engines(request, gpu, tmp_path_factory):
    with open_both(tmp_path_factory.mktemp(request.param), request.param, CHUNK) as opened:
        yield opened


@pytest.mark.parametrize(("before", "count"), [(0, 9), (0, 128), (600, 100), (1234, 128)])
def test_every_launch_is_near_the_cpu(engines, before, count):
    """The first chunk; one over a page's end; one through the ring's end, seeing whole windows."""
    prompt = make_prompt(before + count)
    distances = compare_launches(
        engines["cpu"], engines["sm_90a"], prompt[before:], before=prompt[:before]
    )
    check_launches(distances, 10)


@pytest.mark.parametrize("length", [9, 64, 129, 700, 1300])
def test_logits_equal_those_of_the_cpu_and_decode_goes_on(engines, length):
    prompt = make_prompt(length)
    errors = []
    with engines["cpu"].session() as cpu, engines["sm_90a"].session() as gpu:
        expected, got = (session.prefill(prompt, Sampling()) for session in (cpu, gpu))
        for _ in range(12):
            a, b = got.logits[-1].astype(np.float64), expected.logits[-1].astype(np.float64)
            errors.append(relative_error(a, b))
            assert int(got.tokens[-1]) == int(a.argmax())
            best = np.sort(b)[-2:]
            is_clear = best[1] - best[0] > 2 * np.abs(a - b).max()
            assert not is_clear or int(a.argmax()) == int(b.argmax())
            token = int(expected.tokens[-1])
            expected, got = (session.step([token], Sampling()) for session in (cpu, gpu))
    assert np.median(errors) <= TYPICAL, errors
    assert max(errors) <= FLIPPED, errors


def test_bits_do_not_depend_on_the_chunks(engines):
    """Full and padded chunks that begin anywhere, in slots and pages used before."""
    prompt = make_prompt(909)  # no chunk below leaves so few tokens that a verify step takes them
    with engines["sm_90a"].session() as one, engines["sm_90a"].session() as other:
        for session in (one, other):
            session.prefill(make_prompt(700, seed=11), Sampling())
            session.rollback(0)
        rows = {}
        for chunk in (128, 100, 75, 9):
            with_chunk = one if chunk != 100 else other
            with_chunk.rollback(0)
            pieces = [with_chunk.prefill(prompt, Sampling(), chunk=chunk).logits[0]]
            pieces += [with_chunk.step([7, 8, 9], Sampling()).logits]
            rows[chunk] = np.vstack(pieces)
        assert np.isfinite(rows[128]).all()
        assert len(np.unique(rows[128])) > 500
        for chunk in (100, 75, 9):
            np.testing.assert_array_equal(rows[chunk], rows[128])


def test_a_padded_chunk_writes_no_state_but_its_own(engines):
    """Sessions whose chunks take turns give what each gives alone."""
    prompt = make_prompt(660)
    sessions = [engines["sm_90a"].session() for _ in range(2)]
    with sessions[0] as alone:
        expected = [alone.prefill(prompt[i : i + 60], Sampling()).logits for i in range(0, 660, 60)]
        expected += [alone.step([3], Sampling()).logits]
        alone.rollback(0)
        with sessions[1] as beside:
            got = []
            for i in range(0, 660, 60):
                got.append(alone.prefill(prompt[i : i + 60], Sampling()).logits)
                beside.prefill(make_prompt(21, seed=i + 1), Sampling())
            got += [alone.step([3], Sampling()).logits]
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_array_equal(a, b)


def test_what_a_rolled_back_chunk_wrote_is_forgotten(engines):
    prompt = make_prompt(240)
    with engines["sm_90a"].session() as session:
        session.prefill(prompt[:140], Sampling())
        expected = session.prefill(prompt[140:], Sampling()).logits
        session.rollback(0)
        session.prefill(prompt[:140] + [999] * 12, Sampling())
        session.rollback(140)
        np.testing.assert_array_equal(session.prefill(prompt[140:], Sampling()).logits, expected)


@pytest.fixture(scope="module", params=["nvfp4", "bf16"])
def full_size(request, gpu, tmp_path_factory):
    """Six layers of the model's sizes: dense and full, sliding and full with experts."""
    folder = tmp_path_factory.mktemp(f"full-{request.param}")
    config = {"model_type": "flint", "dtype": "bfloat16", "vocab_size": 1000}
    config |= {"num_hidden_layers": 6, "max_position_embeddings": 4096}
    if request.param == "nvfp4":
        config["quantization_config"] = {"quant_method": "nvfp4"}
    (folder / "config.json").write_text(json.dumps(config))
    options = BuildOptions(target="sm_90a", weights="dummy", max_batch_size=2)
    build_engine(folder, folder / "engine", options)
    opened = Engine.open(folder / "engine")
    yield opened
    opened.close()


@pytest.mark.parametrize("length", [9, 300, 512, 1500])
def test_the_models_sizes_are_near_narrow_steps(full_size, length):
    """Those are compared with the CPU elsewhere; 1500 tokens wrap the ring of 1024."""
    prompt = make_prompt(length)
    errors = []
    with full_size.session() as wide, full_size.session() as narrow:
        got = wide.prefill(prompt, Sampling())
        expected = narrow.prefill(prompt, Sampling(), chunk=8)
        for _ in range(8):
            a, b = got.logits[-1].astype(np.float64), expected.logits[-1].astype(np.float64)
            errors.append(relative_error(a, b))
            token = int(expected.tokens[-1])
            got, expected = (session.step([token], Sampling()) for session in (wide, narrow))
    assert np.median(errors) <= TYPICAL, errors
    assert max(errors) <= FLIPPED, errors
