"""Engines as text and JSON, from their metadata alone; knows nothing of folders or terminals."""

import re
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import msgspec

from inkrt.commands.console import format_bytes, format_table
from inkrt.runtime.engine_file import DraftSpec, EngineConfig, MemoryTable, StateLayout
from inkrt.runtime.plan import (
    DTYPE_BYTES,
    Argument,
    Const,
    DType,
    Launch,
    Numbers,
    Plan,
    Ref,
    Refs,
)
from inkrt.runtime.tower_spec import TowerSpec

_SHORT_DTYPE = {"bfloat16": "bf16", "float32": "f32", "int32": "i32", "int64": "i64"}


def summary(config: EngineConfig, plans: Mapping[str, Plan]) -> list[str]:
    """What the engine is, what it can do and what it needs, in a screen."""
    model, state, memory = config.model, config.state, config.memory
    plugins = ", ".join(f"{name} v{version}" for name, version in sorted(config.plugins.items()))
    plugin_lines = textwrap.wrap(plugins, 88) or [""]
    rows = [
        (
            "model",
            f"{model.model_type}, {model.num_layers} layers, hidden size {model.hidden_size}",
        ),
        (
            "",
            f"{model.dtype}, vocabulary {model.vocab_size:,}, ends at {_ids(model.eos_token_ids)}",
        ),
        ("target", f"{config.target}, {_count(config.tp_size, 'rank')}"),
        ("context", f"{config.max_seq_len:,} positions, {_count(state.num_slots, 'session')}"),
        *([("drafter", _drafter(config.draft))] if config.draft else []),
        *(("tower", _tower(tower)) for tower in config.towers),
        (
            "memory",
            f"{format_bytes(memory.total)} per rank: {format_bytes(memory.weights)} weights,",
        ),
        (
            "",
            f"{format_bytes(memory.paged_state + memory.ring_state)} state, "
            f"{format_bytes(memory.arena + memory.kept)} scratch",
        ),
        ("plugins", plugin_lines[0]),
        *(("", line) for line in plugin_lines[1:]),
        ("checkpoint", config.checkpoint_fingerprint),
        ("format", f"{config.format} {config.format_version}, inkrt {config.inkrt_version}"),
        ("rebuild", config.rebuild_command),
    ]
    return [*format_table(rows), "", *_steps(plans)]


def memory(table: MemoryTable, state: StateLayout, plans: Mapping[str, Plan]) -> list[str]:
    """Bytes of one rank: what is held where, and what grows with the context."""
    rows = [["memory of a rank", "bytes", "", ""]]
    rows.append(["weights", f"{table.weights:,}", format_bytes(table.weights), ""])
    for name, total, kind, remark in (
        (
            "paged state",
            table.paged_state,
            "paged",
            f"{_count(state.num_pages, 'page')} of {state.page_tokens} positions, "
            f"{table.paged_bytes_per_token:,} bytes per position",
        ),
        ("ring state", table.ring_state, "ring", f"{_count(state.num_slots, 'slot')}"),
    ):
        rows.append([name, f"{total:,}", format_bytes(total), remark])
        groups = Counter(
            (re.sub(r"\b\d+\b", "*", buffer.name), buffer.dtype, buffer.shape)
            for buffer in state.buffers
            if buffer.kind == kind
        )
        for (pattern, dtype, shape), count in groups.items():
            size = count * prod(shape) * DTYPE_BYTES[dtype]
            rows.append([f"  {pattern}", f"{size:,}", "", f"{count} x {_type(dtype, shape)}"])
    rows.append(["scratch", f"{table.arena:,}", format_bytes(table.arena), "of the largest step"])
    rows += [[f"  {plan.name}", f"{plan.arena_bytes:,}", "", ""] for plan in _by_width(plans)]
    rows.append(["kept by launches", f"{table.kept:,}", format_bytes(table.kept), "of all steps"])
    rows.append(["total", f"{table.total:,}", format_bytes(table.total), ""])
    return format_table(rows, right=frozenset({1, 2}))


def launches(plan: Plan) -> list[str]:
    """A plan as a listing: results, operator, arguments, then tactic, bytes and module."""
    lines = [
        f"step {plan.name}: {_count(len(plan.launches), 'launch', 'launches')}, "
        f"{_count(plan.num_tokens, 'token')}, {_count(plan.num_rows, 'output row')}"
    ]
    lines += [
        f"  input {_name(plan, index, typed=True)}" for _, index in sorted(plan.inputs.items())
    ]
    for number, launch in enumerate(plan.launches):
        lines.append(f"{number:5}  {_call(plan, launch)}")
        lines.append(f"       # {launch.module or '-'}, {launch.tactic}, {launch.bytes:,} B")
    lines += [
        f"  output {name} = {_name(plan, index, typed=True)}"
        for name, index in sorted(plan.outputs.items())
    ]
    return lines


def to_json(config: EngineConfig, plans: Mapping[str, Plan], whole: Sequence[Plan]) -> str:
    """The configuration, a summary of every step and the launches of `whole` plans, as JSON."""
    content = {
        "config": config,
        "memory_total": config.memory.total,
        "steps": [
            {
                "name": plan.name,
                "num_tokens": plan.num_tokens,
                "num_rows": plan.num_rows,
                "num_launches": len(plan.launches),
                "launches_per_op": _ops(plan),
                "bytes": _moved_bytes(plan),
                "arena_bytes": plan.arena_bytes,
            }
            for plan in _by_width(plans)
        ],
        "plans": list(whole),
    }
    return msgspec.json.format(msgspec.json.encode(content, order="sorted"), indent=2).decode()


