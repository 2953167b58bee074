"""ink-build: make an engine from a checkpoint. Its options are the fields of BuildOptions."""

import dataclasses
import time
from pathlib import Path
from typing import Annotated

import typer

from inkrt.builder.options import BuildOptions
from inkrt.commands import console


def build(
    checkpoint: Annotated[
        Path, typer.Argument(metavar="CHECKPOINT", help="Folder as its publisher ships it.")
    ],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="ENGINE", help="Engine folder to make.")
    ] = None,
    *,
    options: BuildOptions,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Write nothing; print what the engine would need, and which GPUs hold it.",
        ),
    ] = False,
    dump_graph: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Write the graph of every step as text after every pass."),
    ] = None,
    onnx: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Write what every step has become as ONNX, one file each, without weights.",
        ),
    ] = None,
    timing_cache: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Times to choose tactics by; default: the package's."),
    ] = None,
    draft_checkpoint: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="Drafter to build in; default: what CHECKPOINT bundles."
        ),
    ] = None,
    costs: Annotated[
        bool,
        typer.Option(
            "--costs",
            help="Then measure here what drafts cost, as ink-bench engine --costs does.",
        ),
    ] = False,
    workers: Annotated[
        int, typer.Option(min=0, help="Threads that pack weights; 0: one per processor.")
    ] = 0,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print no progress.")] = False,
) -> None:
    """Make an engine from a checkpoint.

    The engine folder appears complete or not at all; the same command goes on with a build that was
    stopped. No GPU is needed.
    """
    if out is None and not dry_run:
        raise typer.BadParameter("name the engine folder with -o, or ask for --dry-run")
    if dry_run and costs:
        raise typer.BadParameter("--costs measures an engine, --dry-run makes none; leave one out")

    from inkrt.builder.build import build_engine, prepare
    from inkrt.builder.checkpoint import open_checkpoint
    from inkrt.builder.memory import GPUS, positions_left, require_fits
    from inkrt.builder.sizing import sizes_of
    from inkrt.commands import engine_text, sizing_text

    started = time.monotonic()

    def progress(line: str) -> None:
        if not quiet:
            console.say(f"[{time.monotonic() - started:6.1f} s] {line}", is_result=False)

    if out is None or dry_run:
        opened = open_checkpoint(checkpoint)
        if not opened.names and draft_checkpoint is None:
            progress("no tensors are there: sizes are those of config.json")
            options = dataclasses.replace(options, weights="dummy")
        prepared = prepare(
            opened, options, progress, dump_graph, timing_cache, draft_checkpoint, onnx
        )
        memory = prepared.memory
        sizes, scratch = sizes_of(prepared), memory.arena + memory.kept
        left = {
            gpu: [
                0 if size.refusal else positions_left(gpu, size.held + scratch, size.position)
                for size in sizes
            ]
            for gpu in GPUS
        }
        table = engine_text.memory(memory, prepared.state, prepared.plans)
        console.say("\n".join([*table, "", *sizing_text.fits(sizes, scratch, left)]))
        require_fits(memory.total, options.target, options.tp_size)
    else:
        with console.byte_meter("packing weights", is_shown=not quiet) as meter:
            build_engine(
                checkpoint,
                out,
                options,
                progress,
                dump_graph,
                timing_cache,
                draft_checkpoint,
                workers,
                meter,
                onnx,
            )
        if costs:
            from inkrt.commands.bench_speculation import keep_costs

            progress("measuring what drafts cost")
            progress(f"written: {keep_costs(out)}")


def make_app() -> typer.Typer:
    """The application."""
    app = console.make_app("ink-build", "Make an engine from a checkpoint.", variables=True)
    console.add_command(app, build, options=BuildOptions)
    return app


def main() -> None:
    """Entry point."""
    console.run(make_app())


if __name__ == "__main__":
    main()
