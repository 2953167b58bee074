"""Drop what nothing reads. Operators that write state are kept by their schema."""

from inkrt.builder.trace import StepGraph


def eliminate_dead_code(graph: StepGraph) -> StepGraph:
    """Erase calls and views whose results are unused; placeholders stay."""
    graph.module.graph.eliminate_dead_code()
    return graph
