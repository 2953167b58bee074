"""Kernels touch nothing of their own launch before they wait for what ran before them.

That may be the same launch, which a benchmark repeats, and whose last blocks still run then.
"""

import ast
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_build import CONFIG

from inkrt.builder.build import build_engine
from inkrt.builder.options import BuildOptions
from inkrt.builder.tactics import find_tactics
from inkrt.plugins.round.launches import ratio_test
from inkrt.plugins.tactic import CallArgs, Output, Pointer, TensorArg
from inkrt.runtime.engine_file import EngineCode, read_code
from inkrt.runtime.plan import Kernel, Launch, Plan, Ref, Refs, TensorParam

pytest.importorskip("cuda.bindings.nvrtc", reason="NVRTC through cuda.bindings is not installed")

from ptx import compile_ptx, touched_before_wait

LAYERS_CONFIG = {
    "model_type": "flint",
    "dtype": "bfloat16",
    "vocab_size": 600,
    "num_hidden_layers": 4,
    "num_experts": 40,
    "max_position_embeddings": 1024,
    "quantization_config": {"quant_method": "nvfp4"},
}


def build(folder: Path, config: dict[str, Any], patch: pytest.MonkeyPatch) -> EngineCode:
    """An engine whose code is what would be compiled."""

    def compile_cubin(source: Path, defines: object, _target: str) -> bytes:
        return repr((str(source), defines)).encode()

    patch.setattr("inkrt.builder.compile.compile_cubin", compile_cubin)
    patch.setattr("inkrt.builder.build.compile_cubin", compile_cubin)
    (folder / "config.json").write_text(json.dumps(config))
    options = BuildOptions(target="sm_90a", weights="dummy", max_verify_tokens=2)
    build_engine(folder, folder / "engine", options, lambda _: None)
    return read_code(folder / "engine", 0)


def own_params(plan: Plan, launch: Launch, kernel: Kernel) -> dict[int, str]:
    """Outputs and scratch of a launch among the parameters of its kernel; not the error word."""
    given: set[int] = set()
    for argument in launch.args.values():
        if isinstance(argument, Ref):
            given.add(argument.tensor)
        elif isinstance(argument, Refs):
            given.update(argument.tensors)
    specs = {
        number: plan.tensors[param.tensor]
        for number, param in enumerate(kernel.params)
        if isinstance(param, TensorParam) and param.tensor not in given
    }
    return {
        number: spec.name
        for number, spec in specs.items()
        if spec.space in ("arena", "scratch") and not spec.name.startswith("error.")
    }


def kernels(code: EngineCode) -> Iterator[tuple[Launch, Kernel, dict[int, str]]]:
    """Every kernel once, with its launch and its own parameters."""
    done = set()
    for plan in code.plans.values():
        for launch in plan.launches:
            for kernel in launch.kernels:
                own = own_params(plan, launch, kernel)
                if kernel.pdl and (kernel.cubin, tuple(own)) not in done:
                    done.add((kernel.cubin, tuple(own)))
                    yield launch, kernel, own


