"""ATen nodes as standard ONNX operators: views of any graph, and what towers compute.

Every size is fixed, as in the steps of an engine. A rule writes the nodes of one ATen operator;
what has no rule is refused by name. Arithmetic follows torch: operands become their common type,
and what torch computes in float32 and rounds once is computed so.
"""

import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from inkrt.builder.onnx_model import OnnxModel, onnx_type
from inkrt.builder.rewrite import arguments
from inkrt.errors import BuildError

aten = torch.ops.aten
Rule = Callable[[OnnxModel, Node, dict[str, Any]], None]
# Arguments that say nothing about values.
_IGNORED = frozenset(
    {"device", "layout", "pin_memory", "memory_format", "implicit", "cudnn_enable"}
)


def add_aten(model: OnnxModel, node: Node, where: str) -> None:
    """Write an ATen call, or the choice of one output of it.

    Raises:
        BuildError: there is no rule for it.
    """
    if node.target is operator.getitem:
        _item_of_unbind(model, node, where)
        return
    rule = RULES.get(node.target)
    if rule is None:
        raise BuildError(
            f"{where}: {node.target} has no form in standard ONNX operators here; "
            f"builder/onnx_aten.py lists those that have"
        )
    args = {key: value for key, value in arguments(node).items() if key not in _IGNORED}
    rule(model, node, args)


def _result(model: OnnxModel, node: Node, op: str, inputs: list[str], **attributes: Any) -> None:
    """Write the operator that makes the node's own value."""
    model.add_node(op, inputs, [node.name], **attributes)
    model.add_value(node.name, node.meta["val"])
    model.set_name(node, node.name)


def _operand(model: OnnxModel, value: Any, dtype: torch.dtype) -> str:
    """A node's value, or a number, in a type."""
    if not isinstance(value, Node):
        return model.add_constant(torch.tensor(value, dtype=dtype))
    if value.meta["val"].dtype is dtype:
        return model.name_of(value)
    return model.add_helper("Cast", [model.name_of(value)], to=onnx_type(dtype))


def _require_only(node: Node, args: dict[str, Any], *names: str) -> None:
    """Check that a call sets no further options."""
    if further := args.keys() - set(names):
        raise BuildError(
            f"node {node.name}: {node.target} with {', '.join(sorted(further))} has no form in "
            f"standard ONNX operators here; see builder/onnx_aten.py"
        )


def _meta(value: Any) -> Any:
    return value.meta["val"] if isinstance(value, Node) else value


def _binary(op: str, first: str, second: str, model: OnnxModel, node: Node, args: Any) -> None:
    _require_only(node, args, first, second)
    a, b = args[first], args[second]
    dtype = torch.result_type(_meta(a), _meta(b))
    if op == "Div" and not dtype.is_floating_point:
        dtype = node.meta["val"].dtype
    _result(model, node, op, [_operand(model, a, dtype), _operand(model, b, dtype)])


def _unary(op: str, model: OnnxModel, node: Node, args: Any) -> None:
    _require_only(node, args, "self")
    _result(model, node, op, [_operand(model, args["self"], node.meta["val"].dtype)])


def _square(model: OnnxModel, node: Node, args: Any) -> None:
    x = model.name_of(args["self"])
    _result(model, node, "Mul", [x, x])


def _rsqrt(model: OnnxModel, node: Node, args: Any) -> None:
    root = model.add_helper("Sqrt", [model.name_of(args["self"])])
    _result(model, node, "Reciprocal", [root])


def _gelu(model: OnnxModel, node: Node, args: Any) -> None:
    _require_only(node, args, "self")
    dtype = node.meta["val"].dtype
    x = _operand(model, args["self"], torch.float32)
    if dtype is torch.float32:
        _result(model, node, "Gelu", [x])
    else:
        _result(model, node, "Cast", [model.add_helper("Gelu", [x])], to=onnx_type(dtype))


def _cast(model: OnnxModel, node: Node, args: Any) -> None:
    _result(model, node, "Cast", [model.name_of(args["self"])], to=onnx_type(args["dtype"]))


