"""Times of the kernels of `moe` at the sizes of Inkling-2, each beside its floor. Needs an H200.

    python perf/kernels/moe.py [--formats nvfp4 mxfp8 bf16] [--tokens 1 2 4 8] [--tp 4 2] [--phases]
        [--most-stages 8] [--tactics moe_beside_words ...]

A line is a graph of launches with programmatic edges, each on other tokens, so that experts come
from device memory; router weights rotate. "spaced" is the same with a launch of nine small blocks
in front of each, beside which a router's weights can come as they do in a step; the first line says
what such launches take alone. Floors are the bytes of the experts that these tokens chose over
4.55 TB/s. `--phases` adds where a block of the experts is when, behind its wait: the median over
blocks and the latest, of clocks that kernels of the same code with TRACE write in the last launch
of a chain. They take a little longer. "asked" is where scores and rows are on their way, "routed"
where the first weights' addresses are known, "requested" where all copies of the first warp's first
stages have been taken, which they are when others make room. `--most-stages` caps the stages that a
warp has on their way.
"""

import argparse
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from w4a16_backend import Buffer, bind
from w4a16_gpu import Gpu, cubin, time_graph

from inkrt.plugins.moe import variants as moe_variants
from inkrt.plugins.moe.packing import VECTOR_BYTES, Format, num_bytes
from inkrt.plugins.moe.sizes import MoeDims
from inkrt.plugins.moe.tactics import moe
from inkrt.plugins.moe.variants import variants
from inkrt.plugins.tactic import KernelLaunch, Output, Scratch, Tactic

HIDDEN, WIDTH, EXPERTS, TOP_K = 4608, 2304, 384, 8
LAUNCHES = 16
BYTES_PER_US = 4.55e6
RANK = 1
# Events of experts.cu, as its MARKs number them; all but the barriers are those of the first warp.
PHASES = (
    "ready", "waited", "asked", "routed", "requested", "z here", "gate/up done", "met",
    "hidden here", "down done", "block done", "out",
)  # fmt: skip
SPACER = KernelLaunch(
    source=Path(__file__).parent / "spacer.cu",
    entry="spacer",
    defines=(),
    grid=(9, 1, 1),
    block=(128, 1, 1),
    params=(Output(0),),
    smem_bytes=0,
)
CLOCKS_PER_US = 1800.0  # of an H200 whose tensor cores work


def dims_of(kind: Format, split: str, tp_size: int) -> MoeDims:
    """Sizes of one rank."""
    by_width = split == "width"
    return MoeDims(
        hidden=HIDDEN,
        width=WIDTH // tp_size if by_width else WIDTH,
        experts=EXPERTS,
        own_experts=EXPERTS if by_width else EXPERTS // tp_size,
        top_k=TOP_K,
        kind=kind,
    )


def tactics_of(dims: MoeDims, num_tokens: int, names: list[str] | None) -> list[Tactic]:
    """The operator's tactics for a rank's part, those of `names` if there are any."""
    return [
        moe(
            dims,
            num_tokens,
            route_scale=8.0,
            gate_cap=4.0,
            up_cap=25.0,
            is_partial=True,
            has_rank=dims.own_experts < dims.experts,
            variant=variant,
        )
        for variant in variants(dims, num_tokens)
        if not names or variant.name in names
    ]


def traced(tactic: Tactic) -> Tactic:
    """The same with clocks in the scratch `trace`, [block][event]."""
    *router, experts = tactic.kernels
    trace = Scratch("trace", experts.grid[0] * len(PHASES) * 8, fill=0)
    defines = (*experts.defines, ("TRACE", len(PHASES)))
    experts = replace(experts, defines=defines, params=(*experts.params, trace))
    return replace(tactic, kernels=(*router, experts))


Launches = list[Callable[[], None]]


