"""ink-verify: a parity report of an engine against the reference implementation."""

import dataclasses
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

    Exits with 1 if a row's relative error exceeds the bound of the model and its dtype, which the
    first line says, or if the most likely tokens of a prompt agree less often than they must.
    """
    import torch

    from inkrt.commands.parity import ParityCheck, Reference
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
        console.say(
            f"{config.model.model_type}, {config.model.dtype}, tp {config.tp_size}: relative error "
            f"of logits against transformers, bound {bound.relative_error:g}, top-1 at least "
            f"{bound.top1_agreement:.0%}"
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
        rows = [dataclasses.asdict(report) for report in reports]
        as_json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    worst = max(report.max_relative_error for report in reports)
    agreement = min(report.top1_agreement for report in reports)
    num_rows = sum(len(report.rows) for report in reports)
    summary = f"{num_rows} rows: worst relative error {worst:.2e}, worst top-1 {agreement:.2%}"
    if worst > bound.relative_error or agreement < bound.top1_agreement:
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
