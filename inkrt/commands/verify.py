"""ink-verify: a parity report of an engine against the reference implementation."""

import gc
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from inkrt.commands import console
from inkrt.errors import ConfigError

if TYPE_CHECKING:
    from inkrt.commands.parity import PromptReport


def verify(
    engine: Annotated[Path, typer.Argument(metavar="ENGINE", help="Engine folder, target cpu.")],
    checkpoint: Annotated[
        Path,
        typer.Argument(
            metavar="CHECKPOINT", help="Safetensors checkpoint of the weights it was built from."
        ),
    ],
    *,
    lengths: Annotated[
        str, typer.Option(help="Prompt lengths; default: around the window, and several windows.")
    ] = "",
    chunks: Annotated[
        str, typer.Option(help="Most tokens per prefill step; 0: as many as the engine takes.")
    ] = "1,3,4,7,64,0",
    decode: Annotated[int, typer.Option(help="Tokens decoded after each prompt.")] = 64,
    seed: Annotated[int, typer.Option(help="Of the random prompts.")] = 0,
    as_json: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Also write every row as JSON.")
    ] = None,
) -> None:
    """Compare an engine's logits with those of transformers.

    The first line says the bound of the model and its dtype: the largest relative error of a row,
    and how many rows of a prompt must have the same most likely token.

    In bfloat16 one rounding that falls the other way can choose another expert and move a row
    beyond any bound. If one is beyond it, all rows that differ from transformers in bfloat16 are
    compared with transformers in float32: at least 50 rows, the engine's distance from it at most
    1.3 times transformers' own in the median and twice in the mean, and as many most likely tokens
    but for chance. A float32 engine has the bound alone, which finds smaller defects.

    Exits with 1 if neither holds. Logits of rows that differ stay in memory, 8 bytes for each. The
    comparison with float32 takes a forward over every such prompt; its model has 4 bytes per
    parameter and is loaded when the engine and the bfloat16 model, of 2 bytes each, are gone.
    """
    import numpy as np
    import torch

    from inkrt.commands.parity import ParityCheck, Reference
    from inkrt.commands.rounding import compare_with_float32
    from inkrt.engines.catalog import find_definition
    from inkrt.runtime.engine import Engine

    with Engine.open(engine) as opened:
        config = opened.config
        check = ParityCheck(opened, Reference(checkpoint, config.model.dtype))
        prompt_lengths = (
            _numbers("lengths", lengths, minimum=1) if lengths else check.default_lengths(decode)
        )
        model_type = {"model_type": config.model.model_type}
        bound = find_definition(model_type).parity[config.model.dtype]
        has_rounding = config.model.dtype == "bfloat16"
        console.say(
            f"{config.model.model_type}, {config.model.dtype}, tp {config.tp_size}: relative error "
            f"of logits against transformers, bound {bound.relative_error:g}, top-1 at least "
            f"{bound.top1_agreement:.0%}"
            + ("; or as near to float32 as transformers" if has_rounding else "")
        )
        console.say(HEADER)
        reports: list[PromptReport] = []
        generator = torch.Generator().manual_seed(seed)
        for length in prompt_lengths:
            shape = (length,)
            prompt = torch.randint(config.model.vocab_size, shape, generator=generator).tolist()
            for chunk in _numbers("chunks", chunks, minimum=0):
                report = check.run(prompt, chunk or None, decode)
                reports.append(report)
                console.say(report_line(report))
    if as_json is not None:
        rows = [report.as_dict() for report in reports]
        as_json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    worst = float(np.max([report.max_relative_error for report in reports]))
    agreement = min(report.top1_agreement for report in reports)
    num_rows = sum(len(report.rows) for report in reports)
    summary = f"{num_rows} rows: worst relative error {worst:.2e}, worst top-1 {agreement:.2%}"
    holds = worst <= bound.relative_error and agreement >= bound.top1_agreement
    if not holds and has_rounding:
        # Hooks refer to the model that they hang on: only the collector frees it.
        del check
        gc.collect()
        traces = [report.trace for report in reports if report.trace is not None]
        width = max(step.num_tokens for step in config.steps)
        nearness = compare_with_float32(traces, Reference(checkpoint, "float32"), width)
        holds = nearness.is_rounding
        summary += f"; {nearness.describe()}"
    if not holds:
        console.fail(f"parity failed; {summary}", 1)
    console.say(f"parity holds; {summary}")


HEADER = (
    f"{'prompt':>6} {'chunk':>5} {'rows':>5} {'max':>8} {'mean':>8} {'max KL':>8} {'top-1':>7} "
    f"{'equal':>7}  first difference"
)


def report_line(report: "PromptReport") -> str:
    """One line of the table under HEADER."""
    where = "none"
    if report.first_divergence is not None:
        decoded, layer = report.first_divergence
        where = f"layer {layer}, " + (f"decoded token {decoded}" if decoded else "prompt")
    return (
        f"{report.prompt_tokens:>6} {report.chunk or 'whole':>5} {len(report.rows):>5} "
        f"{report.max_relative_error:>8.1e} {report.mean_relative_error:>8.1e} "
        f"{report.max_kl:>8.1e} {report.top1_agreement:>7.1%} {report.equal_rows:>7.1%}  {where}"
    )


def _numbers(name: str, text: str, *, minimum: int) -> list[int]:
    try:
        values = [int(item) for item in text.split(",")]
    except ValueError:
        values = []
    if not values or min(values) < minimum:
        raise ConfigError(f"--{name} takes integers >= {minimum} with commas, got {text!r}")
    return values


def make_app() -> typer.Typer:
    """The application."""
    app = console.make_app("ink-verify", "Parity report of an engine.")
    console.add_command(app, verify)
    return app


def main() -> None:
    """Entry point."""
    console.run(make_app())


if __name__ == "__main__":
    main()