def difference(
    config_a: EngineConfig,
    plans_a: Mapping[str, Plan],
    config_b: EngineConfig,
    plans_b: Mapping[str, Plan],
) -> list[str]:
    """What differs between two engines, a line each; empty if nothing does."""
    flat_a, flat_b = (_flat(msgspec.to_builtins(config)) for config in (config_a, config_b))
    lines = [
        f"{key}: {_json(flat_a.get(key))} -> {_json(flat_b.get(key))}"
        for key in sorted(flat_a.keys() | flat_b.keys())
        if flat_a.get(key) != flat_b.get(key) and not key.startswith("files.")
    ]
    for step in sorted(plans_a.keys() & plans_b.keys()):
        if plans_a[step] == plans_b[step]:
            continue
        ops_a, ops_b = _ops(plans_a[step]), _ops(plans_b[step])
        changed = [
            f"{op} {ops_a.get(op, 0)} -> {ops_b.get(op, 0)}"
            for op in sorted(ops_a.keys() | ops_b.keys())
            if ops_a.get(op) != ops_b.get(op)
        ]
        lines.append(f"step {step}: {', '.join(changed) or 'the same launches, other tensors'}")
    for name in sorted(config_a.files.keys() | config_b.files.keys()):
        a, b = config_a.files.get(name), config_b.files.get(name)
        if a is None or b is None:
            lines.append(f"file {name}: only in {'A' if b is None else 'B'}")
        elif a != b:
            sizes = f"{a.size:,} -> {b.size:,} bytes, " if a.size != b.size else ""
            lines.append(f"file {name}: {sizes}sha256 {a.sha256[:12]} -> {b.sha256[:12]}")
    return lines


def _tower(tower: TowerSpec) -> str:
    sizes = " or ".join(str(step.num_rows) for step in tower.steps)
    what = "of several inputs" if tower.is_rowwise else "of one input"
    return f"{tower.kind}, token {tower.token_id}, steps of {sizes} rows {what}"


def _drafter(draft: DraftSpec) -> str:
    confidences = "with confidences" if draft.has_confidence else "without confidences"
    head = f" {draft.head} head," if draft.head else ""
    return f"{draft.method}, {_count(draft.block_size, 'draft')},{head} {confidences}"


def _steps(plans: Mapping[str, Plan]) -> list[str]:
    rows = [["step", "tokens", "launches", "bytes moved", "scratch"]]
    rows += [
        [
            plan.name,
            str(plan.num_tokens),
            str(len(plan.launches)),
            format_bytes(_moved_bytes(plan)),
            format_bytes(plan.arena_bytes),
        ]
        for plan in _by_width(plans)
    ]
    return format_table(rows, right=frozenset({1, 2, 3, 4}))


def _by_width(plans: Mapping[str, Plan]) -> list[Plan]:
    return sorted(plans.values(), key=lambda plan: (plan.num_tokens, plan.name))


def _ops(plan: Plan) -> dict[str, int]:
    return dict(sorted(Counter(launch.op for launch in plan.launches).items()))


def _moved_bytes(plan: Plan) -> int:
    return sum(launch.bytes for launch in plan.launches)


def _count(number: int, one: str, many: str | None = None) -> str:
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def _ids(ids: Sequence[int]) -> str:
    return "token " + ", ".join(map(str, ids)) if ids else "no token"


def _type(dtype: str, shape: Sequence[int]) -> str:
    return f"{_SHORT_DTYPE.get(dtype, dtype)}[{', '.join(map(str, shape))}]"


def _call(plan: Plan, launch: Launch) -> str:
    outputs = ", ".join(_name(plan, index, typed=True) for index in launch.outputs)
    arguments = ", ".join(f"{name}={_argument(plan, a)}" for name, a in launch.args.items())
    return f"{outputs} = {launch.op}({arguments})" if outputs else f"{launch.op}({arguments})"


def _argument(plan: Plan, argument: Argument) -> str:
    match argument:
        case Ref(index):
            return _name(plan, index)
        case Refs(indices):
            return f"[{', '.join(_name(plan, index) for index in indices)}]"
        case Const(value):
            return repr(value)
        case Numbers(values):
            return repr(list(values))
        case DType(name):
            return name


def _name(plan: Plan, index: int, *, typed: bool = False) -> str:
    """`%name`; parameters and state go by the name of their storage."""
    tensor = plan.tensors[index]
    name = f"%{tensor.name}" if tensor.space in ("arena", "input") else tensor.storage
    return f"{name}: {_type(tensor.dtype, tensor.shape)}" if typed else name


def _flat(value: object, prefix: str = "") -> dict[str, Any]:
    """Leaves of nested mappings by dotted path; lists are leaves."""
    if not isinstance(value, dict):
        return {prefix: value}
    flat: dict[str, Any] = {}
    for key, item in value.items():
        flat |= _flat(item, f"{prefix}.{key}" if prefix else str(key))
    return flat


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()
