"""Time what ranks exchange: all_reduce and allreduce_conv_mix in graphs with programmatic edges.

    python perf/kernels/ranks.py                     # ranks on GPUs 0 and 1
    python perf/kernels/ranks.py --devices 0,1,2,3
    python perf/kernels/ranks.py --rank-slice 0/2    # one GPU, which hears itself

A line for each kernel and width: us a launch, in a chain of launches of that kernel alone, whose
data stays in the L2. In front of them the exchange is compared with the reference once. Behind them
the output projection of a rank: alone, with the mix in launches one by one, and as a pair that
pushes. What a pair takes longer than the projection alone is the price of sum, convolution, mix and
norm.
"""

import argparse
import ctypes
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from rank_gpu import RankGpus, Value

from inkrt.builder.tactics import find_tactics
from inkrt.plugins.all_reduce.op import sum_in_rank_order
from inkrt.plugins.allreduce_conv_mix.pushed import with_own_scratch
from inkrt.plugins.tactic import (
    CallArgs,
    Float32,
    InputPointer,
    Int32,
    KernelLaunch,
    Output,
    Param,
    Peers,
    Pointer,
    Scratch,
    Tactic,
    TensorArg,
)
from inkrt.runtime.executor.peers import RankSlice, describe_error

CHAIN, RUNS = 200, 40
SOURCES, QUERIES = 4, 3
HEAD_VALUES = 6144  # of all ranks, which the output projection takes


class Memory:
    """Arguments, outputs and scratch of a rank, by the names of a tactic's parameters."""

    def __init__(self, gpus: RankGpus, rank: int, args: dict[str, Any], outputs: list[int]) -> None:
        self._gpus, self._rank = gpus, rank
        self.given = {
            (name, index): gpus.put(rank, item.view(torch.uint8).numpy())
            for name, value in args.items()
            for index, item in enumerate(value if isinstance(value, list) else [value])
            if isinstance(item, torch.Tensor)
        }
        self.outputs = [gpus.empty(rank, size) for size in outputs]
        self._scratch: dict[str, int] = {}

    def values(self, kernel: KernelLaunch) -> list[Value]:
        """What a kernel is given."""
        return [self._value(param) for param in kernel.params]

    def _value(self, param: Param) -> Value:
        if isinstance(param, Int32 | Float32):
            number = ctypes.c_int if isinstance(param, Int32) else ctypes.c_float
            return number(param.value)
        if isinstance(param, Output | Peers):
            own = self._gpus.tables[self._rank]
            return own if isinstance(param, Peers) else self.outputs[param.index]
        if isinstance(param, Scratch):
            return self._scratch_of(param)
        assert isinstance(param, Pointer | InputPointer)
        if isinstance(param, InputPointer):
            return self.given[param.name, 0]
        return self.given[param.argument, param.index]

    def _scratch_of(self, param: Scratch) -> int:
        if param.name == "error":
            return self._gpus.errors[self._rank]
        if param.name not in self._scratch:
            fill = 0 if param.fill is None else param.fill
            self._scratch[param.name] = self._gpus.empty(self._rank, param.num_bytes, fill)
        return self._scratch[param.name]


def say(line: str) -> None:
    """Tell a result."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def call_args(args: dict[str, Any]) -> CallArgs:
    """Arguments as tactics see them."""

    def arg(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return TensorArg(tuple(value.shape), value.dtype)
        return [arg(item) for item in value] if isinstance(value, list) else value

    return {name: arg(value) for name, value in args.items()}


def conv_mix_args(num_tokens: int, width: int, num_ranks: int, seed: int) -> dict[str, Any]:
    """Of allreduce_conv_mix in front of a full layer."""
    generator = torch.Generator().manual_seed(seed)

    def rows(dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(num_tokens, width, generator=generator).to(dtype)

    def one(value: int) -> torch.Tensor:
        return torch.tensor([value], dtype=torch.int32)

    return {
        "partial": rows(torch.float32 if num_ranks > 1 else torch.bfloat16),
        "conv_weight": torch.randn(width, 4, generator=generator),
        "conv_state": torch.zeros(1, 16, width, dtype=torch.bfloat16),
        "position": one(20), "num_tokens": one(num_tokens), "slot": one(0),
        "residual": rows(), "sources": [rows() for _ in range(SOURCES)],
        "queries": torch.randn(QUERIES, width, generator=generator),
        "norm_weights": [torch.ones(width, dtype=torch.bfloat16) for _ in range(QUERIES)],
        "mix_eps": 1e-6, "norm_eps": 1e-5, "residual_dtype": torch.bfloat16,
        "dtype": torch.bfloat16, "tp_size": num_ranks,
    }  # fmt: skip


def pair_args(num_tokens: int, width: int, num_ranks: int, seed: int) -> dict[str, Any]:
    """Of the output projection of a rank, and of the mix behind it."""
    generator = torch.Generator().manual_seed(100 + seed)
    own = HEAD_VALUES // num_ranks
    x = torch.randn(num_tokens, own, generator=generator).bfloat16()
    weight = (torch.randn(width, own, generator=generator) * own**-0.5).bfloat16()
    return {**conv_mix_args(num_tokens, width, num_ranks, 0), "x": x, "weight": weight}


def pairs(args: dict[str, Any]) -> dict[str, list[Tactic]]:
    """The product's first way alone, and with it both: launch by launch, and those that push."""
    product = {"x": args["x"], "weight": args["weight"], "partial": True}
    sender = find_tactics("linear", "sm_90a", call_args(product))[0]
    (first,) = sender.kernels
    partial: Param = Pointer("partial")
    params = tuple(partial if param == Output(0) else param for param in first.params)
    product_kernel = replace(first, params=params)
    alone, apart = [replace(sender, kernels=(product_kernel,))], []
    for mix in find_tactics("allreduce_conv_mix", "sm_90a", call_args(args)):
        kernels = (product_kernel, *map(with_own_scratch, mix.kernels))
        apart.append(replace(sender, name=f"{sender.name}, {mix.name}", kernels=kernels))
    pushed = find_tactics("linear_conv_mix", "sm_90a", call_args(args))
    pushed = [way for way in pushed if way.name.rpartition("_")[0] == sender.name]
    return {"alone": alone, "apart": apart, "pushed": pushed}


