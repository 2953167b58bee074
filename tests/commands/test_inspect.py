"""ink-inspect describes, checks and compares engine folders from their metadata alone."""

import json
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
from safetensors.numpy import save_file
from typer.testing import CliRunner, Result

from inkrt.commands import console, inspect
from inkrt.runtime import engine_file
from inkrt.runtime.engine_file import (
    EngineConfig,
    FileEntry,
    MemoryTable,
    ModelInfo,
    StateLayout,
    StateSpec,
    StepSpec,
)
from inkrt.runtime.plan import Const, DType, Launch, Numbers, Plan, Ref, Refs, TensorSpec


def encode(plans: dict[str, Plan]) -> bytes:
    return engine_file.encode_code(engine_file.EngineCode(plans))


def make_plan(name: str, num_tokens: int, *, extra_norms: int = 0) -> Plan:
    """Embedding, norms, head: enough to have every kind of tensor and argument."""
    t = num_tokens
    tensors = (
        TensorSpec("tokens", "int32", (t,), (1,), "input", "tokens", 0),
        TensorSpec("embed", "bfloat16", (490, 8), (8, 1), "weight", "embed", 0),
        TensorSpec("x", "bfloat16", (t, 8), (8, 1), "arena", "", 0),
        TensorSpec("kv", "bfloat16", (4, 8), (8, 1), "state", "layers.0.k", 0),
        TensorSpec("logits", "float32", (t, 490), (490, 1), "arena", "", 256),
        TensorSpec("sampled", "int32", (t,), (1,), "arena", "", 1024),
    )
    norm = Launch(
        "norm", "reference", {"x": Ref(2), "eps": Const(1e-6)}, (2,), "layers.0.attn_norm", 32 * t
    )
    launches = (
        Launch("embedding", "reference", {"ids": Ref(0), "table": Ref(1)}, (2,), "embed", 20 * t),
        norm,
        *([norm] * extra_norms),
        Launch(
            "store",
            "reference",
            {"parts": Refs((2, 2)), "sizes": Numbers((2, 0.5)), "state": Ref(3)},
            (),
            "layers.0",
            64,
        ),
        Launch("head", "reference", {"x": Ref(2), "dtype": DType("float32")}, (4, 5), "", 1000),
    )
    outputs = {"tokens": 5, "logits": 4}
    return Plan(name, t, t, tensors, launches, 2048, {"tokens": 0}, outputs)


def make_engine(folder: Path, *, tp_size: int = 2, extra_norms: int = 0, seed: int = 0) -> Path:
    folder.mkdir()
    plans = {
        "decode": make_plan("decode", 1, extra_norms=extra_norms),
        "verify4": make_plan("verify4", 4),
    }
    for rank in range(tp_size):
        (folder / engine_file.plan_file(rank)).write_bytes(encode(plans))
        weights = np.random.default_rng(seed).integers(0, 9, 128).astype(np.int16)
        save_file({"embed": weights}, folder / f"rank{rank}-00001-of-00001.safetensors")
    config = EngineConfig(
        format=engine_file.FORMAT,
        format_version=engine_file.FORMAT_VERSION,
        inkrt_version="0.1.0",
        model=ModelInfo("inkling2", "bfloat16", 14, 60, 490, 512, (482,)),
        target="cpu",
        tp_size=tp_size,
        max_seq_len=4096,
        steps=tuple(StepSpec(p.name, p.num_tokens, p.num_rows) for p in plans.values()),
        state=StateLayout(
            num_slots=1,
            page_tokens=64,
            num_pages=64,
            rollback_tokens=13,
            buffers=(
                StateSpec("layers.5.k", "paged", (64, 64, 4, 8), "bfloat16"),
                StateSpec("layers.0.k", "ring", (1, 48, 4, 8), "bfloat16"),
                StateSpec("layers.1.k", "ring", (1, 48, 4, 8), "bfloat16"),
            ),
        ),
        memory=MemoryTable(3_000_000, 262_144, 6144, 2048, 512, 64),
        build={"max_batch_size": 1, "dtype": "auto"},
        rebuild_command="ink-build CHECKPOINT -o ENGINE --tp-size 2",
        plugins={"embedding": 1, "norm": 2},
        checkpoint_fingerprint="0123456789abcdef",
        files={
            path.name: FileEntry(path.stat().st_size, engine_file.sha256_of(path))
            for path in folder.iterdir()
        },
    )
    (folder / engine_file.CONFIG_NAME).write_bytes(engine_file.encode_config(config))
    return folder


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    return make_engine(tmp_path / "engine")


