"""An ONNX model under construction: names of values, their types, small constants.

It knows how protos are put together, and nothing of what a graph computes. The package `onnx` is
needed by those who export only (extra `onnx`).
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.fx import Node

import inkrt
from inkrt.errors import BuildError, ConfigError

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto, ValueInfoProto

# The newest that current releases of TensorRT read too; Gelu and LayerNormalization are in it.
OPSET = 20
DOMAIN = "ai.ink"
DOMAIN_VERSION = 1

# Names of `onnx.TensorProto`'s constants.
_TYPES = {
    torch.bool: "BOOL",
    torch.uint8: "UINT8",
    torch.int32: "INT32",
    torch.int64: "INT64",
    torch.bfloat16: "BFLOAT16",
    torch.float32: "FLOAT",
}
Attribute = int | float | str | Sequence[int] | Sequence[float] | Sequence[str]


def require_onnx() -> None:
    """Check that the package `onnx` is installed.

    Raises:
        ConfigError: it is not.
    """
    try:
        import onnx  # noqa: F401
    except ModuleNotFoundError as error:
        raise ConfigError(
            "writing graphs as ONNX needs the package onnx; install it with: "
            "pip install 'inkrt[onnx]'"
        ) from error


def onnx_type(dtype: torch.dtype) -> int:
    """Number of a dtype in ONNX.

    Raises:
        BuildError: graphs of ours have no such tensors.
    """
    from onnx import TensorProto

    if dtype not in _TYPES:
        names = ", ".join(str(known).removeprefix("torch.") for known in _TYPES)
        raise BuildError(f"dtype {dtype} cannot stand in an ONNX graph of ours, only {names}")
    return int(getattr(TensorProto, _TYPES[dtype]))


class OnnxModel:
    """Nodes, values and constants so far.

    Values of graph nodes have the nodes' names; helpers in front of one have its name and a number.

    Args:
        name: of the graph.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._names: dict[Node, str] = {}
        self._nodes: list[NodeProto] = []
        self._inputs: list[ValueInfoProto] = []
        self._outputs: list[ValueInfoProto] = []
        self._values: list[ValueInfoProto] = []
        self._constants: list[Any] = []
        self._versions: dict[str, int] = {}
        self._owner = ""
        self._doc = ""

    def begin(self, owner: str, doc: str = "") -> None:
        """Nodes from here on belong to the graph node `owner`; `doc` says where that stands."""
        self._owner, self._doc = owner, doc

    def has(self, node: Node) -> bool:
        """Whether a node's value has a name."""
        return node in self._names

    def name_of(self, node: Node) -> str:
        """Name of a node's value."""
        return self._names[node]

    def set_name(self, node: Node, name: str) -> None:
        """From here on, `name` is the node's value."""
        self._names[node] = name

    def add_input(self, node: Node, name: str) -> None:
        """Declare the value of a placeholder as an input of the model."""
        self._inputs.append(_info(name, node.meta["val"]))
        self.set_name(node, name)

    def add_output(self, name: str, value: Tensor) -> None:
        """Declare a value as an output of the model."""
        self._outputs.append(_info(name, value))

    def add_value(self, name: str, value: Tensor) -> None:
        """Declare the type of a value within the model."""
        self._values.append(_info(name, value))

    def add_constant(self, value: Tensor) -> str:
        """Store a small tensor that the graph itself makes: a scalar, a shape, a range."""
        from onnx import helper

        name = f"{self._owner}.c{len(self._constants)}"
        # By bytes, because NumPy has no bfloat16.
        raw = value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        self._constants.append(
            helper.make_tensor(name, onnx_type(value.dtype), value.shape, raw, raw=True)
        )
        return name

    def add_numbers(self, numbers: Sequence[int]) -> str:
        """Store an int64 vector: a shape, or axes."""
        return self.add_constant(torch.from_numpy(np.array(numbers, dtype=np.int64)))

    def add_node(
        self, op: str, inputs: Sequence[str], outputs: Sequence[str], **attributes: Attribute
    ) -> None:
        """Add a standard operator."""
        self._add(op, "", inputs, outputs, attributes)

    def add_helper(self, op: str, inputs: Sequence[str], **attributes: Attribute) -> str:
        """Add a standard operator that makes a value in front of the owner's."""
        name = f"{self._owner}.{len(self._nodes)}"
        self._add(op, "", inputs, [name], attributes)
        return name

    def add_operator(
        self,
        op: str,
        version: int,
        inputs: Sequence[str],
        outputs: Sequence[str],
        attributes: dict[str, Attribute],
    ) -> None:
        """Add an operator of ours, in its domain; the model records its version."""
        self._versions[op] = version
        self._add(op, DOMAIN, inputs, outputs, attributes)

    def _add(
        self,
        op: str,
        domain: str,
        inputs: Sequence[str],
        outputs: Sequence[str],
        attributes: dict[str, Attribute],
    ) -> None:
        from onnx import helper

        node = helper.make_node(
            op, inputs, outputs, name=self._owner if domain else outputs[0],
            doc_string=self._doc or None, domain=domain or None,
        )  # fmt: skip
        node.attribute.extend(
            helper.make_attribute(name, value) for name, value in attributes.items()
        )
        self._nodes.append(node)

    def finish(self) -> "ModelProto":
        """The model."""
        from onnx import helper

        graph = helper.make_graph(
            self._nodes, self._name, self._inputs, self._outputs, self._constants,
            value_info=self._values,
        )  # fmt: skip
        opsets = [helper.make_opsetid("", OPSET)]
        if self._versions:
            opsets.append(helper.make_opsetid(DOMAIN, DOMAIN_VERSION))
        model = helper.make_model(
            graph,
            opset_imports=opsets,
            producer_name="inkrt",
            producer_version=inkrt.__version__,
            ir_version=helper.find_min_ir_version_for(opsets[:1]),
        )
        versions = {
            f"{DOMAIN}.{op}": str(version) for op, version in sorted(self._versions.items())
        }
        helper.set_model_props(model, versions)
        return model


def _info(name: str, value: Tensor) -> "ValueInfoProto":
    from onnx import helper

    return helper.make_tensor_value_info(name, onnx_type(value.dtype), list(value.shape))
