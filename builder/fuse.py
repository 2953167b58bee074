"""All passes of a build over one graph, and the texts of what each made of it."""

from collections.abc import Sequence
from pathlib import Path

from inkrt.builder.dump import write_graph
from inkrt.builder.passes import Pass
from inkrt.builder.trace import StepGraph


def fuse(graph: StepGraph, passes: Sequence[Pass], dump_folder: Path | None) -> StepGraph:
    """A graph after all passes, written to files after each if a folder is given."""
    if dump_folder is not None:
        write_graph(dump_folder, 0, "traced", graph)
    for number, run_pass in enumerate(passes, start=1):
        graph = run_pass(graph)
        graph.module.graph.lint()
        if dump_folder is not None:
            write_graph(dump_folder, number, run_pass.__name__, graph)
    return graph