@pytest.mark.parametrize("config", [CONFIG, LAYERS_CONFIG], ids=["small", "layers"])
def test_nothing_of_the_own_launch_is_touched_before_the_wait(
    config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = build(tmp_path, config, monkeypatch)
    found: dict[str, list[str]] = {}
    for launch, kernel, own in kernels(code):
        source, defines = ast.literal_eval(code.cubins[kernel.cubin].decode())
        is_attention = kernel.entry in ("sink_attention", "relative_attention")
        if is_attention and ("ATTN_WINDOW", 0) in defines:
            continue  # waits in the first round of a loop, which branches alone do not tell
        early = touched_before_wait(compile_ptx(Path(source), defines), kernel.entry)
        found[f"{launch.op} {kernel.entry}"] = [own[number] for number in early & own.keys()]
    assert {name: early for name, early in found.items() if early} == {}
    assert len(found) > 20 if config is CONFIG else "flint_layers layers" in found


@pytest.mark.parametrize("num_tokens", [1, 4, 9])
def test_streams_of_tiles_touch_weights_alone(num_tokens: int) -> None:
    """Neither Flint nor any other engine of these tests has all of their forms."""

    def arg(*shape: int) -> TensorArg:
        return TensorArg(shape, torch.bfloat16)

    group: CallArgs = {
        "xs": [arg(num_tokens, 200)] * 2,
        "weights": [arg(50, 200), arg(7, 200)],
        "input_of": [1, 0],
    }
    partial: CallArgs = {"x": arg(num_tokens, 512), "weight": arg(40, 512), "partial": True}
    head: CallArgs = {
        "x": arg(num_tokens, 264), "weight": arg(70, 264), "scales": None, "vocab_size": 67,
        "cap": 30.0, "logits_dtype": torch.bfloat16, "tp_size": 1, "last_row": False,
    }  # fmt: skip
    calls = [("linear_group", group), ("linear", partial)]
    calls += [("lm_head_sample", head)] if num_tokens <= 8 else []
    for op, args in calls:
        for kernel in find_tactics(op, "sm_90a", args)[0].kernels:
            early = touched_before_wait(compile_ptx(kernel.source, kernel.defines), kernel.entry)
            names = {getattr(kernel.params[i], "argument", None) for i in early}
            names |= {getattr(kernel.params[i], "name", None) for i in early}
            inputs = {"num_tokens", "position", "temperature", "top_k", "top_p", "min_p", "seed"}
            assert names <= {None, "weight", "weights", "error", *inputs}, kernel.entry
            outputs = [i for i in early if isinstance(kernel.params[i], Output)]
            assert outputs == [], kernel.entry
            # They are asked for before the wait; of several matrices by a table in shared memory,
            # of which PTX does not tell. There the CPU's inputs come at the wait (cuda_on_cpu).
            if kernel.entry == "ring_linear" and op != "linear_group":
                assert names & {"weight", "weights"}


@pytest.mark.parametrize("num_tokens", [1, 4, 9])
@pytest.mark.parametrize("form", ["mxfp8", "nvfp4"])
def test_streams_of_quantized_tiles_touch_weights_alone(num_tokens: int, form: str) -> None:
    """Wide steps touch bf16 matrices and global scales; the others a kernel before makes."""
    codes, block = (1, 32) if form == "mxfp8" else (2, 16)
    args: CallArgs = {
        "xs": [TensorArg((num_tokens, 96), torch.bfloat16)] * 2,
        "weights": [TensorArg((7, 96), torch.bfloat16)],
        "codes": [TensorArg((n, 96 // codes), torch.uint8) for n in (50, 20)],
        "scales": [TensorArg((n, 96 // block), torch.uint8) for n in (50, 20)],
        "global_scales": [TensorArg((1,), torch.float32)] * 2 if form == "nvfp4" else [],
        "input_of": [1, 0, 1],
    }
    for kernel in find_tactics("linear_group_quantized", "sm_90a", args)[0].kernels:
        early = touched_before_wait(compile_ptx(kernel.source, kernel.defines), kernel.entry)
        touched = [kernel.params[i] for i in early]
        names = {getattr(param, "argument", getattr(param, "name", None)) for param in touched}
        if kernel.entry == "ring_quant":
            assert {"weights", "codes"} <= names
            assert names <= {"weights", "codes", "global_scales", "error", None}
            assert not any(isinstance(param, Output) for param in touched)
        else:
            assert names <= {"weights", "global_scales", "num_tokens"}, kernel.entry


def test_the_ratio_test_reads_inputs_of_the_round_alone() -> None:
    for kernel in ratio_test(600, 4, 3):
        early = touched_before_wait(compile_ptx(kernel.source, kernel.defines), kernel.entry)
        names = {
            param.argument if isinstance(param, Pointer) else getattr(param, "name", None)
            for param in (kernel.params[number] for number in early)
        }
        assert "state" in names, kernel.entry
        inputs = {"temperature", "top_k", "top_p", "min_p", "seed", "position", "drafts"}
        assert names <= {"state", *inputs}, kernel.entry


@pytest.mark.parametrize(
    ("body", "touched"),
    [
        ("WAIT; b[i] = a[i];", set()),
        ("int x = a[i]; WAIT; b[i] = x;", {0}),
        ("if (i == 5) b[i + n] = 1; WAIT; b[i] = a[i];", {1, 2}),
        ("if (i < 9) { WAIT; } b[i] = a[i];", {0, 1}),
        ("for (int j = 0; j < n; j++) atomicAdd(b + j, j); WAIT; b[i] = a[i];", {1}),
        ("int* p = i ? a : b; int x = p[i]; WAIT; b[i] = x;", {0, 1}),
        ("f(b + i); WAIT; b[i] = a[i];", {1}),
        ("WAIT; f(b + i); b[i] = a[i];", set()),
    ],
)
def test_touching_is_seen(body: str, touched: set[int], tmp_path: Path) -> None:
    source = tmp_path / "kernel.cu"
    source.write_text(
        '#define WAIT asm volatile("griddepcontrol.wait;" ::: "memory")\n'
        "__device__ __noinline__ void f(int* p) { *p += 1; }\n"
        'extern "C" __global__ void k(int* a, int* b, int n) {\n'
        f"const int i = threadIdx.x; {body} }}\n"
    )
    assert touched_before_wait(compile_ptx(source, ()), "k") == touched