def invoke(*arguments: object) -> Result:
    words = inspect.with_default_subcommand([str(argument) for argument in arguments])
    return CliRunner().invoke(inspect.make_app(), words)


def test_summary(engine: Path) -> None:
    result = invoke(engine)
    assert result.exit_code == 0
    assert result.stdout.splitlines() == [
        "model       inkling2, 14 layers, hidden size 60",
        "            bfloat16, vocabulary 490, ends at token 482",
        "target      cpu, 2 ranks",
        "context     4,096 positions, 1 session",
        "memory      3.12 MiB per rank: 2.86 MiB weights,",
        "            262 KiB state, 2,560 B scratch",
        "plugins     embedding v1, norm v2",
        "checkpoint  0123456789abcdef",
        f"format      ink-engine {engine_file.FORMAT_VERSION}, inkrt 0.1.0",
        "rebuild     ink-build CHECKPOINT -o ENGINE --tp-size 2",
        "",
        "step     tokens  launches  bytes moved  scratch",
        "decode        1         4      1,116 B  2,048 B",
        "verify4       4         4      1,272 B  2,048 B",
    ]


def test_launches(engine: Path) -> None:
    result = invoke(engine, "--step", "verify4")
    assert result.stdout.splitlines()[15:] == [
        "step verify4: 4 launches, 4 tokens, 4 output rows",
        "  input %tokens: i32[4]",
        "    0  %x: bf16[4, 8] = embedding(ids=%tokens, table=embed)",
        "       # embed, reference, 80 B",
        "    1  %x: bf16[4, 8] = norm(eps=1e-06, x=%x)",
        "       # layers.0.attn_norm, reference, 128 B",
        "    2  store(parts=[%x, %x], sizes=[2, 0.5], state=layers.0.k)",
        "       # layers.0, reference, 64 B",
        "    3  %logits: f32[4, 490], %sampled: i32[4] = head(dtype=float32, x=%x)",
        "       # -, reference, 1,000 B",
        "  output logits = %logits: f32[4, 490]",
        "  output tokens = %sampled: i32[4]",
    ]
    both = invoke("--launches", engine).stdout
    assert "step decode: 4 launches, 1 token, 1 output row\n" in both
    assert "step verify4: " in both

    result = invoke(engine, "--step", "verify5")
    assert result.exit_code == 1
    assert result.stderr == f"error: {engine} has no step 'verify5'; it has decode, verify4\n"


def test_memory(engine: Path) -> None:
    result = invoke(engine, "--memory")
    assert [line.split("  ")[0] for line in result.stdout.splitlines()[15:]] == [
        "memory of a rank",
        "weights",
        "paged state",
        "",
        "ring state",
        "",
        "scratch",
        "",
        "",
        "kept by launches",
        "total",
    ]
    words = {" ".join(line.split()) for line in result.stdout.splitlines()}
    assert "paged state 262,144 256 KiB 64 pages of 64 positions, 64 bytes per position" in words
    assert "layers.*.k 262,144 1 x bf16[64, 64, 4, 8]" in words
    assert "layers.*.k 6,144 2 x bf16[1, 48, 4, 8]" in words
    assert "kept by launches 512 512 B of all steps" in words
    assert "total 3,270,848 3.12 MiB" in words


def test_json(engine: Path) -> None:
    result = json.loads(invoke(engine, "--json").stdout)
    assert result["config"] == json.loads((engine / "config.json").read_text())
    assert result["memory_total"] == 3_270_848
    assert [step["name"] for step in result["steps"]] == ["decode", "verify4"]
    assert result["steps"][1]["launches_per_op"] == {
        "embedding": 1, "head": 1, "norm": 1, "store": 1,
    }  # fmt: skip
    assert result["steps"][1]["bytes"] == 1272
    assert result["plans"] == []

    result = json.loads(invoke(engine, "--json", "--step", "decode").stdout)
    (plan,) = result["plans"]
    assert msgspec.convert(plan, Plan) == make_plan("decode", 1)


