"""An engine of a few hand-written kernels, to test the CUDA executor without a model."""

import math
from pathlib import Path

import torch

from inkrt.builder.compile import PLUGIN_FOLDER, Compiler
from inkrt.plugins.all_reduce.tactics import find_tactics
from inkrt.plugins.tactic import KernelLaunch, Peers, TensorArg
from inkrt.runtime import engine_file as ef
from inkrt.runtime.plan import (
    Fill,
    IntParam,
    Kernel,
    Launch,
    PeersParam,
    Plan,
    TensorParam,
    TensorSpec,
)

VOCAB, SLOTS, PAGES, PAGE, RING = 37, 3, 12, 64, 16
INPUTS = {
    "tokens": 8, "position": 1, "num_tokens": 1, "slot": 1, "page_table": 4,
    "temperature": 1, "rank": 1,
}  # fmt: skip


def next_token(tokens: list[int]) -> int:
    """What the kernels compute after `tokens`."""
    last = len(tokens) - 1
    return (last + sum((b + 3) * tokens[last - b] for b in range(min(4, len(tokens))))) % VOCAB


def _compile(compiler: Compiler, source: Path, entry: str) -> str:
    return compiler.compile(KernelLaunch(source, entry, (), (1, 1, 1), (1, 1, 1), ()))


def write_engine(folder: Path, target: str, num_ranks: int = 1) -> ef.EngineConfig:
    """Write the engine; needs NVRTC.

    With several ranks, each has a part of the sum that makes the next token.
    """
    compiler = Compiler(target)
    toy = _compile(compiler, Path(__file__).parent / "toy.cu", "remember")
    cubins = {
        "advance": compiler.cubins[_compile(compiler, PLUGIN_FOLDER / "advance.cu", "advance")]
    }
    cubins[toy] = compiler.cubins[toy]
    plans = {}
    for name, width in _STEPS.items():
        reduce = None
        if num_ranks > 1:
            reduce = _all_reduce(width, num_ranks)
            cubin = compiler.compile(reduce)
            cubins[cubin] = compiler.cubins[cubin]
            reduce = (reduce, cubin)
        plans[name] = _plan(name, width, toy, num_ranks, reduce)
    folder.mkdir()
    paths = [folder / ef.plan_file(rank) for rank in range(num_ranks)]
    for path in paths:
        path.write_bytes(ef.encode_code(ef.EngineCode(plans, cubins)))
    config = ef.EngineConfig(
        format=ef.FORMAT,
        format_version=ef.FORMAT_VERSION,
        inkrt_version="0",
        model=ef.ModelInfo("toy", "float32", 1, 1, VOCAB, VOCAB, ()),
        target=target,
        tp_size=num_ranks,
        max_seq_len=PAGE * 4,
        steps=tuple(ef.StepSpec(name, width, width) for name, width in _STEPS.items()),
        state=ef.StateLayout(
            SLOTS,
            PAGE,
            PAGES,
            RING - 3,
            (
                ef.StateSpec("ring", "ring", (SLOTS, RING), "int32"),
                ef.StateSpec("pages", "paged", (PAGES, PAGE), "int32"),
            ),
        ),
        memory=ef.MemoryTable(0, 0, 0, 0, 0, 0),
        build={},
        rebuild_command="ink-build",
        plugins={},
        checkpoint_fingerprint="",
        files={path.name: ef.FileEntry(path.stat().st_size, ef.sha256_of(path)) for path in paths},
    )
    (folder / ef.CONFIG_NAME).write_bytes(ef.encode_config(config))
    return config


_STEPS = {"decode": 1, "verify3": 3, "verify8": 8}


def _all_reduce(width: int, num_ranks: int) -> KernelLaunch:
    args = {"x": TensorArg((width, 4), torch.float32), "dtype": torch.float32}
    (tactic,) = find_tactics("sm_90a", {**args, "tp_size": num_ranks})
    return tactic.kernels[0]


def _plan(
    name: str, width: int, cubin: str, num_ranks: int, reduce: tuple[KernelLaunch, str] | None
) -> Plan:
    def spec(name, space, shape, dtype="int32", storage="", offset=0):
        strides = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
        return TensorSpec(name, dtype, shape, strides, space, storage, offset)

    sizes = INPUTS | {"tokens": width}
    dtypes = {"temperature": "float32"}
    tensors = [
        spec(key, "input", (size,), dtypes.get(key, "int32"), key) for key, size in sizes.items()
    ]
    index = {tensor.name: i for i, tensor in enumerate(tensors)}
    for tensor in (
        spec("ring", "state", (SLOTS, RING), storage="ring"),
        spec("pages", "state", (PAGES, PAGE), storage="pages"),
        spec("counts", "arena", (1,)),
        spec("drawn", "arena", (width,), offset=256),
        spec("logits", "arena", (width, VOCAB), "float32", offset=512),
        spec("error.7", "scratch", (1,)),
        spec("parts", "arena", (width, 4), "float32", offset=2048),
        spec("sums", "arena", (width, 4), "float32", offset=2304),
    ):
        index[tensor.name] = len(tensors)
        tensors.append(tensor)

    def params(*names):
        return tuple(IntParam(n) if isinstance(n, int) else TensorParam(index[n]) for n in names)

    def kernel(entry, *names):
        return Kernel(cubin, entry, (1, 1, 1), (width, 1, 1), 1, 0, True, False, params(*names))

    remember = kernel(
        "remember", "tokens", "position", "num_tokens", "slot", "page_table", "ring", "pages",
        "counts",
    )  # fmt: skip
    answer = kernel(
        "answer", "position", "slot", "page_table", "ring", "pages", "counts", VOCAB, "error.7",
        "drawn", "logits",
    )  # fmt: skip
    kernels = [remember, answer]
    if reduce is not None:
        given, code = reduce
        part = kernel(
            "part", "position", "slot", "page_table", "ring", "pages", "counts", "rank", num_ranks,
            "error.7", "parts",
        )  # fmt: skip
        (x,), (out,), (error,) = params("parts"), params("sums"), params("error.7")
        (peers,) = (p for p in given.params if isinstance(p, Peers))
        values = (x, out, PeersParam(peers.num_bytes), x, error)
        all_reduce = Kernel(code, given.entry, given.grid, given.block, 1, 0, True, False, values)
        kernels = [remember, part, all_reduce, kernel("draw", "sums", VOCAB, "drawn", "logits")]
    launches = tuple(Launch(k.entry, "toy", {}, (), "", 0, (k,)) for k in kernels)
    outputs = {"tokens": index["drawn"], "logits": index["logits"]}
    return Plan(
        name, width, width, tuple(tensors), launches, 4096,
        {key: index[key] for key in INPUTS}, outputs, 4, (Fill(0, 4, 0),),
    )  # fmt: skip
