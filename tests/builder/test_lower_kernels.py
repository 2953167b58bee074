"""Kernel parameters of calls with lists: tables of addresses, weights packed element by element.

A decode step whose expert layers are one launch and a verify step whose layers are five launches
each are lowered for one engine, with made-up tactics and without a compiler.
"""

from collections.abc import Callable, Sequence
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch
from small_flint import small_graph, small_module
from small_model import DECODE, VERIFY3
from torch import Tensor
from torch.fx import Node

from inkrt.builder.lower import Target, lower
from inkrt.builder.lower_kernels import KernelLowering, PackedWeights
from inkrt.builder.pack import packed_tensors
from inkrt.builder.passes import passes_for
from inkrt.engines.interface import Sharding
from inkrt.errors import BuildError
from inkrt.plugins.registry import Plugin
from inkrt.plugins.tactic import (
    InputPointer,
    Int32,
    KernelLaunch,
    Output,
    Packing,
    Param,
    Peers,
    Pointer,
    Scratch,
    Table,
    Tactic,
    TensorArg,
)
from inkrt.runtime.engine_file import EngineCode, StepSpec, encode_code, plan_file, read_code
from inkrt.runtime.plan import (
    IntParam,
    Launch,
    PeersParam,
    Plan,
    TableParam,
    TensorParam,
    TensorSpec,
)

ONE = Sharding(1, "experts")
LAYERS = (2, 3)
TABLE = ("qkv", "qkv_global_scale", "k_cache", "gate_up", "sinks")


def pack(codes: Tensor, scales: Tensor) -> Tensor:
    return torch.cat([codes.flatten(), scales.flatten()])


def num_bytes(shapes: Sequence[TensorArg]) -> int:
    assert [shape.dtype for shape in shapes] == [torch.uint8] * 2
    return sum(torch.Size(shape.shape).numel() for shape in shapes)


def packing(name: str, layout: str = "joined") -> Packing:
    return Packing((name, f"{name}_scales"), layout, pack, num_bytes)


def kernel(*params: Param) -> KernelLaunch:
    return KernelLaunch(Path("x.cu"), "x", (), (1, 1, 1), (1, 1, 1), params)


def tactics(layout: str = "joined") -> dict[str, Tactic]:
    """`layout` is that of the single layers."""
    layers = kernel(
        Table(TABLE), Pointer("x"), Pointer("down", 1), Output(1), Scratch("s", 8, 0), Int32(7),
        Table(TABLE),
    )  # fmt: skip
    qkv = kernel(Pointer("qkv"), Pointer("k_cache"))
    moe = kernel(Pointer("gate_up"), InputPointer("num_tokens"))
    return {
        "flint_layers": Tactic("all", (layers,), 9, 0, (packing("qkv"), packing("gate_up"))),
        "norm_qkv_rope": Tactic("one", (qkv,), 9, 0, (packing("qkv", layout),)),
        "flint_moe": Tactic("one", (moe,), 9, 0, (packing("gate_up"),)),
    }


Build = Callable[..., tuple[dict[str, Plan], PackedWeights]]


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch) -> Build:
    """Lowers both steps."""

    def build_with(layout: str = "joined") -> tuple[dict[str, Plan], PackedWeights]:
        known = tactics(layout)

        def choose_tactic(_node: Node, plugin: Plugin, *_: object) -> Tactic:
            return known.get(plugin.name, Tactic("none", (), 0, 0))

        monkeypatch.setattr("inkrt.builder.lower.choose_tactic", choose_tactic)
        module = import_module("inkrt.builder.passes.fuse_flint_layers")
        monkeypatch.setattr(
            module,
            "find_tactics",
            lambda name, _target, args: [known[name]] if args["x"].shape[0] == 1 else [],
        )
        target = Target("gpu", SimpleNamespace(compile=lambda _: "cubin"))  # type: ignore[arg-type]
        return {step.name: _plan(step, target) for step in (DECODE, VERIFY3)}, target.packed

    return build_with


def _plan(step: StepSpec, target: Target) -> Plan:
    graph = small_graph(step, ONE, is_nvfp4=True)
    for run_pass in passes_for(target.name):
        graph = run_pass(graph)
    return lower(graph, target)


def launch_of(plan: Plan, op: str) -> Launch:
    return next(launch for launch in plan.launches if launch.op == op)


def specs(plan: Plan, tensors: Sequence[int]) -> list[TensorSpec]:
    return [plan.tensors[index] for index in tensors]


def test_table_has_a_row_per_layer(build: Build) -> None:
    plan = build()[0]["decode"]
    (of_layers,) = launch_of(plan, "flint_layers").kernels
    table, x, down, out, scratch, number, again = of_layers.params
    assert isinstance(table, TableParam)
    assert table == again
    found = [(spec.space, spec.storage) for spec in specs(plan, table.tensors)]
    assert found == [
        entry
        for n in LAYERS
        for entry in (
            ("weight", f"layers.{n}.attn.qkv.weight"),
            ("weight", f"layers.{n}.attn.qkv.global_scale"),
            ("state", f"layers.{n}.attn.k_cache"),
            ("weight", f"layers.{n}.mlp.gate_up.weight"),
            ("weight", f"layers.{n}.attn.sinks"),
        )
    ]
    assert number == IntParam(7)
    indices = [param.tensor for param in (x, down, out, scratch) if isinstance(param, TensorParam)]
    spaces = [(spec.space, spec.storage) for spec in specs(plan, indices)]
    down_of_last = ("weight", "layers.3.mlp.down.weight")
    assert spaces == [("arena", ""), down_of_last, ("arena", ""), ("scratch", "")]