def _clamp(model: OnnxModel, node: Node, args: Any) -> None:
    x: Node = args["self"]
    dtype = x.meta["val"].dtype
    bounds = [args.get(name) for name in ("min", "max")]
    given = ["" if bound is None else _operand(model, bound, dtype) for bound in bounds]
    _result(model, node, "Clip", [model.name_of(x), *given])


def _masked_fill(model: OnnxModel, node: Node, args: Any) -> None:
    fill = _operand(model, args["value"], node.meta["val"].dtype)
    inputs = [model.name_of(args["mask"]), fill, model.name_of(args["self"])]
    _result(model, node, "Where", inputs)


def _reduce(op: str, model: OnnxModel, node: Node, args: Any) -> None:
    x = _operand(model, args["self"], node.meta["val"].dtype)
    axes = model.add_numbers(args["dim"])
    _result(model, node, op, [x, axes], keepdims=int(args.get("keepdim", False)))


def _softmax(model: OnnxModel, node: Node, args: Any) -> None:
    x = _operand(model, args["self"], node.meta["val"].dtype)
    _result(model, node, "Softmax", [x], axis=args["dim"])


def _layer_norm(model: OnnxModel, node: Node, args: Any) -> None:
    inputs = [model.name_of(args[name]) for name in ("input", "weight", "bias")]
    axis = -len(args["normalized_shape"])
    # Its sums are float32 (`stash_type` 1).
    _result(model, node, "LayerNormalization", inputs, axis=axis, epsilon=args["eps"])


def _linear(model: OnnxModel, node: Node, args: Any) -> None:
    weight = model.add_helper("Transpose", [model.name_of(args["weight"])], perm=[1, 0])
    inputs = [model.name_of(args["input"]), weight]
    if args.get("bias") is None:
        _result(model, node, "MatMul", inputs)
        return
    product = model.add_helper("MatMul", inputs)
    _result(model, node, "Add", [product, model.name_of(args["bias"])])


def _rows(table: str, index: str, model: OnnxModel, node: Node, args: Any) -> None:
    """Rows of a table that an integer tensor names."""
    place = args[index]
    if isinstance(place, list | tuple):
        if len(place) != 1:
            raise BuildError(f"node {node.name}: {node.target} by {len(place)} indices, expected 1")
        place = place[0]
    _result(model, node, "Gather", [model.name_of(args[table]), model.name_of(place)], axis=0)


def _concat(model: OnnxModel, node: Node, args: Any) -> None:
    dtype = node.meta["val"].dtype
    parts = [_operand(model, part, dtype) for part in args["tensors"]]
    _result(model, node, "Concat", parts, axis=args.get("dim", 0))


def _stack(model: OnnxModel, node: Node, args: Any) -> None:
    axis = args.get("dim", 0)
    axes = model.add_numbers([axis])
    parts = [model.add_helper("Unsqueeze", [model.name_of(x), axes]) for x in args["tensors"]]
    _result(model, node, "Concat", parts, axis=axis)


def _constant(model: OnnxModel, node: Node, args: Any) -> None:
    """What depends on no tensor is computed now."""
    value: Tensor = node.target(**args, device="cpu")  # type: ignore[operator]
    _result(model, node, "Identity", [model.add_constant(value)])


def _unbind(_model: OnnxModel, _node: Node, _args: Any) -> None:
    """Its outputs are written one by one, where they are chosen."""


def _item_of_unbind(model: OnnxModel, node: Node, where: str) -> None:
    source, position = node.args
    assert isinstance(source, Node)
    if source.target is not aten.unbind.int:
        raise BuildError(f"{where}: an output of {source.target} has no form in ONNX here")
    args = arguments(source)
    index = model.add_constant(torch.tensor(position))
    _result(model, node, "Gather", [model.name_of(args["self"]), index], axis=args.get("dim", 0))


def _reshape(model: OnnxModel, node: Node, args: Any) -> None:
    shape = model.add_numbers(node.meta["val"].shape)
    _result(model, node, "Reshape", [model.name_of(args["self"]), shape])