def packed(args: dict[str, Any], tactic: Tactic) -> dict[str, Any]:
    """The arguments with weights as the tactic reads them."""
    (packing,) = tactic.packings
    return args | {"weight": packing.pack(args["weight"])}


def time_tactic(gpus: RankGpus, memories: Sequence[Memory], tactic: Tactic) -> float:
    """Microseconds of a launch of the tactic."""
    graphs = [
        gpus.graph(rank, [(k, memory.values(k)) for k in tactic.kernels] * CHAIN)
        for rank, memory in enumerate(memories)
    ]
    gpus.replay(graphs, 4)
    us = gpus.replay(graphs, RUNS) / CHAIN
    for rank in range(gpus.num_ranks):
        if code := gpus.error(rank):
            raise SystemExit(describe_error(code))
    return us


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--devices", default="0,1", help="GPU of every rank")
    parser.add_argument("--rank-slice", metavar="R/N", help="one rank on the first of them")
    parser.add_argument("--tokens", default="1,8")
    parser.add_argument("--width", type=int, default=4608)
    options = parser.parse_args()
    devices = [int(number) for number in options.devices.split(",")]
    part = RankSlice.parse(options.rank_slice) if options.rank_slice else None
    num_ranks = part.num_ranks if part else len(devices)
    running = devices[:1] if part else devices
    widths = [int(number) for number in options.tokens.split(",")]
    gpus = RankGpus(running, 4 * max(widths) * options.width, part)
    say(f"{part or f'{num_ranks} ranks on GPUs {devices}'}; {CHAIN} launches a graph")
    for num_tokens in widths:
        rows = (num_tokens, options.width)
        parts = [torch.randn(rows, generator=torch.Generator().manual_seed(r)) for r in range(8)]
        args = {"x": parts[0], "dtype": torch.bfloat16, "tp_size": num_ranks}
        (tactic,) = find_tactics("all_reduce", "sm_90a", call_args(args))
        size = 2 * num_tokens * options.width
        memories = [
            Memory(gpus, rank, {**args, "x": parts[rank]}, [size]) for rank in range(len(running))
        ]
        us = time_tactic(gpus, memories, tactic)
        sent = [parts[0]] * num_ranks if part else parts[:num_ranks]
        expected = sum_in_rank_order(sent, torch.bfloat16).view(torch.uint8).numpy().reshape(-1)
        is_right = all(
            np.array_equal(gpus.get(rank, memory.outputs[0], size), expected)
            for rank, memory in enumerate(memories)
        )
        say(f"all_reduce T={num_tokens} D={options.width}: {us:.2f} us, right: {is_right}")
        if find_spec("inkrt.plugins.allreduce_conv_mix.tactics") is None:
            continue
        for ranks in (num_ranks, 1):
            of_rank = [
                conv_mix_args(num_tokens, options.width, ranks, seed)
                for seed in range(len(running))
            ]
            memories = [
                Memory(gpus, rank, each, [size, QUERIES * size])
                for rank, each in enumerate(of_rank)
            ]
            for tactic in find_tactics("allreduce_conv_mix", "sm_90a", call_args(of_rank[0])):
                us = time_tactic(gpus, memories, tactic)
                name = f"conv_mix T={num_tokens} D={options.width} tp {ranks} {tactic.name}"
                say(f"{name}: {us:.2f} us")
        of_rank = [
            pair_args(num_tokens, options.width, num_ranks, seed) for seed in range(len(running))
        ]
        ways = pairs(of_rank[0])
        memories = [
            Memory(gpus, rank, packed(each, ways["alone"][0]), [size, QUERIES * size])
            for rank, each in enumerate(of_rank)
        ]
        for kind, tactics in ways.items():
            for tactic in tactics:
                us = time_tactic(gpus, memories, tactic)
                say(f"linear+conv_mix T={num_tokens} {kind} {tactic.name}: {us:.2f} us")


if __name__ == "__main__":
    main()
