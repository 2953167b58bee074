"""Seconds from the start of a process to its first token, and where they go; page cache warm.

    ink-build FOLDER_WITH_CONFIG -o ENGINE --target sm_90a --weights dummy
    python perf/cold_start.py ENGINE --commit HASH [-o perf/results/cold-start-h200.json] [--sweep]

Dummy weights are made on the GPU, so this writes an engine with the same weights in files first, in
`--folder`, which needs room for them (22.9 GB). Every run is a fresh process that opens the engine
and reads a short prompt; its tokens must be those of the dummy engine. `--sweep` also loads the
weights with other numbers of threads and sizes of reads.
"""

import argparse
import datetime
import hashlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

FLOOR_S, MUST_S, GOAL_S = 0.4, 10.0, 4.0
GOAL_GB_S = 20.0
SHARD_BYTES = 2 * 2**30  # files are written, hashed and read in parallel
BLOCK_BYTES = 32 * 2**20
NUM_THREADS = 16
PROMPT = [11, 7, 5, 3, 2, 1, 4, 8]
NUM_TOKENS = 16
SAFETENSORS_DTYPES = {"uint8": "U8", "bfloat16": "BF16", "float32": "F32"}


def main() -> int:
    """Write the engine, measure, write the figures; 1 if tokens differ or it takes too long."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", type=Path, help="built with --weights dummy")
    parser.add_argument("--commit", default="")
    parser.add_argument("--folder", type=Path, help="where the weights are written; default: tmp")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("-o", "--out", type=Path)
    parser.add_argument("--start", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.start is not None:
        say(json.dumps(cold_start(options.engine, options.start)))
        return 0
    with tempfile.TemporaryDirectory(dir=options.folder) as temporary:
        real = Path(temporary) / "engine"
        started = time.monotonic()
        num_bytes = write_engine(options.engine, real)
        seconds = time.monotonic() - started
        num_gb = num_bytes / 1e9
        say(f"wrote {num_gb:.2f} GB in {seconds:.1f} s, {num_gb / seconds:.2f} GB/s")
        say(f"page cache: {read_all(real):.1f} GB/s into memory, {NUM_THREADS} threads")
        expected = fresh_process(options.engine)["tokens"]
        runs = [fresh_process(real) for _ in range(options.runs)]
        same = all(run["tokens"] == expected for run in runs)
        for name in runs[0]["seconds"]:
            values = [run["seconds"][name] for run in runs]
            say(f"{name:<28}" + "".join(f"{value:9.3f}" for value in values) + " s")
        rates = [run["gb_s"] for run in runs]
        say(f"{'weights':<28}" + "".join(f"{rate:9.1f}" for rate in rates) + " GB/s")
        say("tokens are those of the dummy engine" if same else "TOKENS DIFFER")
        if options.sweep:
            sweep(real)
    total = statistics.median(run["seconds"]["first token"] for run in runs)
    if options.out is not None:
        objects = figures(total, statistics.median(rates), runs, options.commit)
        options.out.write_text(json.dumps(objects, indent=1) + "\n", encoding="utf-8")
    return int(not same or total > MUST_S)


def figures(
    total_s: float, gb_s: float, runs: list[dict[str, Any]], commit: str
) -> list[dict[str, Any]]:
    """The figures as they are written."""
    shared = {
        "command": "python perf/cold_start.py ENGINE",
        "commit": commit,
        "device": runs[0]["device"],
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }
    stages = {
        name: round(statistics.median(run["seconds"][name] for run in runs), 3)
        for name in runs[0]["seconds"]
    }
    return [
        {"workload": "Flint NVFP4 cold start, page cache warm", "value": round(total_s, 3)}
        | {"unit": "s", "floor": FLOOR_S, "must": MUST_S, "goal": GOAL_S, **shared}
        | {"stages": stages},
        {"workload": "Flint NVFP4 weights, page cache to GPU", "value": round(gb_s, 2)}
        | {"unit": "GB/s", "floor": None, "must": None, "goal": GOAL_GB_S, **shared},
    ]


# ---- an engine with weight files ----


def write_engine(dummy: Path, target: Path) -> int:
    """Write an engine with the weights of a dummy engine in files; gives their bytes."""
    import msgspec

    from inkrt.runtime.engine_file import (
        CONFIG_NAME,
        EngineCode,
        FileEntry,
        encode_code,
        encode_config,
        plan_file,
        read_code,
        read_config,
    )
    from inkrt.runtime.plan import weight_specs

    config, code = read_config(dummy), read_code(dummy, 0)
    if not code.template_of:
        raise SystemExit(f"{dummy} has weights in files; build one with --weights dummy")
    specs = weight_specs(code.plans)
    target.mkdir()
    shards: list[list[str]] = [[]]
    sizes = {name: size_of(specs[name]) for name in code.template_of}
    for name, size in sizes.items():
        if shards[-1] and sum(sizes[other] for other in shards[-1]) + size > SHARD_BYTES:
            shards.append([])
        shards[-1].append(name)

    def write(number: int) -> tuple[str, FileEntry]:
        path = target / f"rank0-{number + 1:05}-of-{len(shards):05}.safetensors"
        header: dict[str, Any] = {}
        offset = 0
        for name in shards[number]:
            spot = [offset, offset + sizes[name]]
            kind = SAFETENSORS_DTYPES[specs[name].dtype]
            header[name] = {"dtype": kind, "shape": list(specs[name].shape), "data_offsets": spot}
            offset = spot[1]
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        digest = hashlib.sha256()
        with path.open("wb") as file:

            def put(data: bytes | memoryview) -> None:
                digest.update(data)
                file.write(data)

            put(len(text).to_bytes(8, "little") + text)
            for name in shards[number]:
                template = code.templates[code.template_of[name]]
                block = memoryview(template * max(BLOCK_BYTES // len(template), 1))
                for done in range(0, sizes[name], len(block)):
                    put(block[: sizes[name] - done])
        return path.name, FileEntry(path.stat().st_size, digest.hexdigest())

    with ThreadPoolExecutor(NUM_THREADS) as pool:
        entries = dict(pool.map(write, range(len(shards))))
    plans = encode_code(EngineCode(code.plans, code.cubins))
    (target / plan_file(0)).write_bytes(plans)
    entries[plan_file(0)] = FileEntry(len(plans), hashlib.sha256(plans).hexdigest())
    config = msgspec.structs.replace(config, files=entries)
    (target / CONFIG_NAME).write_bytes(encode_config(config))
    return sum(sizes.values())


def size_of(spec: Any) -> int:
    """Bytes of a weight."""
    from inkrt.runtime.executor.cuda_memory import num_bytes

    return num_bytes(spec)


def read_all(folder: Path) -> float:
    """Read all weight files, which leaves them in the page cache; gives GB/s."""
    paths = sorted(folder.glob("*.safetensors"))
    started = time.monotonic()

    def read(path: Path) -> int:
        buffer, total = bytearray(BLOCK_BYTES), 0
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                total += count
        return total

    with ThreadPoolExecutor(NUM_THREADS) as pool:
        total = sum(pool.map(read, paths))
    return total / (time.monotonic() - started) / 1e9


# ---- one cold start ----


def fresh_process(engine: Path) -> dict[str, Any]:
    """One cold start in a process of its own."""
    command = [sys.executable, __file__, str(engine), "--start", repr(time.monotonic())]
    result = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(result.stdout)  # type: ignore[no-any-return]


class Stages:
    """Seconds spent in functions of the runtime, which it wraps.

    Attributes:
        seconds: by stage.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def time(self, owner: Any, name: str, stage: str) -> None:
        """Count the time of a function of a class or module as a stage."""
        function: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.monotonic()
            try:
                return function(*args, **kwargs)
            finally:
                spent = time.monotonic() - started
                self.seconds[stage] = self.seconds.get(stage, 0.0) + spent

        setattr(owner, name, timed)