def test_kernels_may_read_inputs_that_are_no_arguments(build: Build) -> None:
    plan = build()[0]["verify3"]
    launch = launch_of(plan, "flint_moe")
    _, num_tokens = launch.kernels[0].params
    assert "num_tokens" not in launch.args
    assert num_tokens == TensorParam(plan.inputs["num_tokens"])
    (spec,) = specs(plan, [num_tokens.tensor])
    assert (spec.space, spec.storage, spec.dtype) == ("input", "num_tokens", "int32")


def test_steps_share_packed_weights(build: Build) -> None:
    """Whether they run layers in one launch or one by one, and so do the weight files."""
    plans, packed = build()
    assert [len([x for x in p.launches if x.op == "flint_layers"]) for p in plans.values()] == [
        1,
        0,
    ]
    tensors = {x.name: x for x in packed_tensors(small_module(ONE, is_nvfp4=True), packed)}
    for n in LAYERS:
        for name in (f"layers.{n}.attn.qkv", f"layers.{n}.mlp.gate_up"):
            layout, sources = packed.packings[f"{name}.weight"]
            assert (layout.name, sources) == ("joined", (f"{name}.weight", f"{name}.scales"))
            size = tensors[f"{name}.weight"].num_bytes
            assert f"{name}.scales" not in tensors
            for plan in plans.values():
                read = [
                    spec for spec in plan.tensors
                    if spec.storage == f"{name}.weight" and len(spec.shape) == 1
                ]  # fmt: skip
                assert [spec.shape for spec in read] == [(size,)]
    # Dense layers read their weights through the same packing, in both steps.
    assert set(packed.packings) == {
        *(f"layers.{n}.attn.qkv.weight" for n in range(4)),
        *(f"layers.{n}.mlp.gate_up.weight" for n in LAYERS),
    }


def test_elements_of_a_table_are_packed_ones(build: Build) -> None:
    plan = build()[0]["decode"]
    table = launch_of(plan, "flint_layers").kernels[0].params[0]
    assert isinstance(table, TableParam)
    rows = specs(plan, table.tensors)
    for spec in (*rows[0::5], *rows[3::5]):
        assert (spec.dtype, len(spec.shape), spec.offset) == ("uint8", 1, 0)
    assert rows[0].shape != rows[3].shape


def test_layers_must_want_the_layout_of_the_run(build: Build) -> None:
    with pytest.raises(BuildError) as caught:
        build("other")
    assert str(caught.value) == (
        "weight layers.2.attn.qkv.weight is read as joined and as other; one engine can hold one "
        "layout only, exclude one of the tactics"
    )


def test_inputs_of_a_run_live_until_it_ends(build: Build) -> None:
    """What a launch writes shares no byte with what it reads, through a table or not."""
    for plan in build()[0].values():
        for launch in plan.launches:
            for kernel_of_launch in launch.kernels:
                read = [
                    index for param in kernel_of_launch.params if isinstance(param, TableParam)
                    for index in param.tensors
                ]  # fmt: skip
                assert all(plan.tensors[index].space != "arena" for index in read)
    plan = build()[0]["decode"]
    launch = launch_of(plan, "flint_layers")
    x = plan.tensors[launch.args["x"].tensor]  # type: ignore[union-attr]
    delta = plan.tensors[launch.args["delta"].tensor]  # type: ignore[union-attr]
    places = sorted(
        (spec.offset, spec.offset + 2 * spec.shape[0] * spec.shape[1])
        for spec in (x, delta, *specs(plan, launch.outputs))
    )
    assert all(before[1] <= after[0] for before, after in pairwise(places))


def test_plans_with_tables_come_back_from_the_file(build: Build, tmp_path: Path) -> None:
    plans, _ = build()
    (tmp_path / plan_file(0)).write_bytes(encode_code(EngineCode(plans)))
    assert read_code(tmp_path, 0).plans == plans
    in_json = msgspec.json.decode(msgspec.json.encode(plans), type=dict[str, Plan])
    assert in_json == plans
    launch = launch_of(read_code(tmp_path, 0).plans["decode"], "flint_layers")
    assert [type(value) for value in launch.args["rope_thetas"].values] == [float] * 2  # type: ignore[union-attr]
    assert [type(value) for value in launch.args["windows"].values] == [int] * 2  # type: ignore[union-attr]


def test_a_table_of_peers_is_a_parameter_by_itself() -> None:
    """It is one for all launches of an engine, so a plan only says how much a launch sends."""
    memory = SimpleNamespace(specs=[], inputs={})
    compiler = SimpleNamespace(compile=lambda _: "code")
    lowering = KernelLowering(memory, compiler, PackedWeights())  # type: ignore[arg-type]
    tactic = Tactic("push", (kernel(Peers(640), Int32(2)),), 0, 0)
    (lowered,) = lowering.lower(tactic, {}, ())
    assert lowered.params == (PeersParam(640), IntParam(2))
