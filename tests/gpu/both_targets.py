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