def cold_start(engine: Path, start: float) -> dict[str, Any]:
    """Open an engine and generate; `start` is `time.monotonic()` at the start of the process."""
    from inkrt import LLM, SamplingParams

    imported = time.monotonic()
    import cuda.core  # noqa: F401 (the driver's bindings too)

    from inkrt.runtime import engine as engine_module
    from inkrt.runtime.executor import cuda as cuda_module
    from inkrt.runtime.executor import cuda_memory, cuda_rank

    imported_cuda = time.monotonic()
    stages = Stages()
    stages.time(engine_module, "require_files", "open: files checked")
    stages.time(cuda_rank, "read_code", "open: plans and code read")
    stages.time(cuda_module, "open_device", "open: GPU context")
    stages.time(cuda_memory.DeviceMemory, "__init__", "open: memory")
    stages.time(cuda_memory.DeviceMemory, "_load", "open: weights")
    stages.time(cuda_rank.CudaRank, "capture", "open: graphs")
    with LLM(engine) as llm:
        opened = time.monotonic()
        params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
        tokens: list[int] = []
        ends = []
        for delta in llm.stream(PROMPT, params):
            tokens += delta.token_ids
            ends.append(time.monotonic())
        executor: Any = llm.engine.executor
        spent = stages.seconds
        spent["open: memory"] -= spent["open: weights"]
        seconds = {
            "python, inkrt imported": imported - start,
            "cuda imported": imported_cuda - imported,
            **spent,
            "open: rest": opened - imported_cuda - sum(spent.values()),
            "prompt and first step": ends[0] - opened,
            "first token": ends[0] - start,
            "second token": ends[1] - start,
        }
        return {
            "seconds": seconds,
            "gb_s": executor.memory.load_rate,
            "tokens": tokens,
            "device": executor.device_name,
        }


def sweep(engine: Path) -> None:
    """Load the weights with other numbers of threads and sizes of reads, and print GB/s."""
    from cuda.bindings import driver
    from cuda.core import Device

    from inkrt.runtime.executor.weight_loader import WeightChunk, WeightLoader, weight_regions

    Device(0).set_current()
    parts, size = [], 0
    for region in weight_regions(sorted(engine.glob("*.safetensors"))):
        parts.append(WeightChunk(region.path, region.offset, size, region.size))
        size += -(-region.size // 256) * 256

    def check(result: tuple[Any, ...]) -> Any:
        assert not result[0], f"CUDA error {result[0]}"
        return result[1] if len(result) > 1 else None

    base = int(check(driver.cuMemAlloc(size)))
    sizes = (2, 4, 8, 16, 32)
    say("GB/s" + "".join(f"{mib:>6} MiB" for mib in sizes))
    for num_readers in (4, 8, 12, 16, 24):
        rates = []
        for mib in sizes:
            loader = WeightLoader(driver, check, num_readers=num_readers, chunk_bytes=mib * 2**20)
            rates.append(loader.load(parts, base))
        say(f"{num_readers:>4}" + "".join(f"{rate:>10.1f}" for rate in rates))
    check(driver.cuMemFree(base))


def say(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    raise SystemExit(main())