class Layer:
    """Weights of one rank's experts, routers and inputs of every launch."""

    def __init__(self, gpu: Gpu, dims: MoeDims) -> None:
        torch.manual_seed(1)
        self.gpu, self.dims = gpu, dims
        self.spacer = gpu.prepare(SPACER, [gpu.buffer(torch.zeros(9, device="cuda"))])
        self.x = [torch.randn(8, HIDDEN, device="cuda").bfloat16() for _ in range(LAUNCHES)]
        weight = torch.randn(EXPERTS, HIDDEN, device="cuda") * HIDDEN**-0.5
        self.routers = [weight.clone() for _ in range(LAUNCHES)]
        own, kind = dims.own_experts, dims.kind
        self.weights = {
            "gate_up": self._random(num_bytes(kind, own, 2 * dims.width, HIDDEN)),
            "down": self._random(num_bytes(kind, own, HIDDEN, dims.width)),
            "gate_up_global_scale": gpu.buffer(torch.full((own,), 0.004, device="cuda")),
            "down_global_scale": gpu.buffer(torch.full((own,), 0.004, device="cuda")),
            "router_bias": gpu.buffer(torch.zeros(EXPERTS, device="cuda")),
            "rank": gpu.buffer(torch.tensor([RANK], dtype=torch.int32, device="cuda")),
        }

    def _random(self, size: int) -> Buffer:
        data = torch.randint(0, 256, (size,), dtype=torch.uint8, device="cuda")
        vectors = data.view(-1, VECTOR_BYTES[self.dims.kind])
        if self.dims.kind == "nvfp4":  # scales in [0.5, 2)
            vectors[:, 512:].bitwise_and_(0x0F).add_(0xA8)
        elif self.dims.kind == "mxfp8":  # values of some 0.01
            vectors[:, 1024:].bitwise_and_(1).add_(226)
        else:  # bits of values in +-[2^-7, 1)
            data.view(-1, 2)[:, 1] = (data.view(-1, 2)[:, 1] & 0x83) | 0x3C
        return self.gpu.buffer(data)

    def distinct(self, num_tokens: int) -> float:
        """This rank's experts that a launch reads, in the mean."""
        counts = []
        for x in self.x:
            scores = x[:num_tokens].float() @ self.routers[0].T
            chosen = set(torch.topk(scores, TOP_K, dim=-1).indices.flatten().tolist())
            first = RANK * self.dims.own_experts if self.dims.own_experts < EXPERTS else 0
            counts.append(len(chosen & set(range(first, first + self.dims.own_experts))))
        return sum(counts) / len(counts)

    def phases(self, tactic: Tactic) -> str:
        """When the experts' blocks are where, in us behind their wait: "event median (latest)"."""
        chain, _, _, scratch = self._chain(traced(tactic))
        _time(chain, replays=3)
        stamps = self.gpu.download(scratch["trace"]).view("int64").reshape(-1, len(PHASES))
        behind = (stamps - stamps[:, 1:2]) / CLOCKS_PER_US
        median, latest = np.median(behind, axis=0), behind.max(axis=0)
        return ", ".join(
            f"{name} {median[i]:.1f} ({latest[i]:.1f})" for i, name in enumerate(PHASES)
        )

    def times(self, tactic: Tactic) -> tuple[float, float, float, float]:
        """Microseconds of all kernels, spaced and not, of the router (if any) and the experts."""
        chain, router, experts, scratch = self._chain(tactic)
        per_launch = len(chain) // LAUNCHES
        spaced = [
            launch
            for first in range(0, len(chain), per_launch)
            for launch in (self.spacer, *chain[first : first + per_launch])
        ]
        alone = (_time(router), _time(experts)) if router else (0.0, 0.0)
        result = _time(spaced), _time(chain), *alone
        if self.gpu.download(scratch["error"]).any():
            sys.exit(f"{tactic.name}: a kernel gave up waiting")
        return result

    def _chain(self, tactic: Tactic) -> tuple[Launches, Launches, Launches, dict[str, Buffer]]:
        """Launches as they follow each other, of the router, of the experts, and their scratch."""
        out = self.gpu.buffer(torch.empty(8, HIDDEN, device="cuda"))
        common: dict[str, Buffer] = {}
        chain: Launches = []
        router: Launches = []
        experts: Launches = []
        for number in range(LAUNCHES):
            arguments = {
                **self.weights,
                "x": self.gpu.buffer(self.x[number]),
                "router_weight": self.gpu.buffer(self.routers[number]),
            }
            scratch = {name: buffer for name, buffer in common.items() if name != "scores"}
            bound = bind(self.gpu, tactic, arguments, [out], scratch)
            common = scratch
            launches = [self.gpu.prepare(b.kernel, b.values) for b in bound]
            chain += launches
            router += launches[:-1]
            experts.append(launches[-1])
        for launch in chain:  # so that there are scores
            launch()
        return chain, router, experts, common


