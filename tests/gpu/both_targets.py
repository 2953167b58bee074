"""A small Flint as engines of both targets, and how far the GPU may be from the CPU.

The engines are built from a configuration alone: dummy weights of small tensors have the same
values on every target.
"""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from flint_config import CONFIG

from inkrt.builder.build import build_engine
from inkrt.builder.options import BuildOptions
from inkrt.commands.launch_parity import LaunchDistance
from inkrt.runtime.engine import Engine
from inkrt.runtime.executor import Sampling

# Launches and logits of a bf16 model that adds in other orders: on this random one, measured on an
# H200, 1e-2 a launch in front of the first experts and 1.8e-2 of the logits on average. Where two
# experts are as good as each other, rounding decides: a row of logits is then off by up to 0.11,
# the experts' own output in that layer by up to 0.21. A wrong scale, sign or row is off by about 1.
NEAR = 2e-2
TYPICAL = 3e-2
FLIPPED = 0.15
FLIPPED_LAUNCH = 0.5


@contextlib.contextmanager
def open_both(folder: Path, dtype: str, chunk: int) -> Iterator[dict[str, Engine]]:
    """Build and open an engine for each target, in "nvfp4" or "bf16", by target."""
    config = dict(CONFIG)
    if dtype == "nvfp4":
        config["quantization_config"] = {"quant_method": "nvfp4"}
    (folder / "config.json").write_text(json.dumps(config))
    with contextlib.ExitStack() as opened:
        engines = {}
        for target in ("cpu", "sm_90a"):
            options = BuildOptions(
                target=target, weights="dummy", max_batch_size=2, prefill_chunk=chunk,
                keep_intermediates=True,
            )  # fmt: skip
            build_engine(folder, folder / target, options)
            engines[target] = opened.enter_context(Engine.open(folder / target))
        yield engines


def make_prompt(length: int, seed: int = 37) -> list[int]:
    """Tokens that do not repeat soon."""
    return [(seed * i + i * i) % 1000 for i in range(length)]


def relative_error(ours: np.ndarray, reference: np.ndarray) -> float:
    """||ours - reference|| / ||reference||."""
    return float(np.linalg.norm(ours - reference) / np.linalg.norm(reference))


def check_launches(distances: list[LaunchDistance], least: int) -> None:
    """More than `least` launches in front of the first experts are near, and all within bounds."""
    first_moe = next(d.launch for d in distances if d.op == "flint_moe")
    in_front = [d for d in distances if d.launch < first_moe]
    assert len(in_front) > least
    assert all(distance.relative_error <= NEAR for distance in in_front), in_front
    worst = max(distances, key=lambda distance: distance.relative_error)
    assert worst.relative_error <= FLIPPED_LAUNCH, worst


def check_rows_alike(engine: Engine, tokens: list[int]) -> None:
    """Logits of steps of all widths, behind rejected drafts, have the bits of single tokens."""
    with engine.session() as plain, engine.session() as wide:
        rows = [plain.step([token], Sampling()).logits[0] for token in tokens]
        position, width = 0, 1
        while position < len(tokens):
            piece = tokens[position : position + width]
            drafts = piece + [999] * (3 if len(piece) <= 5 else 0)
            output = wide.step(drafts, Sampling())
            for row in range(len(piece)):
                np.testing.assert_array_equal(output.logits[row], rows[position + row])
            position += len(piece)
            wide.rollback(position)
            width = width % 8 + 1


def check_decode_loop(engine: Engine, prompt: list[int]) -> None:
    """A decode step that feeds itself gives the tokens of single steps."""
    with engine.session() as session:
        token = int(session.prefill(prompt, Sampling()).tokens[-1])
        expected = []
        for _ in range(100):
            expected.append(int(session.step([token], Sampling()).tokens[-1]))
            token = expected[-1]
    with engine.session() as session:
        token = int(session.prefill(prompt, Sampling()).tokens[-1])
        for num_more in reversed(range(100)):
            token = session.decode(token, Sampling(), num_more=num_more)
            assert token == expected[99 - num_more]