def test_verify(engine: Path) -> None:
    result = invoke("verify", engine)
    assert result.exit_code == 0
    size = sum(path.stat().st_size for path in engine.iterdir() if path.name != "config.json")
    assert result.stdout == f"{engine} is whole: 4 files, {console.format_bytes(size)}\n"

    weights = engine / "rank1-00001-of-00001.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    (engine / "rank0.engine").unlink()
    result = invoke("verify", engine)
    assert result.exit_code == 1
    assert result.stdout.splitlines()[:2] == [
        "rank0.engine is missing",
        "rank1-00001-of-00001.safetensors has a wrong sha256 (damaged)",
    ]
    assert result.stderr.endswith(
        "copy it again or rebuild it with: ink-build CHECKPOINT -o ENGINE --tp-size 2\n"
    )


def test_verify_finds_a_missing_plan(engine: Path) -> None:
    path = engine / "rank1.engine"
    path.write_bytes(encode({"decode": make_plan("decode", 1)}))
    config = engine_file.read_config(engine)
    entry = FileEntry(path.stat().st_size, engine_file.sha256_of(path))
    config = msgspec.structs.replace(config, files=config.files | {path.name: entry})
    (engine / "config.json").write_bytes(engine_file.encode_config(config))
    result = invoke("verify", engine)
    assert result.exit_code == 1
    assert result.stdout == "rank1.engine has other steps than config.json says (damaged)\n"


def test_diff(tmp_path: Path, engine: Path) -> None:
    same = invoke("diff", engine, make_engine(tmp_path / "copy"))
    assert (same.exit_code, same.stdout) == (0, "the engines are the same\n")

    other = make_engine(tmp_path / "other", tp_size=1, extra_norms=2, seed=1)
    result = invoke("diff", engine, other)
    lines = result.stdout.splitlines()
    assert result.exit_code == 1
    assert lines[:2] == ["tp_size: 2 -> 1", "step decode: norm 1 -> 3"]
    assert [line.split(":")[0] for line in lines[2:]] == [
        "file rank0-00001-of-00001.safetensors",
        "file rank0.engine",
        "file rank1-00001-of-00001.safetensors",
        "file rank1.engine",
    ]
    assert "sha256" in lines[2]
    assert lines[4].endswith("only in A")


def test_errors_are_one_line(tmp_path: Path) -> None:
    result = invoke(tmp_path)
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr == (
        f"error: {tmp_path} is not an engine: cannot read config.json (No such file or directory); "
        f"make one with: ink-build CHECKPOINT -o {tmp_path}\n"
    )
    assert isinstance(invoke(tmp_path, "--debug").exception, console.InkError)
    assert invoke().exit_code == 2
    assert invoke("diff", tmp_path).exit_code == 2


def test_engine_of_another_version_gives_exit_code_3(engine: Path) -> None:
    path = engine / "config.json"
    path.write_text(
        path.read_text().replace(
            f'"format_version": {engine_file.FORMAT_VERSION}', '"format_version": 99'
        )
    )
    result = invoke(engine)
    assert result.exit_code == 3
    assert result.stderr.startswith(f"error: {engine} has engine format version 99, ")


def test_needs_no_torch(engine: Path) -> None:
    """The real entry point, in a process where torch and the GPU library cannot be imported."""
    code = (
        "import sys; sys.modules['torch'] = sys.modules['cuda'] = None\n"
        f"sys.argv = ['ink-inspect', {str(engine)!r}, '--memory', '--launches']\n"
        "from inkrt.commands.inspect import main; main()"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert result.stderr == b""
    assert result.returncode == 0
    assert b"total" in result.stdout


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; sys.argv = ['ink-inspect', '--help']\n"
        "from inkrt.commands.inspect import main\n"
        "try: main()\n"
        "except SystemExit as end: assert end.code == 0\n"
        "heavy = {'torch', 'numpy', 'rich.console', 'safetensors', 'tokenizers', 'jinja2'}\n"
        "assert not heavy & sys.modules.keys(), heavy & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (10_239, "10,239 B"),
        (10_240, "10.0 KiB"),
        (1_022_976, "999 KiB"),
        (1_023_488, "0.98 MiB"),
        (390_000_000_000, "363 GiB"),
        (2**50, "1024 TiB"),
    ],
)
def test_format_bytes(count: int, text: str) -> None:
    assert console.format_bytes(count) == text
