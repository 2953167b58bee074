"""Graphs in standard torch operators only, for exporters and compilers that do not know ours.

A module is traced once, into `ink::` operators. This replaces each of them by its `Plugin.plain`;
what is left are ATen operators with the same inputs and outputs.
"""

import torch
from torch.export import ExportedProgram

from inkrt.errors import BuildError
from inkrt.plugins.registry import NAMESPACE, plugins


def to_plain(program: ExportedProgram) -> ExportedProgram:
    """The same program without operators of ours.

    Args:
        program: as `torch.export.export` gives it, with fixed or symbolic sizes.

    Raises:
        BuildError: it writes state or exchanges data between ranks, for which there are no standard
            operators.
    """
    table = {}
    for node in program.graph.nodes:
        target = node.target
        if not isinstance(target, torch._ops.OpOverload) or target.namespace != NAMESPACE:
            continue
        plugin = plugins()[target._schema.name.split("::")[1]]
        if plugin.mutates or plugin.collective:
            what = "exchanges data between ranks" if plugin.collective else "writes state"
            raise BuildError(
                f"{plugin.qualified_name}, node {node.name}: it {what} and has no form in standard "
                f"operators; only towers can be exported so"
            )
        table[target] = plugin.plain
    plain: ExportedProgram = program.run_decompositions(table)
    return plain
