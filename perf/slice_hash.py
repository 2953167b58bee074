"""Proof that width does not matter to a rank of a full-size engine: every launch, row by row.

    python perf/slice_hash.py ENGINE --rank-slice 0/4 [--contexts 8192,100000] [--width 8]

A rank slice gives no tokens (its collectives are looped back, and its weights may be dummies), but
its rows must not depend on how many there are. Decode steps run one launch after the other on the
same tokens as a verify step, behind a context of small numbers, and what every launch writes for a
token must have the same bits in both. Then both steps run as graphs, whose kernels overlap, and
must give the logits of the launches one by one. Prints a sha256 over all outputs of either; status
1 if any differ. Also runs an engine of one rank (without --rank-slice).
"""

import argparse
import hashlib
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from inkrt.commands.bench_step import step_input_of
from inkrt.runtime.engine import Engine
from inkrt.runtime.engine_file import EngineConfig
from inkrt.runtime.executor import StepInput
from inkrt.runtime.executor.cuda import CudaExecutor
from inkrt.runtime.plan import Launch, Plan

# By launch and output: bytes of every token's row, [tokens, bytes].
Rows = list[list[NDArray[np.uint8]]]


def main() -> int:
    """Compare at every context; 1 if anything differs."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("engine", type=Path)
    parser.add_argument("--rank-slice", metavar="R/N")
    parser.add_argument("--contexts", default="8192")
    parser.add_argument("--width", type=int, default=8, help="tokens of the verify step")
    options = parser.parse_args()
    is_equal = True
    with Engine.open(options.engine, rank_slice=options.rank_slice) as engine:
        executor = engine.executor
        assert isinstance(executor, CudaExecutor), "the engine is not for a GPU"
        executor.fill_state(0x3C)
        for context in map(int, options.contexts.split(",")):
            started = time.monotonic()
            lines, differences = compare(executor, engine.config, context, options.width)
            is_equal &= not differences
            seconds = time.monotonic() - started
            say(f"context {context}, {executor.device_name}, {seconds:.1f} s")
            say("\n".join(lines + differences[:8]))
    return int(not is_equal)


def compare(
    executor: CudaExecutor, config: EngineConfig, context: int, width: int
) -> tuple[list[str], list[str]]:
    """Lines for people, and what differs between one token at a time and `width` at once."""
    name = f"verify{width}"
    step = next(step for step in config.steps if step.name == name)
    narrow, wide = executor.plan("decode"), executor.plan(name)
    axes = token_axes(narrow, wide)
    together = step_input_of(config, step, context)
    rows_of_tokens, logits_of_graphs = [], []
    for place, token in enumerate(together.tokens):
        alone = StepInput([token], context + place, 0, together.pages, together.sampling)
        rows_of_tokens.append(launch_rows(executor, narrow, alone, axes))
        logits_of_graphs.append(graph_logits(executor, narrow, alone))
    one_by_one = joined(rows_of_tokens)
    at_once = launch_rows(executor, wide, together, axes)
    found = differences(wide.launches, one_by_one, at_once)
    graph_of_wide = graph_logits(executor, wide, together)
    logits = at_once[-1][wide.launches[-1].outputs.index(wide.outputs["logits"])]
    for text, of_graph in (("T=1", np.concatenate(logits_of_graphs)), (name, graph_of_wide)):
        if not np.array_equal(of_graph, logits):
            found.append(f"UNEQUAL: logits of the graph of {text} and of its launches one by one")
    values = logits.view(np.float32)
    num_values, num_nan = len(np.unique(values[-1])), int(np.isnan(values).sum())
    lines = [
        f"{len(wide.launches)} launches, {num_values} different logits in the last row, "
        f"{num_nan} NaN",
        f"T=1  {digest(one_by_one)}",
        f"T={width}  {digest(at_once)}  {'equal' if not found else 'UNEQUAL'}",
    ]
    return lines, found


def token_axes(narrow: Plan, wide: Plan) -> list[list[int]]:
    """By launch and output of two plans: the axis that counts tokens, where their shapes differ."""
    axes = []
    for one, many in zip(narrow.launches, wide.launches, strict=True):
        assert one.op == many.op, f"{one.op} stands where the other step has {many.op}"
        of_launch = []
        for a, b in zip(one.outputs, many.outputs, strict=True):
            pairs = list(zip(narrow.tensors[a].shape, wide.tensors[b].shape, strict=True))
            (axis,) = (place for place, (x, y) in enumerate(pairs) if x != y)
            assert pairs[axis] == (narrow.num_tokens, wide.num_tokens), f"{one.op}: {pairs}"
            of_launch.append(axis)
        axes.append(of_launch)
    return axes


def launch_rows(
    executor: CudaExecutor, plan: Plan, step_input: StepInput, axes: Sequence[Sequence[int]]
) -> Rows:
    """What every launch of a step writes, read before the next one runs."""
    executor.send_inputs(step_input)
    rank, rows = executor.ranks[0], []
    for number, (launch, of_launch) in enumerate(zip(plan.launches, axes, strict=True)):
        alone = msgspec.structs.replace(plan, launches=plan.launches[number : number + 1])
        rank.capture(alone).launch(rank.stream)
        rank.require_sound()
        rows.append(
            [
                rows_of(plan, index, axis, executor.read(plan.name, index))
                for index, axis in zip(launch.outputs, of_launch, strict=True)
            ]
        )
    return rows


def graph_logits(executor: CudaExecutor, plan: Plan, step_input: StepInput) -> NDArray[np.uint8]:
    """Bytes of the logits that a step's graph gives, by row."""
    executor.send_inputs(step_input)
    executor.ranks[0].launch(plan.name)
    executor.ranks[0].require_sound()
    index = plan.outputs["logits"]
    return rows_of(plan, index, 0, executor.read(plan.name, index))


def rows_of(plan: Plan, index: int, axis: int, data: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Bytes of a tensor by token, [tokens, bytes]; `axis` counts its tokens."""
    whole = data.reshape(*plan.tensors[index].shape, -1)
    return np.ascontiguousarray(np.moveaxis(whole, axis, 0)).reshape(plan.num_tokens, -1)


def joined(rows_of_tokens: Sequence[Rows]) -> Rows:
    """Rows of several steps of one token as those of one step."""
    return [
        [np.concatenate(parts) for parts in zip(*of_launch, strict=True)]
        for of_launch in zip(*rows_of_tokens, strict=True)
    ]


def differences(launches: Sequence[Launch], one: Rows, other: Rows) -> list[str]:
    """A line for every launch and row that differ, in the order of the step."""
    return [
        f"UNEQUAL: launch {number}, {launch.op} ({launch.tactic}) of {launch.module or '-'}, "
        f"output {output}, token {token}: {int((a[token] != b[token]).sum())} bytes"
        for number, (launch, of_one, of_other) in enumerate(zip(launches, one, other, strict=True))
        for output, (a, b) in enumerate(zip(of_one, of_other, strict=True))
        for token in range(len(a))
        if not np.array_equal(a[token], b[token])
    ]


def digest(rows: Rows) -> str:
    """One sha256 over everything."""
    whole = hashlib.sha256()
    for of_launch in rows:
        for data in of_launch:
            whole.update(np.ascontiguousarray(data))
    return whole.hexdigest()


def say(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    raise SystemExit(main())
