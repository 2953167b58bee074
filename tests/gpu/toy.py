"""An engine of two hand-written kernels, to test the CUDA executor without a model."""

import math
from pathlib import Path

from inkrt.builder.compile import PLUGIN_FOLDER, Compiler
from inkrt.plugins.tactic import KernelLaunch
from inkrt.runtime import engine_file as ef
from inkrt.runtime.plan import Fill, IntParam, Kernel, Launch, Plan, TensorParam, TensorSpec

VOCAB, SLOTS, PAGES, PAGE, RING = 37, 3, 12, 64, 16
INPUTS = {
    "tokens": 8, "position": 1, "num_tokens": 1, "slot": 1, "page_table": 4,
    "temperature": 1,
}  # fmt: skip


def next_token(tokens: list[int]) -> int:
    """What the kernels compute after `tokens`."""
    last = len(tokens) - 1
    return (last + sum((b + 3) * tokens[last - b] for b in range(min(4, len(tokens))))) % VOCAB


def _compile(compiler: Compiler, source: Path, entry: str) -> str:
    return compiler.compile(KernelLaunch(source, entry, (), (1, 1, 1), (1, 1, 1), ()))


def write_engine(folder: Path, target: str) -> ef.EngineConfig:
    """Write the engine; needs NVRTC."""
    compiler = Compiler(target)
    toy = _compile(compiler, Path(__file__).parent / "toy.cu", "remember")
    cubins = {
        "advance": compiler.cubins[_compile(compiler, PLUGIN_FOLDER / "advance.cu", "advance")]
    }
    cubins[toy] = compiler.cubins[toy]
    plans = {f"{name}": _plan(name, width, toy) for name, width in _STEPS.items()}
    folder.mkdir()
    (folder / "rank0.engine").write_bytes(ef.encode_code(ef.EngineCode(plans, cubins)))
    path = folder / "rank0.engine"
    config = ef.EngineConfig(
        format=ef.FORMAT,
        format_version=ef.FORMAT_VERSION,
        inkrt_version="0",
        model=ef.ModelInfo("toy", "float32", 1, 1, VOCAB, VOCAB, ()),
        target=target,
        tp_size=1,
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
        files={"rank0.engine": ef.FileEntry(path.stat().st_size, ef.sha256_of(path))},
    )
    (folder / ef.CONFIG_NAME).write_bytes(ef.encode_config(config))
    return config


_STEPS = {"decode": 1, "verify3": 3, "verify8": 8}


def _plan(name: str, width: int, cubin: str) -> Plan:
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
    launches = tuple(Launch(k.entry, "toy", {}, (), "", 0, (k,)) for k in (remember, answer))
    outputs = {"tokens": index["drawn"], "logits": index["logits"]}
    return Plan(
        name, width, width, tuple(tensors), launches, 512 + 4 * width * VOCAB,
        {key: index[key] for key in INPUTS}, outputs, 4, (Fill(0, 4, 0),),
    )  # fmt: skip