def _expand(model: OnnxModel, node: Node, args: Any) -> None:
    shape = model.add_numbers(node.meta["val"].shape)
    _result(model, node, "Expand", [model.name_of(args["self"]), shape])


def _transpose(model: OnnxModel, node: Node, args: Any) -> None:
    x: Node = args["self"]
    order = list(range(x.meta["val"].dim()))
    if "dims" in args:
        order = [dim % len(order) for dim in args["dims"]]
    elif "dim0" in args:
        first, second = args["dim0"], args["dim1"]
        order[first], order[second] = order[second], order[first]
    else:
        order.reverse()  # aten.t: a matrix, or what it leaves as it is
    _result(model, node, "Transpose", [model.name_of(x)], perm=order)


def _select(model: OnnxModel, node: Node, args: Any) -> None:
    index = model.add_constant(torch.tensor(args["index"]))
    _result(model, node, "Gather", [model.name_of(args["self"]), index], axis=args["dim"])


def _slice(model: OnnxModel, node: Node, args: Any) -> None:
    x: Node = args["self"]
    dim, step = args.get("dim", 0), args.get("step", 1)
    size = x.meta["val"].shape[dim]
    start, end, _ = slice(args.get("start"), args.get("end"), step).indices(size)
    numbers = [model.add_numbers([number]) for number in (start, end, dim, step)]
    _result(model, node, "Slice", [model.name_of(x), *numbers])


def _nothing(_model: OnnxModel, _node: Node, _args: Any) -> None:
    """Export puts an assertion before conversions; it has no value."""


_identity = partial(_unary, "Identity")
RULES: dict[Any, Rule] = {
    aten._assert_tensor_metadata.default: _nothing,
    aten.alias.default: _identity,
    aten.clone.default: _identity,
    aten.detach.default: _identity,
    aten.expand.default: _expand,
    aten.permute.default: _transpose,
    aten.select.int: _select,
    aten.slice.Tensor: _slice,
    aten.squeeze.dim: _reshape,
    aten.t.default: _transpose,
    aten.transpose.int: _transpose,
    aten.unsqueeze.default: _reshape,
    aten.view.default: _reshape,
    aten.unbind.int: _unbind,
    aten.arange.default: _constant,
    aten.arange.start_step: _constant,
    aten.abs.default: partial(_unary, "Abs"),
    aten.bitwise_not.default: partial(_unary, "Not"),
    aten.cos.default: partial(_unary, "Cos"),
    aten.floor.default: partial(_unary, "Floor"),
    aten.reciprocal.default: partial(_unary, "Reciprocal"),
    aten.sin.default: partial(_unary, "Sin"),
    aten.gelu.default: _gelu,
    aten.rsqrt.default: _rsqrt,
    aten.square.default: _square,
    aten._to_copy.default: _cast,
    aten.clamp.default: _clamp,
    aten.add.Tensor: partial(_binary, "Add", "self", "other"),
    aten.div.Tensor: partial(_binary, "Div", "self", "other"),
    aten.lt.Tensor: partial(_binary, "Less", "self", "other"),
    aten.mul.Tensor: partial(_binary, "Mul", "self", "other"),
    aten.pow.Scalar: partial(_binary, "Pow", "self", "exponent"),
    aten.rsub.Scalar: partial(_binary, "Sub", "other", "self"),
    aten.sub.Tensor: partial(_binary, "Sub", "self", "other"),
    aten.masked_fill.Scalar: _masked_fill,
    aten.mean.dim: partial(_reduce, "ReduceMean"),
    aten.sum.dim_IntList: partial(_reduce, "ReduceSum"),
    aten.softmax.int: _softmax,
    aten.layer_norm.default: _layer_norm,
    aten.linear.default: _linear,
    aten.matmul.default: partial(_binary, "MatMul", "self", "other"),
    aten.embedding.default: partial(_rows, "weight", "indices"),
    aten.index.Tensor: partial(_rows, "self", "indices"),
    aten.cat.default: _concat,
    aten.stack.default: _stack,
}
