"""Tensor-parallel placement of collectives: sum up what row-parallel operators give in parts.

Where ranks share a weight along the dimension that its operator sums over, each rank computes a
part of the sum. The part stays in float32, an all-reduce right behind the operator adds the parts
and rounds once, and the fusions then look for a better place for it.
"""

from inkrt.builder.rewrite import arguments, calls, insert_call, set_argument
from inkrt.builder.trace import StepGraph
from inkrt.errors import BuildError

# Operators that can give partial sums, and the weight that decides it.
PARTIAL_OPS = {"linear": "weight", "experts": "down"}


def place_collectives(graph: StepGraph) -> StepGraph:
    """Make row-parallel operators partial and insert `all_reduce` behind each.

    Raises:
        BuildError: a row-parallel weight is read by no operator that can give partial sums.
    """
    if graph.tp_size == 1:
        return graph
    unplaced = set(graph.row_parallel)
    for name, weight in PARTIAL_OPS.items():
        for node in calls(graph.module.graph, name):
            parameter = graph.weights.get(arguments(node)[weight].name)
            if parameter not in graph.row_parallel:
                continue
            unplaced.discard(parameter)
            set_argument(node, "partial", True)
            readers = list(node.users)
            reduced = insert_call(
                node.next,
                "all_reduce",
                {"x": node, "dtype": graph.dtype, "tp_size": graph.tp_size},
                node,
            )
            for reader in readers:
                reader.replace_input_with(node, reduced)
    if unplaced:
        raise BuildError(
            f"row-parallel weight {min(unplaced)} is the {' or '.join(PARTIAL_OPS.values())} of no "
            f"{' or '.join(PARTIAL_OPS)} call, so its partial sums would not be added up; correct "
            f"the module"
        )
    return graph
