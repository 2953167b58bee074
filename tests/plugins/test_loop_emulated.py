"""Steps of a small looped Inkling-2, whole, on the CPU kernel by kernel, against the CPU engine."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "perf/kernels"), str(Path(__file__).parent / "cuda_on_cpu")]

from emulator import COMPILER, Emulator  # noqa: E402
from plan import PlanRunner, Recorder  # noqa: E402

from inkrt.builder import build  # noqa: E402
from inkrt.builder.checkpoint import open_checkpoint  # noqa: E402
from inkrt.builder.options import BuildOptions  # noqa: E402
from inkrt.runtime.engine import Engine  # noqa: E402
from inkrt.runtime.executor import Sampling  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(COMPILER is None, reason="needs g++ to compile kernels for the CPU"),
]
MODEL = ROOT / "engines/nano/checkpoint/config.json"
# Four layers, of which a sliding and a full one have a second visit.
LOOP = {
    "model_type": "inkling2_loop_text",
    "num_hidden_layers": 4,
    "layer_types": ["hybrid_sliding", "hybrid_sliding", "hybrid", "hybrid_sliding"],
    "n_layers_per_attn_res_block": 1,
    "loop_config": {"core_start": 1, "core_end": 3, "num_passes": 2, "gate_rank": 16},
}
STEPS = (("decode", [5]), ("verify2", [700, 33]), ("decode", [1234]))


def test_logits_are_those_of_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    published = json.loads(MODEL.read_text())
    config = {key: value for key, value in published.items() if not key.startswith("dspark")}
    (tmp_path / "config.json").write_text(json.dumps(config | LOOP))
    options = {"weights": "dummy", "max_verify_tokens": 2, "max_seq_len": 256}
    build.build_engine(tmp_path, tmp_path / "cpu", BuildOptions(**options))  # type: ignore[arg-type]
    recorder = Recorder("sm_90a")
    monkeypatch.setattr(build, "Compiler", lambda _target: recorder)
    monkeypatch.setattr(build, "compile_cubin", lambda *_: b"")
    for_gpu = BuildOptions(target="sm_90a", **options)  # type: ignore[arg-type]
    prepared = build.prepare(open_checkpoint(tmp_path), for_gpu)
    emulator = Emulator(tmp_path)
    runners = {
        name: PlanRunner(emulator, prepared, recorder, name) for name in ("decode", "verify2")
    }
    runners["verify2"].state = runners["decode"].state
    with Engine.open(tmp_path / "cpu") as engine, engine.session() as session:
        for step, tokens in STEPS:
            inputs = {
                "tokens": tokens, "position": [session.length], "num_tokens": [len(tokens)],
                "slot": [0], "page_table": range(4), "top_p": [1.0],
            }  # fmt: skip
            got = runners[step].run(inputs)
            expected = session.step(tokens, Sampling()).logits.astype(np.float64)
            # Sums in another order, in bfloat16; a wrong message, norm or state is off by more.
            error = np.linalg.norm(got - expected) / np.linalg.norm(expected)
            assert error <= 3e-2, (step, error)
