"""Runner of the drafter's kernels on a GPU: checks against the references and times, as JSON lines.

    PYTHONPATH=. python perf/kernels/draft.py --compile     (no GPU: fills the cubin folder)
    PYTHONPATH=. python perf/kernels/draft.py --check [--verbose]
    PYTHONPATH=. python perf/kernels/draft.py --time

Times are of a chain of launches in a graph: five layers of `draft_attention`, each with a cache of
its own, and one whole `draft_head`, at the full size of Inkling-2-Small (its hidden rows,
vocabulary and heads; the drafter's sizes are those published for others). A floor is bytes over
4.55 TB/s; `table_us` is that of the second table, once. Exit status 1: a check failed.
"""

import argparse
import sys
from pathlib import Path

import torch
from draft_checks import call_args, check_attention, check_head
from records import Tally, emit
from w4a16_backend import Buffer, bind, empty

from inkrt.builder.tactics import find_tactics
from inkrt.plugins.caseutil import int32
from inkrt.plugins.registry import Arguments
from inkrt.plugins.sample.op import sampling_arguments
from inkrt.plugins.tactic import Tactic

TB_PER_S = 4.55
LAYERS, ROWS, HEADS, KV_HEADS, DIM = 5, 7, 48, 8, 128
HIDDEN, RANK, VOCAB = 4608, 256, 200_058
CONTEXTS = (8_192, 100_000)
REQUESTS: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0},
    "temperature 1": {"temperature": 1.0, "seed": 3},
    "top-k 50, top-p 0.9": {"temperature": 1.0, "top_k": 50, "top_p": 0.9, "seed": 3},
}


def _attention(context: int, device: str) -> Arguments:
    """Arguments of one layer; the pages stand in falling order."""
    pages = -(-context // 64)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, dtype=torch.bfloat16)

    return {
        "q": normal(ROWS, HEADS, DIM),
        "k": normal(ROWS, KV_HEADS, DIM),
        "v": normal(ROWS, KV_HEADS, DIM),
        "sinks": None,
        "k_cache": normal(pages, 64, KV_HEADS, DIM),
        "v_cache": normal(pages, 64, KV_HEADS, DIM),
        "page_table": torch.arange(pages - 1, -1, -1, device=device, dtype=torch.int32),
        "position": int32(context).to(device),
        "is_causal": False,
        "window": 0,
        "scale": DIM**-0.5,
    }


def _head(vocab: int, device: str) -> Arguments:
    """Arguments of an rnn head that can draft `vocab` tokens."""

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(shape, device=device) * scale).to(torch.bfloat16)

    return {
        "base_logits": normal(ROWS, vocab, scale=3.0),
        "hidden": normal(ROWS, HIDDEN),
        "anchor": int32(17).to(device),
        "markov_w1": normal(vocab, RANK),
        "markov_w2": normal(vocab, RANK, scale=RANK**-0.5),
        "mix_proj": normal(3 * RANK, 2 * RANK + HIDDEN, scale=HIDDEN**-0.5),
        "mix_bias": torch.zeros(3 * RANK, device=device),
        "confidence_proj": torch.randn(1, HIDDEN + RANK, device=device) * HIDDEN**-0.5,
        "confidence_bias": torch.zeros(1, device=device),
        "d2t": None,
        "is_coupled": int32(0).to(device),
        "wants_logits": int32(0).to(device),
        **{name: value.to(device) for name, value in sampling_arguments().items()},
        "position": int32(1000).to(device),
        "head": "rnn",
        "vocab_size": vocab,
        "draft_vocab_size": vocab,
        "base_is_drafted": False,
        "softcap": 30.0,
        "softcap_place": "before_bias",
        "logits_divisor": 1.0,
        "tp_size": 1,
    }


def _tactic(op: str, arguments: Arguments) -> Tactic:
    (tactic,) = find_tactics(op, "sm_90a", call_args(arguments))
    return tactic


def _check(options: argparse.Namespace) -> int:
    from w4a16_gpu import Gpu

    gpu = Gpu(options.cubins)
    report = Tally(verbose=options.verbose)

    for check in (check_attention, check_head):
        check(gpu, report)
    report.sum_up("all")
    return report.failed


def _times(options: argparse.Namespace) -> None:
    from w4a16_gpu import Gpu, time_graph

    gpu = Gpu(options.cubins)

    def time(tactic: Tactic, layers: list[Arguments], output_bytes: list[int]) -> float:
        """Microseconds of one call among those of all layers."""
        launches = []
        for arguments in layers:
            buffers: dict[str, Buffer] = {
                name: gpu.buffer(value)
                for name, value in arguments.items()
                if isinstance(value, torch.Tensor)
            }
            outputs = [empty(gpu, size) for size in output_bytes]
            for bound in bind(gpu, tactic, buffers, outputs, {}):
                launches.append(gpu.prepare(bound.kernel, bound.values))

        def body() -> None:
            for launch in launches:
                launch()

        return time_graph(body, replays=30) / len(layers)

    for context in CONTEXTS:
        layers = [_attention(context, "cuda") for _ in range(LAYERS)]
        us = time(_tactic("draft_attention", layers[0]), layers, [2 * ROWS * HEADS * DIM])
        floor = 4 * KV_HEADS * DIM * context / TB_PER_S / 1e6
        emit({"op": "draft_attention", "context": context, "us": round(us, 2),
               "floor_us": round(floor, 2), "goal_us": round(floor + 4, 2)})  # fmt: skip
        del layers
    for vocab in (VOCAB, -(-VOCAB // 4)):
        arguments = _head(vocab, "cuda")
        tactic = _tactic("draft_head", arguments)
        table = 2 * vocab * RANK / TB_PER_S / 1e6
        for name, request in REQUESTS.items():
            for key, value in sampling_arguments(**request).items():
                arguments[key] = value.cuda()
            us = time(tactic, [arguments], [4 * ROWS, 4 * ROWS * vocab, 4 * ROWS])
            emit({"op": "draft_head", "V": vocab, "request": name, "us": round(us, 1),
                   "us_a_row": round(us / ROWS, 2), "table_us": round(table, 2),
                   "goal_us": round(ROWS * (table + 4), 1)})  # fmt: skip


def _compile(options: argparse.Namespace) -> None:
    from w4a16_gpu import cubin

    tactics = [_tactic("draft_attention", _attention(context, "meta")) for context in CONTEXTS]
    tactics += [_tactic("draft_head", _head(vocab, "meta")) for vocab in (VOCAB, -(-VOCAB // 4))]
    for tactic in tactics:
        for kernel in tactic.kernels:
            cubin(options.cubins, kernel)
    emit({"cubins": len(list(options.cubins.glob("*.cubin")))})


def main() -> int:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--time", action="store_true")
    parser.add_argument("--verbose", action="store_true", help="print passing checks too")
    parser.add_argument("--cubins", type=Path, default=Path("build/cubins"))
    options = parser.parse_args()
    if options.compile:
        _compile(options)
    failed = _check(options) if options.check else 0
    if options.time:
        _times(options)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