def _time(launches: Launches, replays: int = 20) -> float:
    """Microseconds of one of LAUNCHES."""

    def body() -> None:
        for launch in launches:
            launch()

    return time_graph(body, replays=replays) / LAUNCHES


def main() -> None:
    """Print a line for every format, split and width."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--formats", nargs="+", default=["nvfp4", "mxfp8", "bf16"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 2, 4, 8])
    parser.add_argument("--tp", nargs="+", type=int, default=[4, 2])
    parser.add_argument("--splits", nargs="+", default=["width", "experts"])
    parser.add_argument("--phases", action="store_true")
    parser.add_argument("--most-stages", type=int, default=moe_variants.MOST_STAGES)
    parser.add_argument("--tactics", nargs="+", help="names; all if there are none")
    parser.add_argument("--cubins", type=Path, default=Path("/tmp/ink-cubins"))
    args = parser.parse_args()
    moe_variants.MOST_STAGES = args.most_stages
    gpu = Gpu(args.cubins)
    ranks = [dims_of(k, s, tp) for k in args.formats for tp in args.tp for s in args.splits]
    kernels = [
        kernel
        for dims in ranks
        for num_tokens in args.tokens
        for tactic in tactics_of(dims, num_tokens, args.tactics)
        for kernel in tactic.kernels + (traced(tactic).kernels[-1:] if args.phases else ())
    ]
    distinct = list({(k.source, k.defines): replace(k) for k in kernels}.values())
    cubin(args.cubins, distinct[0])  # imports cuda.core, which threads must not do at once
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda kernel: cubin(args.cubins, kernel), distinct[1:]))
    _say(
        "format tp split   T  experts    MB | spaced  moe us  floor |"
        "  router  floor | experts  floor"
    )
    spacer = gpu.prepare(SPACER, [gpu.buffer(torch.zeros(9, device="cuda"))])
    _say(f"a launch of nine blocks: {_time([spacer] * LAUNCHES):.2f} us")
    router_floor = EXPERTS * HIDDEN * 4 / BYTES_PER_US
    for dims in ranks:
        layer = Layer(gpu, dims)
        split = "width" if dims.own_experts == EXPERTS else "experts"
        tp_size = WIDTH // dims.width if split == "width" else EXPERTS // dims.own_experts
        for num_tokens in args.tokens:
            chosen = layer.distinct(num_tokens)
            size = chosen * dims.expert_bytes
            floor = size / BYTES_PER_US
            for tactic in tactics_of(dims, num_tokens, args.tactics):
                spaced, both, router, experts = layer.times(tactic)
                _say(
                    f"{dims.kind:6} {tp_size:2} {split:7} {num_tokens} {chosen:8.1f}"
                    f" {size / 1e6:5.0f} | {spaced:6.1f} {both:7.1f} {floor + router_floor:6.1f} |"
                    f" {router:7.2f} {router_floor:6.2f} | {experts:7.1f} {floor:6.1f}"
                    f"  {tactic.name}"
                )
                if args.phases:
                    _say(f"    {layer.phases(tactic)}")
        del layer
        torch.cuda.empty_cache()


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
