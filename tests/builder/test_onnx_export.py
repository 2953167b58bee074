"""Graphs as ONNX: `onnx.checker` takes them, and they compute what the graphs do.

Operators of ours are run by their references, from nothing but what stands in the model; standard
operators by the evaluator of the package `onnx`, towers by onnxruntime.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from graph_run import assert_same_bits, copies, run_graph, step_inputs
from small_flint import inputs_of, rank_states, rank_weights, small_graph, write_small
from small_model import DECODE, VERIFY3
from small_model import rank_states as inkling2_states
from small_model import rank_weights as inkling2_weights
from small_model import small_graph as inkling2_graph
from small_model import write_small as write_inkling2
from test_loop_graph import fused as fused_loop
from torch import Tensor
from typer.testing import CliRunner

from inkrt.builder.build import prepare
from inkrt.builder.checkpoint import open_checkpoint
from inkrt.builder.onnx_export import to_onnx, write_steps
from inkrt.builder.options import BuildOptions
from inkrt.builder.passes import PASSES
from inkrt.builder.rewrite import calls
from inkrt.builder.towers import TowerStep
from inkrt.builder.trace import StepGraph, trace_tower
from inkrt.commands import build
from inkrt.engines.catalog import find_definition
from inkrt.engines.inkling import audio as inkling_audio
from inkrt.engines.inkling import vision as inkling_vision
from inkrt.engines.interface import Sharding
from inkrt.engines.tiny import inkling, inkling2
from inkrt.engines.tiny.checkpoint import write_checkpoint
from inkrt.engines.tiny.drafter import TinyDrafter
from inkrt.engines.tower import Tower
from inkrt.errors import BuildError
from inkrt.plugins.registry import plugins
from inkrt.runtime.engine_file import StepSpec, read_plans
from inkrt.runtime.plan import Plan, weight_specs

onnx = pytest.importorskip("onnx")
evaluator = pytest.importorskip("onnx.reference")

ONE = Sharding(1, "experts")
DTYPES = {
    onnx.TensorProto.BFLOAT16: torch.bfloat16,
    onnx.TensorProto.FLOAT: torch.float32,
    onnx.TensorProto.INT32: torch.int32,
    onnx.TensorProto.INT64: torch.int64,
    onnx.TensorProto.UINT8: torch.uint8,
}


def fused(graph: StepGraph) -> StepGraph:
    for run_pass in PASSES:
        graph = run_pass(graph)
    return graph


def call_of_ours(node: Any, known: dict[str, Tensor]) -> dict[str, Tensor]:
    """Results of a node of domain `ai.ink` by name, from the node alone."""
    plugin = plugins()[node.op_type]
    given = {each.name: onnx.helper.get_attribute_value(each) for each in node.attribute}
    names = [name.decode() for name in given.pop("input_names")]
    writes = [name.decode() for name in given.pop("writes", [])]
    tensors = dict(zip(names, (known[name] for name in node.input), strict=True))
    tensors |= {name: tensors[name].clone() for name in writes}
    arguments: dict[str, Any] = {}
    for argument in plugin.op._schema.arguments:
        name, kind = argument.name, str(argument.type)
        if "List[Tensor]" in kind or "List[Optional[Tensor]]" in kind:
            arguments[name] = [tensors[x] for x in names if x.startswith(f"{name}[")]
        elif "Tensor" in kind:
            arguments[name] = tensors.get(name)
        else:
            value = given.pop(name, None)
            is_dtype = str(argument.real_type) == "ScalarType"
            arguments[name] = (
                DTYPES[value] if is_dtype else bool(value) if kind == "bool" else value
            )
    assert given == {}
    results = plugin.reference(**arguments)
    values = [] if results is None else [results] if isinstance(results, Tensor) else [*results]
    return dict(zip(node.output, [*values, *(tensors[x] for x in writes)], strict=True))


def call_of_standard(node: Any, known: dict[str, Tensor]) -> dict[str, Tensor]:
    """Results of a view; bfloat16, which NumPy lacks, moves as int16."""
    given = {name: known[name] for name in node.input}
    dtype = known[node.input[0]].dtype
    arrays = {
        name: (value.view(torch.int16) if value.dtype is torch.bfloat16 else value).numpy()
        for name, value in given.items()
    }
    (result,) = evaluator.ReferenceEvaluator(node).run(None, arrays)
    value = torch.from_numpy(np.ascontiguousarray(result))
    return {node.output[0]: value.view(dtype) if dtype is torch.bfloat16 else value}


def run_model(model: Any, known: dict[str, Tensor]) -> dict[str, Tensor]:
    """All values of a model; types and shapes are those that it declares."""
    constants = {x.name: onnx.numpy_helper.to_array(x) for x in model.graph.initializer}
    known = known | {name: torch.tensor(value) for name, value in constants.items()}
    for node in model.graph.node:
        call = call_of_ours if node.domain == "ai.ink" else call_of_standard
        known |= call(node, known)
    for declared in (*model.graph.input, *model.graph.value_info, *model.graph.output):
        kind = declared.type.tensor_type
        value = known[declared.name]
        assert value.dtype is DTYPES[kind.elem_type], declared.name
        assert list(value.shape) == [dim.dim_value for dim in kind.shape.dim], declared.name
    return known


def assert_same_as_graph(
    graph: StepGraph,
    weights: dict[str, Tensor],
    state: dict[str, Tensor],
    inputs: dict[str, Tensor],
) -> None:
    model = to_onnx(graph)
    onnx.checker.check_model(model, full_check=True)
    named = {f"weight.{name}": value for name, value in weights.items()}
    named |= {f"state.{name}": value for name, value in state.items()}
    values = run_model(model, named | inputs | {"rank": torch.zeros(1, dtype=torch.int32)})
    written = copies([state])
    (expected,) = run_graph(graph, [weights], written, inputs)
    for name, value in zip(graph.outputs, expected, strict=False):
        assert_same_bits(values[f"output.{name}"], value, name)
    last = {x.name for x in model.graph.output if x.name.startswith("state.")}
    assert {name.split("@")[0] for name in last} == {f"state.{name}" for name in written[0]}
    for name in last:
        buffer = name.split("@")[0].removeprefix("state.")
        assert not torch.equal(values[name], state[buffer]), name
        assert_same_bits(values[name], written[0][buffer], name)


@pytest.mark.parametrize("is_fused", [False, True])
def test_models_compute_what_graphs_of_inkling2_do(checkpoint: Path, *, is_fused: bool) -> None:
    graph = inkling2_graph(VERIFY3, 1, dtype=torch.float32)
    if is_fused:
        graph = fused(graph)
    else:  # a buffer that is written twice
        (write, *_) = calls(graph.module.graph, "kv_write")
        with graph.module.graph.inserting_after(write):
            graph.module.graph.node_copy(write)
        assert {"state.layers.0.attn.k_cache@1", "state.layers.0.attn.k_cache@2"} <= {
            x.name for x in (*to_onnx(graph).graph.value_info, *to_onnx(graph).graph.output)
        }
    (weights,) = inkling2_weights(checkpoint, 1, dtype=torch.float32)
    (state,) = inkling2_states(1, torch.float32)
    assert_same_as_graph(graph, weights, state, step_inputs(3, 2))


def test_models_compute_what_graphs_of_flint_do(tmp_path: Path) -> None:
    """NVFP4 weights, in bfloat16."""
    graph = fused(small_graph(DECODE, ONE, is_nvfp4=True))
    (weights,) = rank_weights(write_small(tmp_path / "x", format="gguf"), ONE)
    (state,) = rank_states(ONE)
    assert_same_as_graph(graph, weights, state, inputs_of(1, 1))


def check_folder(folder: Path, plans: dict[str, Plan], towers: set[str]) -> None:
    """Every step is there with every launch, towers in standard operators too, no weights."""
    standard = {f"{step}.standard.onnx" for step in towers}
    steps = {f"{step}.onnx" for step in plans}
    assert {path.name for path in folder.iterdir()} == steps | standard
    weights: set[str] = set()
    for name in steps | standard:
        model = onnx.load(folder / name)
        onnx.checker.check_model(model, full_check=True)
        named = {x.name for x in model.graph.input if x.name.startswith("weight.")}
        weights |= {x.removeprefix("weight.") for x in named}
        # Scalars, shapes, and ranges of towers.
        assert all(len(constant.dims) <= 1 for constant in model.graph.initializer)
        ours = [node.op_type for node in model.graph.node if node.domain == "ai.ink"]
        plan = plans[name.split(".")[0]]
        assert ours == ([] if name in standard else [launch.op for launch in plan.launches])
    assert weights == weight_specs(plans).keys()


def test_a_build_exports_inkling_its_towers_and_its_heads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inkling, "NUM_LAYERS", 3)
    for module in (inkling_vision, inkling_audio):
        monkeypatch.setattr(module, "_SIZES", (16,))
    write_checkpoint(tmp_path / "x", model="inkling", dtype="bfloat16")
    options = BuildOptions(max_seq_len=60, max_verify_tokens=2, prefill_chunk=12)
    folder = tmp_path / "onnx"
    plans = prepare(open_checkpoint(tmp_path / "x"), options, onnx_folder=folder).plans
    assert {"decode", "draft"} < plans.keys()
    check_folder(folder, plans, {"vision16", "audio16"})


def test_the_command_exports_a_drafter_on_two_ranks(tmp_path: Path) -> None:
    write_inkling2(tmp_path / "x", dtype="bfloat16", drafter=TinyDrafter("embedded"))
    folder, engine = tmp_path / "a" / "b", tmp_path / "engine"
    options = ["--tp-size=2", "--max-seq-len=200", "--max-verify-tokens=1", "--prefill-chunk=16"]
    arguments = [str(tmp_path / "x"), "--towers=none", "-o", str(engine), "--onnx", str(folder)]
    result = CliRunner().invoke(build.make_app(), [*arguments, *options])
    assert result.exit_code == 0, result.stderr
    assert f"onnx {folder}: 3 steps" in result.stderr
    check_folder(folder, read_plans(engine, 0), set())


def test_a_looped_model_has_every_shared_weight_once() -> None:
    graph = fused_loop(1)
    model = to_onnx(graph)
    onnx.checker.check_model(model, full_check=True)
    named = [x.name for x in model.graph.input if x.name.startswith("weight.")]
    assert sorted(named) == sorted(f"weight.{name}" for name in graph.weights.values())
    assert model.SerializeToString(deterministic=True) == to_onnx(graph).SerializeToString(
        deterministic=True
    )


def tower_of(model: Any, kind: str) -> Tower:
    values = model.config("float32")
    definition = find_definition(values)
    towers = definition.towers(values, definition.parse_config(values))
    return next(tower for tower in towers if tower.kind == kind)


def image_inputs(num_tiles: int, tower: Tower) -> dict[str, Tensor]:
    """Of Inkling-2: two rows of three tiles of two by two patches, padding behind."""
    inputs = {
        name: torch.zeros(shape, dtype=kind)
        for name, (shape, kind) in tower.inputs(num_tiles, torch.float32).items()
    }
    tiles = [(row, column) for row in range(2) for column in range(3)]
    places = [(2 * r + i + 1, 2 * c + j + 1) for r, c in tiles for i in range(2) for j in range(2)]
    inputs["patches"][:24] = torch.randn(24, inputs["patches"].shape[1])
    inputs["positions"][1:25] = torch.tensor(places)
    inputs["grid"] += torch.tensor([4, 6], dtype=torch.int32)
    inputs["num_rows"] += 25
    return inputs


@pytest.mark.parametrize(
    ("model", "kind", "size"),
    [(inkling2, "vision", 7), (inkling, "vision", 5), (inkling, "audio", 3)],
    ids=["inkling2", "inkling", "inkling audio"],
)
def test_towers_in_standard_operators_run_in_onnxruntime(model: Any, kind: str, size: int) -> None:
    """To within roundings of float32 of the references of our operators."""
    runtime = pytest.importorskip("onnxruntime")
    torch.manual_seed(3)
    tower = tower_of(model, kind)
    step = StepSpec(f"{kind}{size}", size, size)
    module = TowerStep(tower, torch.float32)
    exported = to_onnx(trace_tower(module, tower, step, 1, torch.float32, is_plain=True))
    onnx.checker.check_model(exported, full_check=True)
    assert {node.domain for node in exported.graph.node} == {""}
    assert {each.domain for each in exported.opset_import} == {""}

    weights = {name: 0.3 * torch.randn(p.shape) for name, p in module.named_parameters()}
    module.load_state_dict(weights, assign=True)
    num_rows = size
    if model is inkling2:
        inputs, num_rows = image_inputs(size, tower), 6
    elif kind == "vision":
        inputs = {"pixels": torch.randn(tower.inputs(size, torch.float32)["pixels"][0])}
    else:
        shape = tower.inputs(size, torch.float32)["levels"][0]
        inputs = {"levels": torch.randint(5, shape, dtype=torch.int32)}
    result = module(*inputs.values())
    (expected,) = result if isinstance(result, tuple) else (result,)
    session = runtime.InferenceSession(
        exported.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    given = inputs | {f"weight.{name}": value for name, value in weights.items()}
    (features,) = session.run(None, {name: value.numpy() for name, value in given.items()})
    difference = torch.from_numpy(features)[:num_rows] - expected[:num_rows]
    assert expected[:num_rows].norm() > 1
    assert difference.norm() / expected[:num_rows].norm() < 2e-6


def test_what_has_no_form_in_onnx_is_refused() -> None:
    graph = inkling2_graph(DECODE, 1)
    softcap = calls(graph.module.graph, "softcap")[0]
    with graph.module.graph.inserting_after(softcap):
        other = graph.module.graph.call_function(torch.ops.aten.erfinv.default, (softcap,))
    other.meta["val"] = softcap.meta["val"]
    with pytest.raises(BuildError, match=rf"node {other.name}: aten.erfinv.default has no form"):
        to_onnx(graph)

    graph = inkling2_graph(DECODE, 1)
    softcap = calls(graph.module.graph, "softcap")[0]
    with graph.module.graph.inserting_after(softcap):
        scaled = graph.module.graph.call_function(
            torch.ops.aten.add.Tensor, (softcap, 1.0), {"alpha": 2.0}
        )
    scaled.meta["val"] = softcap.meta["val"]
    with pytest.raises(BuildError, match=rf"node {scaled.name}: aten.add.Tensor with alpha has no"):
        to_onnx(graph)

    graph = inkling2_graph(DECODE, 1)
    (write, *_) = calls(graph.module.graph, "kv_write")
    cache = next(node for node in write.all_input_nodes if node.name in graph.state)
    with graph.module.graph.inserting_before(write):
        view = graph.module.graph.call_function(torch.ops.aten.select.int, (cache, 0, 0))
    view.meta["val"] = cache.meta["val"][0]
    with pytest.raises(BuildError, match=rf"node {view.name}: a view of state layers\.0\..*_cache"):
        to_onnx(graph)


def test_a_folder_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "graphs").write_text("")
    with pytest.raises(BuildError, match=r"onnx folder .*graphs cannot be written \(File exists\)"):
        write_steps(tmp_path / "graphs", [inkling2_graph(DECODE, 1)], [])


@pytest.mark.parametrize("further", [["--dry-run"], ["-o", "engine"]])
def test_a_missing_package_is_told_in_one_line(
    checkpoint: Path, tmp_path: Path, further: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "onnx", None)
    monkeypatch.chdir(tmp_path)
    arguments = [str(checkpoint), "--quiet", "--onnx", "graphs", *further]
    result = CliRunner().invoke(build.make_app(), arguments)
    assert (result.exit_code, result.stderr) == (
        1,
        "error: writing graphs as ONNX needs the package onnx; install it with: "
        "pip install 'inkrt[onnx]'\n",
    )
    assert list(tmp_path.iterdir()) == []
